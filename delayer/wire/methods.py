"""The rare methods, through pamqp's classes."""

from __future__ import annotations

import struct

from pamqp import commands, frame
from pamqp.base import Frame
from pamqp.exceptions import UnmarshalingException

from delayer.wire.errors import SYNTAX_ERROR, ProtocolError

__all__ = ["commands", "marshal", "unmarshal"]


def marshal(method: Frame, channel: int) -> bytes:
    """A method frame."""
    return frame.marshal(method, channel)


def unmarshal(whole: bytes) -> Frame:
    """The method in a method frame. Raises ProtocolError for what pamqp cannot read."""
    try:
        _, _, method = frame.unmarshal(whole)
    except (
        UnmarshalingException,
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        RecursionError,
        struct.error,
    ) as broken:
        raise ProtocolError(SYNTAX_ERROR, f"unreadable method {whole[7:11].hex()}: {broken}") from broken
    if not isinstance(method, Frame):
        raise ProtocolError(SYNTAX_ERROR, f"expected a method, found {type(method).__name__}")
    return method
