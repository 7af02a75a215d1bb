"""Cancels and reschedules by hand: of waiting and held messages by id, and of all messages that match a filter.

A message in a segment becomes an ordinary row first: a separate transaction restores the whole segment. A message is
always in one place, but it may be compacted, restored, held, or moved to another partition between two of our
statements. The process that moves it locks its row or its segment, so a message we locked stays. After waiting for a
lock, or if the list of segments changed, we look again for messages that slipped away. We wait for a message that is
being released; then it is gone, or ours.

Locks are taken in the order of keys.py. Many messages are changed in portions, each in one transaction with its share
of the audit log, so an interruption leaves whole portions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from asyncpg import Connection, Record

from delayer.core.filters import Filter, Token
from delayer.core.message import is_occurrence
from delayer.core.segment import Broken
from delayer.schedule.record import Fate
from delayer.schedule.zone_data import installed_version
from delayer.store import held_messages, pool, waiting
from delayer.store.admin import audit_log
from delayer.store.admin.detail import ABSENT, FoundIn
from delayer.store.errors import check_arrow
from delayer.store.lanes.notify import notify, soonest
from delayer.store.rows import history
from delayer.store.rows.counters import Changes, add_counts
from delayer.store.rows.keys import DELETE_HELD, forget, lock_keys, lock_pointers
from delayer.store.rows.partitions import PARK_SECONDS, make_missing
from delayer.store.rows.places import AT, DELETE_ROWS, KEYS_OF_ROWS, MOVE_ROWS, NO_DUES, WANTED, Dues, Places, find_rows
from delayer.store.schedules.changes import lower_zone_version
from delayer.store.schedules.occurrences import EndedOccurrence, write_next
from delayer.store.segments import catalog
from delayer.store.session import read_connection

LOOKS: Final = 10
"""Maximum number of passes to find messages that slip away. Two are rare."""


def count_found(found: Mapping[int, FoundIn] | Counter[FoundIn]) -> int:
    """The number of messages found, and so cancelled or moved.

    >>> count_found(Counter({FoundIn.WAITING: 4, FoundIn.UNREADABLE: 2}))
    4
    """
    places = found if isinstance(found, Counter) else Counter(found.values())
    return places.total() - sum(places[where] for where in ABSENT)


PAST: Final = {
    "cancel": "Cancelled", "reschedule": "Rescheduled", "retry": "To be tried again now", "drop": "Dropped",
}  # fmt: skip
"""The first words of the answer to a change, by verb."""


def describe_unchanged(found: Counter[FoundIn], counted: int | None) -> tuple[int, list[str]]:
    """The number of messages that matched, and those that were not changed, in sentences. ``counted``: how many matched
    before the change. Then messages may have left or arrived since. Pure.

    >>> describe_unchanged(Counter({FoundIn.WAITING: 2, FoundIn.NOWHERE: 1}), 10)
    (10, ['8 were delivered or moved in the meantime.'])
    """
    left = found[FoundIn.UNREADABLE]
    matched = max(counted or 0, found.total())
    said = (
        (matched - count_found(found) - left, "were delivered or moved in the meantime"),
        (left, "were delivered, or are in an unreadable segment"),
        (0 if counted is None else matched - counted, "of these came after the count"),
    )
    return matched, [f"{messages:,} {why}." for messages, why in said if messages]


async def cancel(
    connection: Connection, ids: Collection[int], dues: Dues = NO_DUES, log_id: int | None = None
) -> dict[int, FoundIn]:
    """Cancel messages by id. Returns where each was found. Finding a row by id alone reads the ids of every segment, so
    pass many ids at once, or their due instants in ``dues``. Waits for a message that is being released, and then finds
    it NOWHERE, or waiting again. ``log_id``: the audit log entry. Raises the driver's errors; messages cancelled by
    then are in the audit log."""
    return await _until_quiet(connection, ids, dues, log_id, partial(_cancel_rows, dues=dues))


Work = Callable[..., Awaitable[tuple[dict[int, FoundIn], Changes, bool]]]
"""Changes the rows of some ids in an open transaction. Returns where the messages were, the counters' changes, and
whether every row was still there once locked."""


async def _until_quiet(
    connection: Connection, ids: Collection[int], dues: Dues, log_id: int | None, work: Work
) -> dict[int, FoundIn]:
    """Apply ``work`` to ``ids``, and repeat until no message moved between two passes."""
    found = dict.fromkeys(ids, FoundIn.NOWHERE)
    for _ in range(LOOKS):
        missing = [number for number, where in found.items() if where in ABSENT]
        if not missing:
            break
        before = await catalog.read_list_state(connection)
        met, quiet = await pool.retry_conflicts(partial(_do, connection, missing, log_id, work))
        found |= met
        left = [number for number in missing if number not in met]
        if left and before["segments"]:
            found |= await _in_segments(connection, left, dues, log_id, work)
        if quiet and await catalog.read_list_state(connection) == before:
            break
    return found


async def _do(
    connection: Connection, ids: Sequence[int], log_id: int | None, work: Work
) -> tuple[dict[int, FoundIn], bool]:
    async with pool.transaction(connection):
        met, changes, quiet = await work(connection, ids)
        if log_id is not None:
            await audit_log.add(connection, log_id, len(met))
        await add_counts(connection, changes)
    return met, quiet


async def _in_segments(
    connection: Connection, ids: Sequence[int], dues: Dues, log_id: int | None, work: Work
) -> dict[int, FoundIn]:
    """Apply ``work`` to those of ``ids`` in segments, one segment after another."""
    found: dict[int, FoundIn] = {}
    for segment, inside in (await catalog.find_segments(connection, ids, dues)).items():
        check_arrow()
        from delayer.store.segments.restore import restore  # noqa: PLC0415 - pyarrow

        await make_missing(connection, await catalog.due_days(connection, segment), PARK_SECONDS)
        if isinstance(await pool.retry_conflicts(partial(restore, connection, segment)), Broken):
            found |= dict.fromkeys(inside, FoundIn.UNREADABLE)
            continue
        met, _ = await pool.retry_conflicts(partial(_do, connection, inside, log_id, work))
        found |= {number: FoundIn.SEGMENT if where is FoundIn.WAITING else where for number, where in met.items()}
    return found


async def lock_keys_of(connection: Connection, places: Places, more: Sequence[bytes] = ()) -> None:
    """Lock the keys of these rows, and ``more``, against all other transactions. Raises the driver's errors."""
    rows = await connection.fetch(KEYS_OF_ROWS, *places)
    if keys := [*more, *(key for (key,) in rows)]:
        await lock_keys(connection, keys)


