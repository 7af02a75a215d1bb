"""URLs with passwords, and tokens: masked in output, revealed only to connect or compare.

People write passwords into URLs unescaped, with the very characters that divide a URL. So the output contains only
parts that cannot belong to a password under any reading; in doubt it contains less.
"""

from __future__ import annotations

import re
from typing import Final

HIDDEN: Final = "***"

AS_PARAMETER = re.compile(
    r"""(?i)\b((?:\w*password|passwd|passphrase|pwd|secret|token)\s*=\s*)((?:'[^']*'|"[^"]*")\S*|\S+)"""
)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{0,20}:/+")
_LOGIN = re.compile(":.*@", re.DOTALL)
_BEHIND_THE_PATH = re.compile("[?#&;=]")
_USER = re.compile(r"[\w.%+-]{0,64}", re.ASCII)
_NAME = re.compile(r"[\w.-]*", re.ASCII)
_PLACE = re.compile(r"(\[[0-9A-Fa-f:.]*\]|[\w.-]*)(:[0-9]*)?", re.ASCII)


def concealed(given: str) -> str:
    """The printable parts of a text that may be a URL: scheme, user, host, port and path, unless a password could
    extend into them.

    >>> concealed("amqp://me:pass word@host:5672/vhost?heartbeat=5")
    'amqp://me:***@host:5672/vhost?***'
    >>> concealed("amqp://me:pa?ss@host"), concealed("me:password@host:/"), concealed("host=h password=a b")
    ('amqp://***', '***', 'host=h password=***')
    """
    if ":/" not in given and not _LOGIN.search(given):
        parameter = AS_PARAMETER.search(given)
        return given if parameter is None else given[: parameter.end(1)] + HIDDEN
    scheme = _SCHEME.match(given)
    if scheme is None:
        return HIDDEN
    rest = given[scheme.end() :]
    cut = _BEHIND_THE_PATH.search(rest)
    head, behind = (rest, "") if cut is None else (rest[: cut.start()], rest[cut.start() :])
    if "@" in behind:
        return scheme[0] + HIDDEN  # All of it may belong to a password.
    login, at, place = head.rpartition("@")
    return scheme[0] + _login(login, at) + _place(place, at) + (behind[:1] + HIDDEN if behind else "")


def _login(login: str, at: str) -> str:
    user, colon, _ = login.partition(":")
    if not _USER.fullmatch(user):
        return HIDDEN + at
    return f"{user}:{HIDDEN}{at}" if colon else user + at


def _place(place: str, at: str) -> str:
    """The printable part of host and path. Without an "@" the host may be a user, and the port a password."""
    host = place.partition("/")[0]
    if at or _PLACE.fullmatch(host):
        return place
    name, colon, _ = host.partition(":")
    return f"{name}:{HIDDEN}" if colon and _NAME.fullmatch(name) else HIDDEN


class Secret:
    """A text that never prints. :meth:`reveal` returns it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __str__(self) -> str:
        return HIDDEN

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)


class SecretUrl(Secret):
    """A URL that prints with its password masked. :meth:`reveal` returns the whole URL."""

    __slots__ = ()

    def __str__(self) -> str:
        return concealed(self._text)
