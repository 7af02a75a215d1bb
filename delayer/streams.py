"""The standard streams, where somebody closed one before we began."""

from __future__ import annotations

import os
import sys
from typing import Final

_STREAMS: Final = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_closed() -> None:
    """Put /dev/null where a stream was closed. The next thing that is opened would get its number, and what somebody
    writes to stderr by that number, a library that aborts, say, would go to the broker."""
    for name, mode in _STREAMS:
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest one that is free, which is this stream's
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))