async def _cancel_rows(
    connection: Connection, ids: Sequence[int], dues: Dues
) -> tuple[dict[int, FoundIn], Changes, bool]:
    places = await find_rows(connection, ids, dues)
    held = await connection.fetch("SELECT id, key FROM held WHERE id = ANY($1) ORDER BY id", ids)
    keys = [key for _, key in held if key is not None]
    await lock_keys_of(connection, places, keys)
    waiting = await connection.fetch(DELETE_ROWS, *places)
    were_held = await connection.fetch(DELETE_HELD, [number for number, _ in held])
    if await history.is_kept(connection):
        now_ms = await connection.fetchval("SELECT statement_timestamp()")
        await history.write(connection, [history.of_row(row, now_ms) for row in (*waiting, *were_held)])
    gone = [(*row[:3], FoundIn.WAITING) for row in waiting] + [(*row[:3], FoundIn.HELD) for row in were_held]
    changes: Changes = Counter()
    for _, lane, _, where in gone:
        changes[lane, "cancelled"] += 1
        changes[lane, "held"] -= where is FoundIn.HELD
    if keyed := [(key, number) for number, _, key, _ in gone if key is not None]:
        await forget(connection, keyed)
        written = await _write_next(connection, [(key, id_, lane) for id_, lane, key, _ in gone], Fate.CANCELLED)
        await notify(connection, soonest(written), {})
        changes.update((lane, "parked") for lane, _ in written)
    quiet = len(gone) == len(places.ids) + len(held)
    return {number: where for number, _, _, where in gone}, changes, quiet


async def _write_next(
    connection: Connection, gone: Iterable[tuple[bytes | None, int, int]], fate: Fate
) -> list[tuple[int, int]]:
    """Write the next occurrences of the schedules whose waiting one is among ``gone`` (key, id, lane). Returns the lane
    and due instant of each, to notify and to count."""
    over = [EndedOccurrence(key, id_, lane, fate) for key, id_, lane in gone if key is not None and is_occurrence(key)]
    if not over:
        return []
    written = await write_next(connection, over)
    await lower_zone_version(connection, installed_version())
    return [(one.lane, one.due_ms) for one in written]


# An imported message may be held before it is due. Then the new instant is also its due instant. A message that waits
# for an operator has no retry_at. For it, "later by" is measured from now, or from a later due instant.
_MOVE_HELD = (
    "UPDATE held SET retry_at = coalesce($2::timestamptz, coalesce(retry_at, greatest(due_at, statement_timestamp()))"
    " + $3::bigint * interval '1 millisecond'),"
    " due_at = CASE WHEN due_at > statement_timestamp()"
    " THEN coalesce($2::timestamptz, due_at + $3::bigint * interval '1 millisecond') ELSE due_at END"
    " WHERE id IN (SELECT id FROM held WHERE id = ANY($1) ORDER BY id FOR UPDATE) RETURNING id, lane, retry_at"
)


