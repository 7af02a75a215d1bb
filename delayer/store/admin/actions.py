"""Cancels and reschedules by hand: of messages by id, of held ones too, and of all that a filter means.

A message is in one place at any moment, but may go from one to the next between two of our statements: compacted,
restored, held, moved to another partition. The process that moves it holds a lock on its row or its segment. So a
message that we locked stays; where one slipped away, a lock was waited for or the list of segments changed, and we
look again. A message that is being released is waited for: then it is gone, or ours.

Locks are taken in the order of keys.py, and those of segments after the held rows: keys' advisory locks, messages'
rows, held rows, segments by id, rows of message_key, the counters.

Many messages are changed in portions, each one transaction with its share in the audit log: an interruption leaves
whole portions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import asyncpg

from delayer.core.filters import Filter, Token
from delayer.core.seen import Seen
from delayer.store import pool, schema, statements
from delayer.store.admin import audit_log, listing
from delayer.store.admin.listing import BEGINNING, NO_DUES, SETTINGS, Dues, Test
from delayer.store.errors import WORTH_REPEATING, translated
from delayer.store.lanes.notify import notify
from delayer.store.rows.keys import forget, lock_keys
from delayer.store.segments import catalog

LOOKS: Final = 10
"""How often everything is looked through for messages that slip away. Twice is rare."""


class Found(Enum):
    """Where a cancel met a message."""

    WAITING = "waiting"
    HELD = "held"
    SEGMENT = "segment"
    NOWHERE = "nowhere"
    UNREADABLE = "unreadable"
    """Nowhere else; but a segment whose ids do not read back may hold it."""


Changes = Counter[tuple[int, str]]

_DELETE_HELD = (
    "DELETE FROM held WHERE id IN (SELECT id FROM held WHERE id = ANY($1) ORDER BY id FOR UPDATE)"
    " RETURNING id, lane, key"
)


async def cancel(
    connection: asyncpg.Connection, ids: Collection[int], dues: Dues = NO_DUES, act: int | None = None
) -> dict[int, Found]:
    """Cancel messages by id, in one transaction; where each was met.

    Finding a row by its id alone reads the index of every partition, and the ids of every segment whose range it is in:
    ask for many at once, or say in ``dues`` when they are due. A message that is being released is waited for, and then
    found NOWHERE, or waiting again. ``act``: what they are added to in the audit trail (audit_log.py).
    Raises the driver's errors; then nothing is cancelled.
    """
    found = dict.fromkeys(ids, Found.NOWHERE)
    async with pool.transaction(connection):
        changes: Changes = Counter()
        for _ in range(LOOKS):
            missing = [number for number, where in found.items() if where in (Found.NOWHERE, Found.UNREADABLE)]
            if not missing or await _cancel_found(connection, missing, dues, found, changes):
                break
        if act is not None:
            await audit_log.add(connection, act, sum(changes[one] for one in changes if one[1] == "cancelled"))
        await write_counters(connection, changes)
    return found


async def write_counters(connection: asyncpg.Connection, changes: Changes) -> None:
    """Add to the counters: the last statement before the commit."""
    if changed := sorted((lane, kind, n) for (lane, kind), n in changes.items() if n):
        await connection.execute(statements.COUNT, *map(list, zip(*changed, strict=True)))


async def _cancel_found(
    connection: asyncpg.Connection, missing: Sequence[int], dues: Dues, found: dict[int, Found], changes: Changes
) -> bool:
    """Cancel what is found of ``missing``. Whether the rest is nowhere: nothing moved while we looked."""
    before = await listing.segments_seen(connection)
    quiet = await _cancel_rows(connection, missing, dues, found, changes)
    left = [number for number in missing if found[number] not in (Found.WAITING, Found.HELD)]
    if left and before.segments:
        quiet &= await _cancel_in_segments(connection, left, dues, found, changes)
    return quiet and await listing.segments_seen(connection) == before


async def lock_keys_of(connection: asyncpg.Connection, places: listing.Places, more: Sequence[bytes] = ()) -> None:
    """Take turns with everybody else about the keys of these rows, and ``more``. Raises the driver's errors."""
    rows = await connection.fetch(statements.KEYS_OF_ROWS, *places[:3], *places.bounds)
    if keys := [*more, *(key for (key,) in rows)]:
        await lock_keys(connection, keys)


