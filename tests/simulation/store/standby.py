"""What a session of a hot standby asks and is told, where the simulated one differs from the primary that it is. Pure.

The server behind it would accept writes, so the session is read-only whatever its client sets."""

from __future__ import annotations

from enum import Enum
from typing import Final


class Role(Enum):
    """What is at an address. ``STARTING``: a server that takes no session yet. ``AWAY``: nothing listens."""

    PRIMARY = 1
    STANDBY = 2
    STARTING = 3
    AWAY = 4


_READ_ONLY: Final = b"default_transaction_read_only\0on\0"
_REPORTED: Final = b"in_hot_standby\0off\0", b"in_hot_standby\0on\0"
_ASKED: Final = {
    # Each has the length of what it replaces, which the message states.
    b"pg_is_in_recovery()": b"(SELECT true)      ",
    b"default_transaction_read_only = 'off'": b"default_transaction_read_only = 'on' ",
}


def begun(startup: bytes) -> bytes:
    """The first message of a session, which becomes read-only."""
    content = startup[4:-1] + _READ_ONLY + b"\0"
    return (len(content) + 4).to_bytes(4) + content


def asked(request: bytes) -> bytes:
    for text, replacement in _ASKED.items():
        request = request.replace(text, replacement)
    return request


def answered(answer: bytes) -> bytes:
    primary, standby = (b"S" + (len(text) + 4).to_bytes(4) + text for text in _REPORTED)
    return answer.replace(primary, standby)


def _error(code: bytes, text: bytes) -> bytes:
    content = b"SFATAL\0VFATAL\0C" + code + b"\0M" + text + b"\0\0"
    return b"E" + (len(content) + 4).to_bytes(4) + content


STARTING: Final = _error(b"57P03", b"the database system is starting up")
"""The answer of a server that does not take sessions yet."""
