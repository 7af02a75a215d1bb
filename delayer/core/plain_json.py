"""JSON that any terminal may be shown. Pure."""

from __future__ import annotations

import re
from typing import Final

_UNPRINTED: Final = re.compile("[^\n -~]")


def escaped(text: str) -> str:
    r"""The same JSON with what does not print (DEL, C1 controls, marks that turn the direction) as ``\uXXXX``.

    Such characters stand in strings only, where the two spellings mean the same; ours end lines between them.

    >>> escaped('"a\u202eb\x9b"')
    '"a\\u202eb\\u009b"'
    """
    return _UNPRINTED.sub(_spelled, text)


def _spelled(match: re.Match[str]) -> str:
    character = match[0]
    if character.isprintable():
        return character
    code = ord(character)
    if code < 0x10000:
        return f"\\u{code:04x}"
    high, low = divmod(code - 0x10000, 0x400)
    return f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}"
