"""URLs with passwords, and tokens: masked in output, revealed only to connect or compare. People do not escape the
characters in a password that divide a URL. So output has only parts that cannot belong to a password in any reading."""

from __future__ import annotations

import re
from typing import Final

HIDDEN: Final = "***"

AS_PARAMETER: Final = re.compile(
    r"""(?i)\b((?:\w*password|passwd|passphrase|pwd|secret|token)\s*=\s*)((?:'[^']*'|"[^"]*")\S*|\S+)"""
)
_HOST = r"(\[[0-9A-Fa-f:.]*\]|[\w.-]*)"
# No part can come from an unescaped password, because such a password has one of the characters that divide a URL.
# Without an @, only digits follow the first colon, as all behind it could be a password.
_URL = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]{0,20}:/+)(?!/)((?P<user>[\w.%+-]{0,64})(?P<password>:[^\s:@/?#]*)?@)?"
    rf"(?P<place>({_HOST}(:[0-9]*)?|{_HOST}(,{_HOST})+(:[0-9]+)?|(?<=@){_HOST}(:[0-9]+)?(,{_HOST}(:[0-9]+)?)+)"
    r"(/[^@?#&;=]*)?)(?P<behind>[?#&;=][^@]*)?",
    re.ASCII,
)


def concealed(given: str) -> str:
    """Show scheme, user, host, port and path of a possible URL; nothing if a password could extend into these.

    >>> concealed("amqp://me:password@host:5672/vhost?heartbeat=5")
    'amqp://me:***@host:5672/vhost?***'
    >>> concealed("amqp://me:pass word@host"), concealed("me:password@host:/"), concealed("host=h password=a b")
    ('***', '***', 'host=h password=***')
    >>> concealed("postgresql://me:pass,word@a:5432,[::1]:5433,b/db"), concealed("postgresql://me@a,b")
    ('postgresql://me:***@a:5432,[::1]:5433,b/db', 'postgresql://me@a,b')
    >>> concealed("postgresql://a,b:5432/db"), concealed("postgresql://me:12,word"), concealed("amqp://me:pw%40host")
    ('postgresql://a,b:5432/db', '***', '***')
    >>> concealed("postgresql://me:p@ss,word@a,b"), concealed("amqp://me@a,amqp://me:pw"), concealed("x://me:1,p:w@a,b")
    ('***', '***', '***')
    """
    if ":/" not in given and not 0 <= given.find(":") < given.rfind("@"):
        parameter = AS_PARAMETER.search(given)
        return given if parameter is None else given[: parameter.end(1)] + HIDDEN
    url = _URL.fullmatch(given)
    if url is None:
        return HIDDEN
    login = "" if url["user"] is None else url["user"] + (f":{HIDDEN}@" if url["password"] else "@")
    return url["scheme"] + login + url["place"] + (url["behind"][0] + HIDDEN if url["behind"] else "")


class Secret:
    """A text that never prints; :meth:`reveal` returns it."""

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
    """A URL that prints with its password masked; :meth:`reveal` returns the whole URL."""

    __slots__ = ()

    def __str__(self) -> str:
        return concealed(self._text)


class SecretUrls(SecretUrl):
    """URLs that are separated by commas. A comma within one of them is written %2C."""

    __slots__ = ()

    def __str__(self) -> str:
        return ", ".join(map(concealed, self._text.split(",")))
