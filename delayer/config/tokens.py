"""The tokens for HTTP: a file with one on each line, with its name and its role.

shop     publish  sha256:2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824
grafana  read     mZx0Rk3vH8yqT1sLw5
"""

from __future__ import annotations

import hashlib
import re
from enum import StrEnum
from typing import Final, NamedTuple

from delayer.core.secret import Secret

HASHED: Final = "sha256:"
"""Stands before the hash of a token, 64 hexadecimal digits, in place of the token."""
SHORTEST: Final = 16
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HASH: Final = re.compile(r"[0-9A-Fa-f]{64}")
_LINE: Final = f"NAME ROLE TOKEN, or {HASHED} and the hash of the token"


class Role(StrEnum):
    """What a token may do."""

    READ = "read"
    """List and show."""
    PUBLISH = "publish"
    """Send messages. It does not read those of others."""
    ACT = "act"
    """Both, and all changes."""

    def allows(self, needed: Role) -> bool:
        """
        >>> Role.ACT.allows(Role.PUBLISH), Role.PUBLISH.allows(Role.READ)
        (True, False)
        """
        return self in (needed, Role.ACT)


class NamedToken(NamedTuple):
    """``digest``: its SHA-256. ``plain``: the token itself, if the file has it."""

    name: str
    role: Role
    digest: bytes
    plain: Secret | None = None


class TokenFile(NamedTuple):
    """The tokens, and the mistakes: of each the number of its line, and what is expected there. Their texts never show
    a part of a token."""

    tokens: tuple[NamedToken, ...] = ()
    mistakes: tuple[tuple[int, str], ...] = ()


def digest_of(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def parse_tokens(text: str) -> TokenFile:
    """Read the file's text. A line with a mistake has no token; the others count.

    >>> parse_tokens("# ours\\nshop publish only-to-try-it-out\\nshop admin x").mistakes
    ((3, 'a role of read, publish, act'),)
    """
    found: dict[str, NamedToken] = {}
    wrong: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not (words := line.split()) or words[0].startswith("#"):
            continue
        if mistake := _mistake(words) or ("a name that no line above has" if words[0] in found else ""):
            wrong.append((number, mistake))
            continue
        name, role, token = words
        if token.startswith(HASHED):
            found[name] = NamedToken(name, Role(role), bytes.fromhex(token.removeprefix(HASHED)))
        else:
            found[name] = NamedToken(name, Role(role), digest_of(token), Secret(token))
    return TokenFile(tuple(found.values()), tuple(wrong))


def _mistake(words: list[str]) -> str:
    if len(words) != 3:
        return _LINE
    name, role, token = words
    if not _NAME.fullmatch(name):
        return "a name of 1 to 64 letters, digits and ._@-, the first a letter or a digit"
    if role not in [*Role]:
        return f"a role of {', '.join(Role)}"
    if token.startswith(HASHED):
        return "" if _HASH.fullmatch(token.removeprefix(HASHED)) else f"64 hexadecimal digits after {HASHED}"
    return (
        ""
        if len(token) >= SHORTEST and token.isascii() and token.isprintable()
        else f"a token of at least {SHORTEST} printable ASCII characters"
    )