_UNKEY: Final = f"UPDATE message AS m SET key = NULL FROM {WANTED} WHERE {AT}"


class NewDue(NamedTuple):
    """The new instant: ``at_ms`` (epoch ms), or ``by_ms`` later than before. Negative is earlier, and the past means
    now."""

    at_ms: int | None = None
    by_ms: int = 0


async def reschedule(
    connection: Connection, ids: Collection[int], dues: Dues = NO_DUES, log_id: int | None = None, *, when: NewDue
) -> dict[int, FoundIn]:
    """Change the due instant of messages. Returns where each was found. For ``dues`` and ``log_id`` see :func:`cancel`.
    Raises the driver's errors; messages moved by then are in the audit log."""
    return await _until_quiet(connection, ids, dues, log_id, partial(_move_rows, when=when, dues=dues))


async def _move_rows(
    connection: Connection, ids: Sequence[int], when: NewDue, dues: Dues
) -> tuple[dict[int, FoundIn], Changes, bool]:
    places = await find_rows(connection, ids, dues)
    held = [number for (number,) in await connection.fetch("SELECT id FROM held WHERE id = ANY($1) ORDER BY id", ids)]
    await lock_keys_of(connection, places)
    moved = await connection.fetch(MOVE_ROWS, *places, *when)
    again = await connection.fetch(_MOVE_HELD, held, *when)
    written: list[tuple[int, int]] = []
    if keyed := [row for row in moved if row["key"] is not None]:
        await _point(connection, sorted((key, number, due_ms) for number, _, due_ms, key in keyed))
        written = await _part(connection, [row for row in keyed if is_occurrence(row["key"])])
    found = {number: FoundIn.WAITING for number, *_ in moved} | {number: FoundIn.HELD for number, *_ in again}
    moved_to = soonest([*written, *((lane, due_ms) for _, lane, due_ms, _ in moved)])
    await notify(connection, moved_to, soonest((lane, retry_ms) for _, lane, retry_ms in again))
    changes = Counter((lane, "parked") for lane, _ in written)
    return found, changes, len(found) == len(places.ids) + len(held)


async def _part(connection: Connection, moved: Sequence[Record]) -> list[tuple[int, int]]:
    """Make ordinary messages of these occurrences, which an operator moved. Their schedules go on as if these had been
    sent. Returns like :func:`_write_next`."""
    if not moved:
        return []
    ids, lanes, dues, keys = map(list, zip(*moved, strict=True))
    await connection.execute(_UNKEY, lanes, dues, ids, min(dues), max(dues) + 1)
    await forget(connection, list(zip(keys, ids, strict=True)))
    return await _write_next(connection, [(key, id_, lane) for id_, lane, _, key in moved], Fate.SENT)


async def _point(connection: Connection, keyed: Sequence[tuple[bytes, int, int]]) -> None:
    """Update the due instants of the moved messages' keys."""
    keys, ids, dues = map(list, zip(*keyed, strict=True))
    await lock_pointers(connection, keys)
    await connection.execute(
        "UPDATE message_key AS k SET due_at = now.due_at"
        " FROM unnest($1::bytea[], $2::bigint[], $3::timestamptz[]) AS now (key, id, due_at)"
        " WHERE k.key = now.key AND k.id = now.id",
        keys,
        ids,
        dues,
    )


T = TypeVar("T")
PORTION: Final = 1000
LOOKUP_PORTION: Final = 100
"""Messages that are looked up together, because their properties (up to 128 kB each) are read too."""

Do = Callable[[Connection, Collection[int], Dues, int], Awaitable[dict[int, FoundIn]]]
"""Cancel, move or retry messages by id."""


def change_connection(url: str, doing: str) -> AbstractAsyncContextManager[Connection]:
    """A connection for changes of the store. Raises StoreLost, BadStoreUrl, SchemaOutdated. A command stopped in the
    middle of a transaction (Ctrl-Z) keeps its locks for at most ten seconds."""
    settings = {**pool.INDEX_ONLY, "idle_in_transaction_session_timeout": "10s"}
    return read_connection(url, doing, "delayer act", settings)


@asynccontextmanager
async def audit_entry(url: str, who: str, verb: str, asked: Mapping[str, Any]) -> AsyncIterator[tuple[Connection, int]]:
    """Like :func:`change_connection`, with a new audit log entry and its id."""
    async with change_connection(url, verb) as connection:
        yield connection, await audit_log.begin(connection, who, verb, asked)


