"""Doing something to many messages: those of a list of names, or all of a filter; counted first, then in portions.

Each portion is one transaction, with its share of the act in the audit trail: an interruption leaves whole portions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, NamedTuple, TypeVar

import asyncpg

from delayer.core.filters import Filter, Token
from delayer.core.seen import Seen
from delayer.store import cancelling, listing, rescheduling, schema, segments, session
from delayer.store.cancelling import Dues, Found
from delayer.store.errors import WORTH_REPEATING, translated
from delayer.store.listing import BEGINNING, SETTINGS, Test
from delayer.store.rescheduling import When

T = TypeVar("T")
PORTION: Final = 1000
SCAN: Final = 100_000
"""Rows that are read for one portion at most; then it goes on with the next."""
ATTEMPTS: Final = 20
"""How often a portion is tried that loses against other transactions."""

Do = Callable[[asyncpg.Connection, Collection[int], Dues, int], Awaitable[dict[int, Found]]]
"""Cancel or move messages by id; in one transaction."""


class Counted(NamedTuple):
    """How many messages are meant. ``broken``: segments that do not read back and may hold more."""

    messages: int
    broken: int


@asynccontextmanager
async def acting(url: str, doing: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection to change the store with. Raises StoreLost, BadStoreUrl, SchemaOutdated."""
    connection = await session.connect(url, "delayer act", SETTINGS)
    try:
        with translated(doing):
            await schema.check(connection)
            yield connection
    finally:
        await session.close(connection)


def canceller() -> Do:
    return cancelling.cancel


def rescheduler(when: When) -> Do:
    async def move(connection: asyncpg.Connection, ids: Collection[int], dues: Dues, act: int) -> dict[int, Found]:
        return await rescheduling.reschedule(connection, ids, when, dues, act)

    return move


async def named(connection: asyncpg.Connection, do: Do, tokens: Sequence[Token], act: int) -> dict[int, Found]:
    """Do it to the messages of these names. Raises the driver's errors."""
    found: dict[int, Found] = {}
    for start in range(0, len(tokens), PORTION):
        some = tokens[start : start + PORTION]
        dues = {token.id: token.due_ms for token in some if token.due_ms is not None}
        ids = [token.id for token in some]
        found |= await patiently(partial(do, connection, ids, dues, act))
    return found


async def whereabouts(connection: asyncpg.Connection, tokens: Sequence[Token]) -> dict[int, Found]:
    """Where :func:`named` would meet them; nothing is done to them. Raises the driver's errors."""
    found: dict[int, Found] = {}
    for start in range(0, len(tokens), PORTION):
        some = tokens[start : start + PORTION]
        entries, broken = await listing.named(connection, some)
        held = await connection.fetch("SELECT id FROM held WHERE id = ANY($1)", [token.id for token in some])
        found |= dict.fromkeys((token.id for token in some), Found.UNREADABLE if broken else Found.NOWHERE)
        found |= {one.place.id: Found.WAITING if one.place.segment is None else Found.SEGMENT for one in entries}
        found |= dict.fromkeys((number for (number,) in held), Found.HELD)
    return found


async def every(
    connection: asyncpg.Connection,
    do: Do,
    wanted: Filter,
    test: Test | None,
    *,
    act: int,
    say: Callable[[int], None],
) -> Counter[Found]:
    """Do it to every waiting message of ``wanted``. ``say`` hears how many it were so far.

    Raises the driver's errors.
    """
    done: Counter[Found] = Counter()
    # What was moved to a later instant is met again.
    seen = Seen()
    after: tuple[int, int] | None = BEGINNING
    while after is not None:
        found = await listing.find(connection, wanted, test, PORTION, after, scan=SCAN)
        dues = {place.id: place.due_us // 1000 for place in found.places if place.id not in seen}
        if dues:
            done.update((await patiently(partial(do, connection, list(dues), dues, act))).values())
            say(done.total() - done[Found.NOWHERE] - done[Found.UNREADABLE])
        if do is not cancelling.cancel:
            seen.update(dues)
        after = found.after
    return done


async def patiently(work: Callable[[], Awaitable[T]]) -> T:
    """Again, where it lost against another transaction: a release, or somebody who replaces several keyed messages."""
    for _ in range(ATTEMPTS - 1):
        try:
            return await work()
        except WORTH_REPEATING:
            continue
    return await work()


async def count(connection: asyncpg.Connection, wanted: Filter, test: Test | None) -> Counted:
    """How many messages are meant, on one snapshot where SQL can say it. Raises the driver's errors."""
    if wanted.key is not None or test is not None:
        return await _count_one_by_one(connection, wanted, test)
    first_ms = session.BEGINNING_MS if wanted.due_from_ms is None else wanted.due_from_ms
    last_ms = segments.FOREVER_MS if wanted.due_before_ms is None else wanted.due_before_ms
    terms, given = listing.conditions(wanted, first=3)
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        # Ten million rows may have to be read, by whatever plan suits that.
        await connection.execute("SET LOCAL statement_timeout = 0; SET LOCAL enable_seqscan = on")
        rows = await connection.fetchval(
            f"SELECT count(*) FROM message WHERE due_at >= $1 AND due_at < $2 AND {terms}",
            first_ms,
            last_ms,
            *given,
            timeout=None,
        )
        inside, broken = await _count_in_segments(connection, wanted, first_ms, last_ms)
    return Counted(rows + inside, broken)


async def _count_in_segments(
    connection: asyncpg.Connection, wanted: Filter, first_ms: int, last_ms: int
) -> tuple[int, int]:
    rows = await connection.fetch(
        "SELECT id, messages - cancelled, first_due >= $1 AND last_due < $2 FROM segment"
        " WHERE last_due >= $1 AND first_due < $2",
        first_ms,
        last_ms,
    )
    messages = broken = 0
    for segment, live, whole in rows:
        if whole and not wanted.narrow:
            messages += live
            continue
        found = await listing.entries_of(connection, segment)
        broken += found is None
        messages += sum(listing.meant(entry, wanted, None) for entry in found or ())
    return messages, broken


async def _count_one_by_one(connection: asyncpg.Connection, wanted: Filter, test: Test | None) -> Counted:
    messages = 0
    broken: set[int] = set()
    after: tuple[int, int] | None = BEGINNING
    while after is not None:
        found = await listing.find(connection, wanted, test, PORTION, after, scan=SCAN)
        messages += len(found.places)
        broken |= set(found.broken)
        after = found.after
    return Counted(messages, len(broken))
