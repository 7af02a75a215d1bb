"""The rare methods, through pamqp's classes."""

from __future__ import annotations

import struct

from pamqp import commands, frame
from pamqp.base import Frame
from pamqp.exceptions import UnmarshalingException

from delayer.amqp.errors import SYNTAX_ERROR, UNEXPECTED_FRAME, ProtocolError

_CLOSES = {close.index: close for close in (commands.Connection.Close, commands.Channel.Close)}
_UNREADABLE = (
    UnmarshalingException,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    RecursionError,
    struct.error,
)

_ORIGIN = struct.Struct(">HH")

__all__ = ["clipped", "commands", "marshal", "unmarshal"]


def marshal(method: Frame, channel: int) -> bytes:
    """A method frame."""
    return frame.marshal(method, channel)


def clipped(text: str) -> str:
    """As much of a text as a short string holds: 255 bytes of UTF-8."""
    return text.encode()[:255].decode("utf-8", "ignore")


def unmarshal(whole: bytes) -> Frame:
    """The method in a method frame. Raises ProtocolError for what cannot be read."""
    index = int.from_bytes(whole[7:11], "big")
    if index == commands.Basic.RecoverAsync.index:  # pamqp would read it, and warn that it is deprecated
        raise ProtocolError(UNEXPECTED_FRAME, "Basic.RecoverAsync, which only clients send")
    close = _CLOSES.get(index)
    if close is not None and len(whole) > 13:
        # Brokers clip the text at 255 bytes, perhaps in the middle of a letter, which pamqp would not read.
        text_end = 14 + whole[13]
        if len(whole) != text_end + 5:
            raise ProtocolError(SYNTAX_ERROR, f"close of {len(whole) - 12} bytes")
        text = whole[14:text_end].decode("utf-8", "replace")
        class_id, method_id = _ORIGIN.unpack_from(whole, text_end)
        return close(int.from_bytes(whole[11:13], "big"), text, class_id, method_id)
    try:
        _, _, method = frame.unmarshal(whole)
    except _UNREADABLE as broken:
        raise ProtocolError(SYNTAX_ERROR, f"unreadable method {whole[7:11].hex()}: {broken}") from broken
    if not isinstance(method, Frame):
        raise ProtocolError(SYNTAX_ERROR, f"expected a method, found {type(method).__name__}")
    return method
