"""What came from outside, as a text for people that cannot forge a line, steer a terminal, or show a password."""

from __future__ import annotations

import re

from delayer.settings.secret import mask

_LONGEST_BYTES = 512
_LONGEST_TEXT = 16_384
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")
_UNPRINTABLE_BUT_LINES = re.compile(r"[^\x20-\x7e\n\t]")


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def readable(value: str | bytes | bytearray | memoryview, *, keep_lines: bool = False) -> str:
    """One printable line: bytes that are no UTF-8 and characters that do not print as escapes, passwords masked."""
    if isinstance(value, bytes | bytearray | memoryview):
        whole = bytes(value)
        rest = len(whole) - _LONGEST_BYTES
        value = whole[:_LONGEST_BYTES].decode("utf-8", "backslashreplace") + (f"… ({rest} more bytes)" * (rest > 0))
    elif len(value) > _LONGEST_TEXT:
        value = value[:_LONGEST_TEXT] + f"… ({len(value) - _LONGEST_TEXT} more characters)"
    value = mask(value)
    return (_UNPRINTABLE_BUT_LINES if keep_lines else _UNPRINTABLE).sub(_escape, value)
