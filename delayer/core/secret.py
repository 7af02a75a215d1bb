"""URLs with passwords in them, and tokens: shown masked, revealed only to those who connect, or compare."""

from __future__ import annotations

import re

# The password runs to the last "@" before a blank: a password with an unescaped "/" or "@" in it is a mistake that
# people make, and must not be half shown. Two URLs glued together lose the text between them; that is the price.
# One "/" is enough: a URL that went through a file path has lost the other.
_IN_AUTHORITY = re.compile(r"(:/+[^\s:@/?#]*):[^\s]*@")
_AS_PARAMETER = re.compile(r"""(?i)\b((?:\w*password|passwd|secret|token)\s*=\s*)('[^']*'|"[^"]*"|[^\s&,;'"]+)""")


def mask(text: str) -> str:
    """``text`` with every password in it as ``***``: in URLs, and as ``password=…``."""
    if ":/" in text:
        text = _IN_AUTHORITY.sub(r"\1:***@", text)
    if "=" in text:
        text = _AS_PARAMETER.sub(r"\1***", text)
    return text


class SecretUrl:
    """A URL that prints with its password masked. :meth:`reveal` gives the whole of it."""

    __slots__ = ("_url",)

    def __init__(self, url: str) -> None:
        self._url = url

    def reveal(self) -> str:
        return self._url

    def __str__(self) -> str:
        return mask(self._url)

    def __repr__(self) -> str:
        return f"SecretUrl({mask(self._url)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SecretUrl) and other._url == self._url

    def __hash__(self) -> int:
        return hash(self._url)


class Secret:
    """A text that never prints. :meth:`reveal` gives it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __str__(self) -> str:
        return "***"

    def __repr__(self) -> str:
        return "Secret('***')"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)