async def apply_to_ids(connection: Connection, do: Do, tokens: Sequence[Token], log_id: int) -> dict[int, FoundIn]:
    """Apply ``do`` to the messages of these names. Raises the driver's errors."""
    found: dict[int, FoundIn] = {}
    for some in portions(tokens, PORTION):
        dues = {token.id: token.due_ms for token in some if token.due_ms is not None}
        ids = [token.id for token in some]
        found |= await do(connection, ids, dues, log_id)
    return found


def portions(tokens: Sequence[Token], size: int) -> Iterable[Sequence[Token]]:
    return (tokens[start : start + size] for start in range(0, len(tokens), size))


async def whereabouts(connection: Connection, tokens: Sequence[Token]) -> dict[int, FoundIn]:
    """Where :func:`apply_to_ids` would find the messages now. Raises the driver's errors."""
    ids = [token.id for token in tokens]
    found = dict.fromkeys(ids, FoundIn.NOWHERE)
    there, broken = await waiting.find_by_id(connection, tokens)
    for inside in broken.values():
        found |= dict.fromkeys(inside, FoundIn.UNREADABLE)
    found |= {one.place.id: FoundIn.WAITING if one.place.segment is None else FoundIn.SEGMENT for one in there}
    return found | {one.entry.place.id: FoundIn.HELD for one in await held_messages.find_by_id(connection, ids)}


async def waiting_pages(connection: Connection, wanted: Filter) -> AsyncIterator[Dues]:
    """All waiting messages of ``wanted``, page by page, each with its due time. Leaves out the occurrences of schedules
    written since the start, because each cancelled occurrence writes the next. Raises the driver's errors."""
    newest: int = await connection.fetchval("SELECT nextval('message_id')")
    async for page in waiting.pages(connection, wanted, PORTION):
        yield {
            one.place.id: one.place.due_ms
            for one in page.messages
            if one.place.id < newest or not is_occurrence(one.key)
        }


async def apply_to_matching(
    connection: Connection, do: Do, pages: AsyncIterable[Dues], *, log_id: int, say: Callable[[int], None]
) -> Counter[FoundIn]:
    """Apply ``do`` to the messages of all ``pages``; ``say`` gets running totals. Raises the driver's errors."""
    done: Counter[FoundIn] = Counter()
    # A message moved to a later instant turns up again in this loop.
    seen = IdBitset()
    async for page in pages:
        dues = {number: due_ms for number, due_ms in page.items() if number not in seen}
        if dues:
            done.update((await do(connection, list(dues), dues, log_id)).values())
            say(count_found(done))
        if do is not cancel:
            seen.update(dues)
    return done


PART: Final = 4096
"""Ids per integer: half a kilobyte, so a few scattered ids cost little, and ten million in a row 1.4 MB."""


class IdBitset:
    """A set of ids from 0 on, with one bit per id instead of about 80 bytes in a set. The ids of one command are mostly
    close together.

    >>> seen = IdBitset()
    >>> seen.update([7, 4711])
    >>> [number in seen for number in (6, 7, 4711, 8807)]
    [False, True, True, False]
    """

    def __init__(self) -> None:
        self._parts: Counter[int] = Counter()

    def update(self, ids: Iterable[int]) -> None:
        for number in ids:
            self._parts[number // PART] |= 1 << number % PART

    def __contains__(self, number: int) -> bool:
        return bool(self._parts[number // PART] >> number % PART & 1)


# The pauses start over. If a circuit breaker is still open, the message is held again, and retried soon.
_RETRY: Final = (
    "UPDATE held SET retry_at = greatest(due_at, statement_timestamp()), attempts = 1"
    " WHERE id IN (SELECT id FROM held WHERE id = ANY($1) ORDER BY id FOR UPDATE) RETURNING id, lane, retry_at"
)


async def retry_held(connection: Connection, ids: Collection[int], _: Dues, log_id: int) -> dict[int, FoundIn]:
    """Retry held messages now, or when due. Returns where each was found. Waits for a message that is being released.
    Raises the driver's errors; then nothing is changed."""

    async def retry() -> dict[int, FoundIn]:
        async with pool.transaction(connection):
            rows = await connection.fetch(_RETRY, list(ids))
            await audit_log.add(connection, log_id, len(rows))
            await notify(connection, {}, soonest((lane, retry_ms) for _, lane, retry_ms in rows))
        return dict.fromkeys(ids, FoundIn.NOWHERE) | {number: FoundIn.HELD for number, *_ in rows}

    return await pool.retry_conflicts(retry)
