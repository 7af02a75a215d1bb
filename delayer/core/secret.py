"""URLs with passwords in them, and tokens: shown masked, revealed only to those who connect, or compare.

People write passwords into URLs as they are, with the very characters that divide a URL. So what is shown is not the
rest of a URL without its password, but what cannot be a piece of one, however it is spelled: in doubt less.
"""

from __future__ import annotations

import re
from typing import Final

HIDDEN: Final = "***"

# The password runs to the last "@" before a blank: a password with an unescaped "/" or "@" in it is a mistake that
# people make, and must not be half shown. Two URLs glued together lose the text between them; that is the price.
# One "/" is enough: a URL that went through a file path has lost the other.
_IN_AUTHORITY = re.compile(r"(:/+[^\s:@/?#]*):[^\s]*@")
_AS_PARAMETER = re.compile(
    r"""(?i)\b((?:\w*password|passwd|passphrase|pwd|secret|token)\s*=\s*)((?:'[^']*'|"[^"]*")\S*|\S+)"""
)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{0,20}:/+")
_LOGIN = re.compile(":.*@", re.DOTALL)
_BEHIND_THE_PATH = re.compile("[?#&;=]")
_USER = re.compile(r"[\w.%+-]{0,64}", re.ASCII)
_NAME = re.compile(r"[\w.-]*", re.ASCII)
_PLACE = re.compile(r"(\[[0-9A-Fa-f:.]*\]|[\w.-]*)(:[0-9]*)?", re.ASCII)


def mask(text: str) -> str:
    """``text`` with every password in it as ``***``: in URLs, and as ``password=…``. For texts that others wrote, about
    URLs that hold no blanks; what a person gave is :func:`concealed`."""
    if ":/" in text:
        text = _IN_AUTHORITY.sub(rf"\1:{HIDDEN}@", text)
    if "=" in text:
        text = _AS_PARAMETER.sub(rf"\1{HIDDEN}", text)
    return text


def concealed(given: str) -> str:
    """What of a text that should be a URL, or may be one, can be shown: scheme, user, host, port and path, as far as no
    password can reach into them.

    >>> concealed("amqp://me:pass word@host:5672/vhost?heartbeat=5")
    'amqp://me:***@host:5672/vhost?***'
    >>> concealed("amqp://me:pa?ss@host"), concealed("me:password@host:/"), concealed("host=h password=a b")
    ('amqp://***', '***', 'host=h password=***')
    """
    if ":/" not in given and not _LOGIN.search(given):
        said = _AS_PARAMETER.search(given)
        return given if said is None else given[: said.end(1)] + HIDDEN
    scheme = _SCHEME.match(given)
    if scheme is None:
        return HIDDEN
    rest = given[scheme.end() :]
    cut = _BEHIND_THE_PATH.search(rest)
    head, behind = (rest, "") if cut is None else (rest[: cut.start()], rest[cut.start() :])
    if "@" in behind:
        return scheme[0] + HIDDEN  # perhaps all of it is in a password
    login, at, place = head.rpartition("@")
    return scheme[0] + _login(login, at) + _place(place, at) + (behind[:1] + HIDDEN if behind else "")


def _login(login: str, at: str) -> str:
    user, colon, _ = login.partition(":")
    if not _USER.fullmatch(user):
        return HIDDEN + at
    return f"{user}:{HIDDEN}{at}" if colon else user + at


def _place(place: str, at: str) -> str:
    """Where no "@" is before it a host may be a user, and what is no port a password."""
    host = place.partition("/")[0]
    if at or _PLACE.fullmatch(host):
        return place
    name, colon, _ = host.partition(":")
    return f"{name}:{HIDDEN}" if colon and _NAME.fullmatch(name) else HIDDEN


class SecretUrl:
    """A URL that prints with its password masked. :meth:`reveal` gives the whole of it."""

    __slots__ = ("_url",)

    def __init__(self, url: str) -> None:
        self._url = url

    def reveal(self) -> str:
        return self._url

    def __str__(self) -> str:
        return concealed(self._url)

    def __repr__(self) -> str:
        return f"SecretUrl({concealed(self._url)!r})"

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
        return HIDDEN

    def __repr__(self) -> str:
        return f"Secret({HIDDEN!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)