async def _cancel_rows(
    connection: asyncpg.Connection, ids: Sequence[int], dues: Dues, found: dict[int, Found], changes: Changes
) -> bool:
    """Waiting and held rows. Whether none slipped away between the looking and the locking."""
    places = await listing.find_rows(connection, ids, dues)
    held = await connection.fetch("SELECT id, key FROM held WHERE id = ANY($1) ORDER BY id", ids)
    keys = [key for _, key in held if key is not None]
    gone = []
    if places is not None:
        await lock_keys_of(connection, places, keys)
        rows = await connection.fetch(statements.DELETE_ROWS, *places[:3], *places.bounds, timeout=None)
        gone += [(*row, Found.WAITING) for row in rows]
    elif keys:
        await lock_keys(connection, keys)
    for row in await connection.fetch(_DELETE_HELD, [number for number, _ in held]):
        gone.append((*row, Found.HELD))
    for number, lane, _, where in gone:
        found[number] = where
        changes[lane, "cancelled"] += 1
        changes[lane, "held"] -= where is not Found.WAITING
    if keyed := [(key, number) for number, _, key, _ in gone if key is not None]:
        await forget(connection, keyed)
    return len(gone) == (0 if places is None else len(places.ids)) + len(held)


async def _cancel_in_segments(
    connection: asyncpg.Connection, ids: Sequence[int], dues: Dues, found: dict[int, Found], changes: Changes
) -> bool:
    """Messages in segments. Whether every segment that was found to hold one was still there when it was locked."""
    holding, unreadable = await listing.find_in_segments(connection, ids, dues)
    for number in ids:
        doubtful = any(first <= number <= last for first, last in unreadable.values())
        found[number] = Found.UNREADABLE if doubtful else Found.NOWHERE
    locked = await connection.fetch(
        "SELECT id, lane, messages, cancelled FROM segment WHERE id = ANY($1) ORDER BY id FOR UPDATE", sorted(holding)
    )
    for segment, lane, messages, cancelled in locked:
        new = await connection.fetch(statements.ADD_CANCELLED, segment, sorted(holding[segment]))
        for (number,) in new:
            found[number] = Found.SEGMENT
        if cancelled + len(new) == messages:
            await catalog.delete(connection, segment)
        elif new:
            await connection.execute("UPDATE segment SET cancelled = cancelled + $2 WHERE id = $1", segment, len(new))
        changes[lane, "compacted"] -= len(new)
        changes[lane, "cancelled"] += len(new)
    return len(locked) == len(holding)


# An imported message may be held before it is due: then the new instant is its due instant as well. Where a person
# decides there is no retry_at: "later by" counts from now, or from the due instant.
_MOVE_HELD = (
    "UPDATE held SET retry_at = coalesce($2::timestamptz, coalesce(retry_at, greatest(due_at, statement_timestamp()))"
    " + $3::bigint * interval '1 millisecond'),"
    " due_at = CASE WHEN due_at > statement_timestamp()"
    " THEN coalesce($2::timestamptz, due_at + $3::bigint * interval '1 millisecond') ELSE due_at END"
    " WHERE id IN (SELECT id FROM held WHERE id = ANY($1) ORDER BY id FOR UPDATE) RETURNING id, lane, retry_at"
)
# Without their bytes: see unpacking.live.
_LOCK_SEGMENTS = (
    "SELECT id, lane, messages, cancelled, format, digest FROM segment WHERE id = ANY($1) ORDER BY id FOR UPDATE"
)


class When(NamedTuple):
    """The new instant: ``at_ms`` (epoch ms), or ``by_ms`` later than before (earlier, where it is negative). What would
    be due before now is due now."""

    at_ms: int | None = None
    by_ms: int = 0


class _Work:
    """What one transaction found and changed."""

    def __init__(self, when: When, dues: Dues, ids: Collection[int]) -> None:
        self.when = when
        self.dues = dues
        self.found = dict.fromkeys(ids, Found.NOWHERE)
        self.changes: Changes = Counter()
        self.waiting: dict[int, int] = {}
        """The soonest new due instant of each lane."""
        self.held: dict[int, int] = {}

    def missing(self) -> list[int]:
        return [number for number, where in self.found.items() if where in (Found.NOWHERE, Found.UNREADABLE)]

    @property
    def done(self) -> int:
        return len(self.found) - len(self.missing())


