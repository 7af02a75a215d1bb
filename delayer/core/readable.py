"""Texts from outside, made printable. Pure."""

from __future__ import annotations

import re

from delayer.core.secret import mask

_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")
_UNPRINTABLE_BUT_LINES = re.compile(r"[^\x20-\x7e\n\t]")


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def readable(
    value: str | bytes | bytearray | memoryview, *, keep_lines: bool = False, most_bytes: int = 512, most: int = 16_384
) -> str:
    """``value`` as one printable line: other bytes and characters as escapes, passwords masked."""
    if isinstance(value, bytes | bytearray | memoryview):
        whole = bytes(value)
        rest = len(whole) - most_bytes
        value = whole[:most_bytes].decode("utf-8", "backslashreplace") + (f"… ({rest} more bytes)" * (rest > 0))
    elif len(value) > most:
        value = value[:most] + f"… ({len(value) - most} more characters)"
    value = mask(value)
    return (_UNPRINTABLE_BUT_LINES if keep_lines else _UNPRINTABLE).sub(_escape, value)
