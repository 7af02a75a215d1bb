"""One message in full: where it is, and everything that the store has about it."""

from __future__ import annotations

import shlex
from enum import Enum
from typing import Final, NamedTuple

from asyncpg import Connection

from delayer.core.filters import HOW_TO_NAME, OWN, Token
from delayer.core.readable import instant
from delayer.format.reading import address
from delayer.store import held_messages, statements, waiting
from delayer.store.held_messages import HeldState
from delayer.store.waiting import Entry


class FoundIn(Enum):
    WAITING = "waiting"
    HELD = "held"
    SEGMENT = "segment"
    NOWHERE = "nowhere"
    UNREADABLE = "unreadable"
    """In an unreadable segment."""


ABSENT: Final = (FoundIn.NOWHERE, FoundIn.UNREADABLE)


def describe_absence(name: Token | str, found: FoundIn) -> str:
    """Why the message of this name is not here, in a sentence. Pure."""
    if found is FoundIn.UNREADABLE:
        return f"{name} may be in an unreadable segment: see docs/backlog.md."
    quoted, subject = shlex.quote(str(name)), str(name)
    advice = f" If it was refused, `delayer refused list {quoted}` shows it."
    if isinstance(name, Token) and name.due_ms is not None:
        advice = " If it was rescheduled, try the part before the @."
    elif not subject.startswith(OWN):
        subject = f"message_id {name}"
        advice += f" {HOW_TO_NAME} For a key use `delayer list --delay-key {quoted}`."
    return f"{subject} is not in the store: it was delivered, cancelled, replaced, refused, or never parked.{advice}"


class FullMessage(NamedTuple):
    """A message with its body, or the beginning of the body."""

    where: FoundIn
    entry: Entry
    held: HeldState | None
    owner: str
    """The lane's owner, or its last owner."""
    owned: bool


_OWNER: Final = f"SELECT owner, {statements.IS_OWNED} FROM lane AS l WHERE number = $1"


WHOLE: Final = (1 << 31) - 1


async def find_message(connection: Connection, token: Token, most: int = WHOLE) -> FullMessage | FoundIn:
    """Find the message of this name, on one snapshot. NOWHERE if there is none, UNREADABLE if its segment is. Truncates
    the body to ``most`` bytes. Raises the driver's errors."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        if held := await held_messages.find_by_id(connection, [token.id], most):
            return await _with_owner(connection, FoundIn.HELD, *held[0])
        found, broken = await waiting.find_by_id(connection, [token], most)
        if found:
            where = FoundIn.WAITING if found[0].place.segment is None else FoundIn.SEGMENT
            return await _with_owner(connection, where, found[0])
        return FoundIn.UNREADABLE if broken else FoundIn.NOWHERE


async def _with_owner(
    connection: Connection, where: FoundIn, entry: Entry, held: HeldState | None = None
) -> FullMessage:
    name, owned = await connection.fetchrow(_OWNER, entry.place.lane) or ("", False)
    return FullMessage(where, entry, held, name, owned)


def predict(found: FullMessage) -> str:
    """Predict what happens to a message, as a sentence without its capital and full stop. Pure."""
    to = address(found.entry.to_exchange, found.entry.to_key)
    if found.entry.sound is False:
        return "it is held when it is due: its bytes do not match their checksum, or their format is of a newer delayer"
    if found.held is not None and found.held.retry_ms is None:
        return f"nothing until an operator runs `delayer held retry`; then it is published to {to}"
    if found.held is not None and found.held.retry_ms is not None:
        return f"it is published to {to} again at {instant(found.held.retry_ms)}: attempt {found.held.attempts + 1}"
    who = f"by {found.owner}" if found.owned else "by the daemon that takes its lane"
    if found.where is FoundIn.SEGMENT:
        who = "after a daemon has restored its segment"
    return f"it is published to {to} at {instant(found.entry.place.due_ms)}, {who}"