async def reschedule(
    connection: asyncpg.Connection,
    ids: Collection[int],
    when: When,
    dues: Dues = NO_DUES,
    act: int | None = None,
) -> dict[int, Found]:
    """Give messages another due instant, in one transaction; where each was met. ``dues`` and ``act`` as in
    cancel. Raises the driver's errors; then nothing is changed."""
    work = _Work(when, dues, ids)
    async with pool.transaction(connection):
        for _ in range(LOOKS):
            missing = work.missing()
            if not missing or await _move_found(connection, missing, work):
                break
        if act is not None:
            await audit_log.add(connection, act, work.done)
        await notify(connection, work.waiting, work.held)
        await write_counters(connection, work.changes)
    return work.found


async def _move_found(connection: asyncpg.Connection, missing: Sequence[int], work: _Work) -> bool:
    """Move what is found of ``missing``. Whether the rest is nowhere: nothing moved while we looked."""
    before = await listing.segments_seen(connection)
    quiet = await _move_rows(connection, missing, work)
    left = [number for number in missing if work.found[number] not in (Found.WAITING, Found.HELD)]
    if left and before.segments:
        quiet &= await _move_out_of_segments(connection, left, work)
    return quiet and await listing.segments_seen(connection) == before


async def _move_rows(connection: asyncpg.Connection, ids: Sequence[int], work: _Work) -> bool:
    """Waiting and held rows. Whether none slipped away between the looking and the locking."""
    places = await listing.find_rows(connection, ids, work.dues)
    held = [number for (number,) in await connection.fetch("SELECT id FROM held WHERE id = ANY($1) ORDER BY id", ids)]
    moved: list[asyncpg.Record] = []
    if places is not None:
        await lock_keys_of(connection, places)
        moved = await connection.fetch(statements.MOVE_ROWS, *places[:3], *work.when, *places.bounds, timeout=None)
    keyed = []
    for number, lane, due_ms, key in moved:
        work.found[number] = Found.WAITING
        _sooner(work.waiting, lane, due_ms)
        if key is not None:
            keyed.append((key, number, due_ms))
    again = await connection.fetch(_MOVE_HELD, held, *work.when) if held else []
    for number, lane, retry_ms in again:
        work.found[number] = Found.HELD
        _sooner(work.held, lane, retry_ms)
    if keyed:
        await _point(connection, sorted(keyed))
    return len(moved) + len(again) == (0 if places is None else len(places.ids)) + len(held)


async def _point(connection: asyncpg.Connection, keyed: Sequence[tuple[bytes, int, int]]) -> None:
    """Keys that stand for moved messages say where these are now."""
    keys, ids, dues = map(list, zip(*keyed, strict=True))
    await connection.execute("SELECT FROM message_key WHERE key = ANY($1) ORDER BY key FOR UPDATE", keys)
    await connection.execute(
        "UPDATE message_key AS k SET due_at = now.due_at"
        " FROM unnest($1::bytea[], $2::bigint[], $3::timestamptz[]) AS now (key, id, due_at)"
        " WHERE k.key = now.key AND k.id = now.id",
        keys,
        ids,
        dues,
    )


async def _move_out_of_segments(connection: asyncpg.Connection, ids: Sequence[int], work: _Work) -> bool:
    """Messages in segments become rows. Whether every segment that was found to hold one was there when locked."""
    holding, unreadable = await listing.find_in_segments(connection, ids, work.dues)
    for number in ids:
        doubtful = any(first <= number <= last for first, last in unreadable.values())
        work.found[number] = Found.UNREADABLE if doubtful else Found.NOWHERE
    locked = await connection.fetch(_LOCK_SEGMENTS, sorted(holding))
    for segment in locked:
        await _move_out(connection, segment, holding[segment["id"]], work)
    return len(locked) == len(holding)


async def _move_out(connection: asyncpg.Connection, segment: asyncpg.Record, ids: Sequence[int], work: _Work) -> None:
    import pyarrow.compute as pc  # noqa: PLC0415 - pyarrow, once there is something to read

    from delayer.store.segments.codec import SegmentBroken  # noqa: PLC0415

    number, lane = segment["id"], segment["lane"]
    try:
        table = await catalog.live(connection, segment)
    except SegmentBroken:
        work.found.update(dict.fromkeys(ids, Found.UNREADABLE))
        return
    table = table.filter(pc.is_in(table["id"], value_set=_ints(ids)))
    moved = table["id"].to_pylist()
    if not moved:
        return
    now_ms = await connection.fetchval("SELECT date_trunc('milliseconds', now())")
    new = _rescheduled(table, work.when, now_ms * 1000)
    await catalog.write_rows(connection, new, lane)
    await connection.fetch(statements.ADD_CANCELLED, number, sorted(moved))
    if segment["cancelled"] + len(moved) == segment["messages"]:
        await catalog.delete(connection, number)
    else:
        await connection.execute("UPDATE segment SET cancelled = cancelled + $2 WHERE id = $1", number, len(moved))
    work.changes[lane, "compacted"] -= len(moved)
    work.found.update(dict.fromkeys(moved, Found.SEGMENT))
    _sooner(work.waiting, lane, min(due_us for due_us in _micros(new)) // 1000)


def _ints(ids: Sequence[int]) -> Any:
    import pyarrow as pa  # noqa: PLC0415

    return pa.array(ids, pa.int64())


def _micros(table: Any) -> list[int]:
    micros: list[int] = table["due_at"].cast("int64").to_pylist()
    return micros


def _rescheduled(table: Any, when: When, now_us: int) -> Any:
    """The same messages with their new due instants, in the order of rows. Into the past is now: see move_rows.sql."""
    import pyarrow as pa  # noqa: PLC0415

    due = [
        max(old + when.by_ms * 1000 if when.at_ms is None else when.at_ms * 1000, min(old, now_us))
        for old in _micros(table)
    ]
    position = table.schema.get_field_index("due_at")
    field = table.schema.field("due_at")
    return table.set_column(position, field, pa.array(due, pa.int64()).cast(field.type)).sort_by(
        [("due_at", "ascending"), ("id", "ascending")]
    )


def _sooner(soonest: dict[int, int], lane: int, at_ms: int) -> None:
    soonest[lane] = min(at_ms, soonest.get(lane, at_ms))


T = TypeVar("T")
PORTION: Final = 1000
SCAN: Final = 100_000
"""Rows that are read for one portion at most; then it goes on with the next."""

Do = Callable[[asyncpg.Connection, Collection[int], Dues, int], Awaitable[dict[int, Found]]]
"""Cancel or move messages by id; in one transaction."""


class Counted(NamedTuple):
    """How many messages are meant. ``broken``: segments that do not read back and may hold more."""

    messages: int
    broken: int


@asynccontextmanager
async def acting(url: str, doing: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection to change the store with. Raises StoreLost, BadStoreUrl, SchemaOutdated."""
    connection = await pool.connect(url, "delayer act", SETTINGS)
    try:
        with translated(doing):
            await schema.check(connection)
            yield connection
    finally:
        await pool.close(connection)


@asynccontextmanager
async def recorded(
    url: str, who: str, verb: str, asked: Mapping[str, Any]
) -> AsyncIterator[tuple[asyncpg.Connection, int]]:
    """The same with a new entry of the audit log, and its id. Raises as :func:`acting`."""
    async with acting(url, verb) as connection:
        yield connection, await audit_log.begin(connection, who, verb, asked)


def rescheduler(when: When) -> Do:
    async def move(connection: asyncpg.Connection, ids: Collection[int], dues: Dues, act: int) -> dict[int, Found]:
        return await reschedule(connection, ids, when, dues, act)

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
        if do is not cancel:
            seen.update(dues)
        after = found.after
    return done


async def patiently(work: Callable[[], Awaitable[T]], attempts: int = 20) -> T:
    """Try a portion again that lost against another transaction: a release, or a park that replaces several keys."""
    for _ in range(attempts - 1):
        try:
            return await work()
        except WORTH_REPEATING:
            continue
    return await work()


async def count(connection: asyncpg.Connection, wanted: Filter, test: Test | None) -> Counted:
    """How many messages are meant, on one snapshot where SQL can say it. Raises the driver's errors."""
    if wanted.key is not None or test is not None:
        return await _count_one_by_one(connection, wanted, test)
    first_ms = pool.BEGINNING_MS if wanted.due_from_ms is None else wanted.due_from_ms
    last_ms = catalog.FOREVER_MS if wanted.due_before_ms is None else wanted.due_before_ms
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
