"""A process's connections to the store, and the transactions that put messages into it by COPY.

A park into a lane of this process commits only while the process owns the lane. A message of a limited route goes into
the lane of its route, whose owner the transaction notifies. backlog.py chooses the lanes.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Final, NamedTuple, Self, TypeVar

import asyncpg
from asyncpg import Connection

from delayer.core.backoff import pause_ms
from delayer.core.errors import LaneLost, Rejected, StoreLost
from delayer.core.faultpoint import reach
from delayer.core.hold import Hold
from delayer.core.message import Parcel
from delayer.core.operations import Applied, Fold, Term
from delayer.core.segment import Locked, Restoration
from delayer.core.units import DAY_MS
from delayer.format.rows import COLUMNS, COLUMNS_WITH_KEY, HELD_COLUMNS, hold_columns, stored_row
from delayer.store import pool, requests, schema, servers, statements
from delayer.store.clock import StoreClock
from delayer.store.errors import DRIVER_ERRORS, REJECTED, describe, to_store_lost, translate_errors
from delayer.store.identity import StoreIdentity, read_identity
from delayer.store.lanes.lane import PostgresLane
from delayer.store.lanes.locks import LaneLocks
from delayer.store.lanes.notify import notify, soonest
from delayer.store.rows import history, keys, partitions
from delayer.store.rows.counters import Changes, add_counts
from delayer.store.rows.partitions import Days, read_days
from delayer.store.rows.places import new_ids
from delayer.store.schedules.zones import ZoneWatch
from delayer.store.segments import catalog

IDLE_SECONDS: Final = 4.0
"""Connections are fed, and the store is polled, each second. A hanging process loses its lanes in about 5 seconds."""
CLOSE_SECONDS: Final = 5.0
PARKERS: Final = 3
"""Parallel parks and restores of one process, each on a connection."""
FAR_MS: Final = 120_000
"""Messages due later than this are spread over the lanes of all processes. A lane claims at least once a minute and
looks a minute ahead (lane.py), so its owner finds them in time. Sooner messages stay in a lane of this process."""

NONE: Final[Changes] = Counter()
DELETE_INBOX: Final = "DELETE FROM delayer_inbox WHERE id = ANY($1)"
T = TypeVar("T")


class Placement(NamedTuple):
    """The lanes for the rows of a transaction."""

    number: int
    """The lane of messages due soon whose route has no lane."""
    routes: Mapping[bytes, int]
    epoch: int | None = None
    """The epoch of lane ``number``, which this process owns; None if it owns no lane."""
    far: int = 0
    """The lane of messages due at ``far_ms`` or later."""
    far_ms: int = 1 << 62
    history: bool = False


@dataclass
class PostgresStore:
    """Created by :meth:`connect`, ended by :meth:`close`. Lanes come from ``locks``."""

    pool: asyncpg.Pool
    clock: StoreClock
    locks: LaneLocks
    days: Days
    identity: StoreIdentity
    history_days: int
    zones: ZoneWatch = field(default_factory=ZoneWatch)

    @classmethod
    async def connect(
        cls,
        url: Callable[[], str],
        *,
        owner: str | None = None,
        idle_timeout: float = IDLE_SECONDS,
        transaction_timeout: float = 10.0,
        parkers: int = PARKERS,
        history_days: int = 0,
    ) -> Self:
        """Check the kind of server, connect, compare the schema, and read the store's time and partitions.

        ``url`` is asked for every connection, because its password may change. ``owner`` names this process in the
        table of lanes (default: host and process id). After ``idle_timeout`` seconds the server frees the lanes of a
        hanging process. After ``transaction_timeout`` seconds, longer than any publish, it ends a release and rolls
        back a silent park. ``parkers``: parallel parks and restores. ``history_days``: age limit of the history, 0 for
        none. Raises StoreUnfit, StoreLost, SchemaOutdated.
        """
        with pool.translate_reconnect_errors():
            await servers.check(url())
        owner = owner or f"{socket.gethostname()}:{os.getpid()}"
        timeout = f"{transaction_timeout * 1000:.0f}ms"
        more, server = {"idle_in_transaction_session_timeout": timeout}, pool.SameServer()
        parking = await pool.open_pool(url, "delayer park", parkers, more, server)
        clock = StoreClock()
        try:
            with translate_errors("connect"):
                async with pool.borrow(parking) as connection:
                    await schema.check(connection)
                    identity = await read_identity(connection)
                    servers.warn(await servers.state(connection))
                    await pool.sample(connection, clock)
                    days = Days(await read_days(connection))
                    if history_days:  # Before the first row, which would block its day's partition.
                        await history.run_upkeep(connection, clock.now_upper_ms() // DAY_MS, history_days)
        except BaseException:
            parking.terminate()
            raise
        locks = LaneLocks(
            url,
            parking,
            clock,
            owner=owner,
            idle=idle_timeout,
            releasing=transaction_timeout,
            history=history_days > 0,
            days=days,
            server=server,
        )
        return cls(parking, clock, locks, days, identity, history_days)

    async def close(self) -> None:
        """End the presence, and close the parking connections once running parks end. Their loops release the lanes."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.locks.close()
                await self.pool.close()
        except DRIVER_ERRORS:
            self.pool.terminate()

    async def read_identity(self) -> StoreIdentity:
        """Reread the identity, because an operator may have given the store to another broker. Raises StoreLost."""
        with translate_errors("read the store's id"):
            async with pool.borrow(self.pool) as connection:
                self.identity = await read_identity(connection, self.locks.presence)
        return self.identity

    async def give_broker(self, declare: Callable[[], Awaitable[None]]) -> bool:
        """Declare the store's exchange, and record that the store has a broker. False, without declaring, if the store
        already has a broker. Raises what ``declare`` raises, and StoreLost."""
        if self.identity.has_broker:
            return False
        with translate_errors("note the broker"):
            async with pool.borrow(self.pool) as connection, pool.transaction(connection):
                if given := not await connection.fetchval("SELECT has_broker FROM store FOR UPDATE"):
                    await declare()
                    await connection.execute("UPDATE store SET has_broker = true")
        self.identity = self.identity._replace(has_broker=True)
        return given

    def now_upper_ms(self) -> int:
        return self.clock.now_upper_ms()

    def now_lower_ms(self) -> int:
        return self.clock.now_lower_ms()

    async def apply(
        self, lane: PostgresLane, batch: Fold, far: int, term: Term | None, inbox: Sequence[int] = ()
    ) -> Applied:
        """Commit the rest of a batch, then wake ``lane``. Messages due soon go into ``lane``, later ones into lane
        ``far``, those of a limited route into its own. ``inbox``: the rows of the SQL inbox that the batch comes from,
        which the same transaction deletes. Raises LaneLost, with nothing committed, if this process has lost ``lane``;
        Rejected; and StoreLost, even for a batch with keys if another process has begun a term since ``term``, or if a
        row of ``inbox`` is gone."""
        routes, far_ms = self.locks.routes, self.clock.now_lower_ms() + FAR_MS
        place = Placement(lane.number, routes, lane.epoch, far, far_ms, self.history_days > 0)
        await self._ensure_days({parcel.due_ms // DAY_MS for parcel in batch.kept})
        left = batch

        async def write(connection: Connection) -> tuple[Applied, int | None]:
            nonlocal left
            if inbox:
                await take_inbox_rows(connection, inbox)
            applied, epoch, left = await apply_batch(connection, place, batch, term)
            return applied, epoch

        try:
            applied, epoch = await self._write("park", lane, write)
            if term is not None:
                term.epoch = epoch
            return applied
        finally:
            # Even if the commit is in doubt, because an extra note costs only one empty claim. Other messages are
            # notified, or found long before they are due.
            if dues := [one.due_ms for one in left.kept if one.due_ms < far_ms and one.route not in routes]:
                lane.cursor.note_parked(min(dues))

    async def hold(self, lane: PostgresLane, parcels: Sequence[tuple[Parcel, Hold]]) -> None:
        """Commit messages that never waited as held. Raises like :meth:`apply`."""
        place, now_ms = Placement(lane.number, self.locks.routes, lane.epoch, history=lane.history), self.now_upper_ms()

        async def write(connection: Connection) -> int | None:
            retry_ms, changes = await hold_new(connection, place, parcels, now_ms)
            await _count(connection, place, changes)
            return retry_ms

        retry_ms = await self._write("hold", lane, write)
        if retry_ms is not None:
            lane.cursor.note_held(retry_ms)

    async def restore(self, horizon_ms: int) -> Restoration:
        """Restore the segment due first into its lane, and notify the lane's owner, in one transaction, without
        blocking the event loop. None if no first message is due by ``horizon_ms``. Skips broken segments and those that
        others are restoring. Marks an unreadable segment, and returns it only this once. Raises StoreLost; then nothing
        is changed."""
        with translate_errors("restore"):
            async with pool.borrow(self.pool) as connection:
                following = await catalog.next_due(connection)
            if following is None or following[0] > horizon_ms:
                return None
            # The import takes half a second, too long for the event loop.
            await asyncio.to_thread(import_module, "delayer.store.segments.restore")
            from delayer.store.segments import restore  # noqa: PLC0415 - pyarrow, without segments a daemon never loads it

            # If another process restores this segment, the call restores the next one, whose rows may go to the default
            # partition. Past days, and days too far ahead, never have a partition.
            first_ms, last_ms = following
            await self._ensure_days(set(range(first_ms // DAY_MS, last_ms // DAY_MS + 1)))
            async with pool.borrow(self.pool) as connection:
                restored = await restore.restore_one(
                    connection, horizon_ms, portion_bytes=restore.SMALL_PORTION_BYTES, pause=restore.PAUSE
                )
            return restored or Locked(first_ms)

    async def _ensure_days(self, days: set[int]) -> None:
        if days <= self.days.known:
            return
        today, at = self.clock.now_upper_ms() // DAY_MS, self.clock.monotonic()
        if self.days.missing(days, today, at):
            with translate_errors("make partitions"):
                async with pool.borrow(self.pool) as connection:
                    await self.days.ensure(connection, days, today, at, partitions.PARK_SECONDS)

    async def _write(self, doing: str, lane: PostgresLane, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Run ``work`` in one transaction, and repeat it if it loses against another. Returns its result."""

        async def attempt() -> T:
            lane.check_owned(doing)
            async with pool.borrow(self.pool) as connection, pool.transaction(connection):
                return await work(connection)

        try:
            result = await pool.retry_conflicts(attempt, pool.ATTEMPTS)
        except DRIVER_ERRORS as error:
            rejected = isinstance(error, REJECTED)
            raise (Rejected(f"{doing}: {describe(error)}") if rejected else to_store_lost(doing, error)) from error
        reach("park.committed")
        return result

    async def maintain(self) -> None:
        """Create partitions ahead of need and drop empty past ones, and keep up with the zone data of this host, unless
        another daemon does. If one of the two fails, it still does the other. Raises StoreLost, for the first."""
        lost = None
        for what, work in (("maintain tables", self._maintain_tables), ("maintain schedules", self._maintain_zones)):
            try:
                with translate_errors(what):
                    await work()
            except StoreLost as error:
                lost = lost or error
        if lost is not None:
            raise lost

    async def _maintain_tables(self) -> None:
        async with pool.borrow(self.pool) as connection:
            await partitions.run_upkeep(connection, self.clock, self.days)
            await history.run_upkeep(connection, self.clock.now_upper_ms() // DAY_MS, self.history_days)
            await requests.run_upkeep(connection)

    async def _maintain_zones(self) -> None:
        try:
            await self.zones.run_upkeep(self.pool, self.locks.owner)
        finally:
            self.locks.zone_version = self.zones.loaded


def lanes_of(parcels: Iterable[Parcel], place: Placement) -> list[int]:
    number, routes, _, far, far_ms, _ = place
    limited = routes.get  # No lane has the number 0.
    return [limited(one.route) or (far if one.due_ms >= far_ms else number) for one in parcels]


def lane_of(parcel: Parcel, place: Placement) -> int:
    return lanes_of([parcel], place)[0]


def to_notify(place: Placement, dues: Iterable[tuple[Parcel, int]]) -> dict[int, int]:
    """The lanes whose owners must be notified of these messages, with the soonest instant of each."""
    if place.epoch is not None and not place.routes:
        return {}
    return soonest(
        (lane_of(parcel, place), at_ms) for parcel, at_ms in dues if place.epoch is None or parcel.route in place.routes
    )


async def take_inbox_rows(connection: Connection, ids: Sequence[int]) -> None:
    """Delete rows of the SQL inbox in the open transaction. Raises StoreLost if one is gone, the driver's errors."""
    status = await connection.execute(DELETE_INBOX, ids)
    if status != f"DELETE {len(ids)}":
        raise StoreLost(f"another process has moved rows of the SQL inbox: expected {len(ids)}, found {status}")


async def apply_batch(
    connection: Connection, place: Placement, batch: Fold, term: Term | None = None, more: Changes = NONE
) -> tuple[Applied, int | None, Fold]:
    """Write what is left of a batch, in the open transaction, and count it with ``more``. Also returns the epoch of
    ``term`` (an import has none), and the batch as written. Raises LaneLost, StoreLost, the driver's errors."""
    if batch.keys or batch.groups:
        return await _park_keyed(connection, place, batch, term, more)
    await park_plain(connection, place, batch.kept, more)
    return Applied(), None if term is None else term.epoch, batch


async def park_plain(connection: Connection, place: Placement, parcels: Sequence[Parcel], more: Changes = NONE) -> None:
    """Park messages without keys by one COPY."""
    lanes = lanes_of(parcels, place)
    records = [stored_row(parcel, lane) for parcel, lane in zip(parcels, lanes, strict=True)]
    await connection.copy_records_to_table("message", records=records, columns=COLUMNS)
    reach("park.copied")
    if owners := to_notify(place, ((parcel, parcel.due_ms) for parcel in parcels)):
        await notify(connection, owners, {})
    changes = more.copy()
    changes.update((lane, "parked") for lane in lanes)
    await _count(connection, place, changes)


async def _park_keyed(
    connection: Connection, place: Placement, batch: Fold, term: Term | None, more: Changes
) -> tuple[Applied, int | None, Fold]:
    """Cancel the messages waiting under the batch's keys, and park its own. Returns like :func:`apply_batch`."""
    touched = batch.keys | await keys.find_keys(connection, batch.groups)
    cancelled = await keys.cancel_waiting(connection, touched, batch.yielding)
    now_ms = await connection.fetchval("SELECT statement_timestamp()")
    waited = {row["key"]: row["parked_at"] for row in cancelled.rows} | dict.fromkeys(cancelled.spared)
    batch = batch.settle(waited, now_ms)
    lanes = lanes_of(batch.kept, place)
    ids = await new_ids(connection, len(lanes))
    if lanes:
        placed = zip(batch.kept, lanes, ids, strict=True)
        records = [(*stored_row(p, lane), new, now_ms if p.since_ms is None else p.since_ms) for p, lane, new in placed]
        await connection.copy_records_to_table("message", records=records, columns=COLUMNS_WITH_KEY)
    placed = zip(batch.kept, lanes, ids, strict=True)
    pointers = [(p.key, lane, p.due_ms, new) for p, lane, new in placed if p.key is not None]
    await keys.point(connection, touched - cancelled.spared if cancelled.known else (), pointers)
    reach("park.copied")
    epoch = None if term is None else await _fence(connection, term)
    await notify(connection, to_notify(place, ((parcel, parcel.due_ms) for parcel in batch.kept)), {})
    if place.history:
        entries = [history.of_row(row, now_ms) for row in cancelled.rows]
        entries += [history.of_parcel(history.CANCELLED, None, p, now_ms, parked_ms=now_ms) for p in batch.dropped]
        await history.write(connection, entries)
    changes = _changes(place, batch, lanes, cancelled)
    changes.update(more)
    await _count(connection, place, changes)
    return batch.applied(cancelled.keys), epoch, batch


async def _fence(connection: Connection, term: Term) -> int:
    """Return the term's epoch, which its first batch raises and every batch locks until the commit. So the next process
    waits for this transaction, and transactions that come after it fail."""
    if term.epoch is None:
        raise_it = "UPDATE store SET intake = intake + 1 WHERE intake = $1 RETURNING intake"
        epoch: int | None = await connection.fetchval(raise_it, term.seen)
    else:
        epoch = await connection.fetchval("SELECT intake FROM store WHERE intake = $1 FOR SHARE", term.epoch)
    if epoch is None:
        raise StoreLost("another process applies the operations with keys now: these are delivered again after its own")
    return epoch


def _changes(place: Placement, batch: Fold, lanes: Sequence[int], cancelled: keys.Cancelled) -> Changes:
    changes = cancelled.changes
    changes.update((lane, "parked") for lane in lanes)
    for parcel in batch.dropped:
        changes.update([(lane := lane_of(parcel, place), "parked"), (lane, "cancelled")])
    return changes


async def hold_new(
    connection: Connection, place: Placement, parcels: Sequence[tuple[Parcel, Hold]], now_ms: int
) -> tuple[int | None, Changes]:
    """Hold messages that never waited. No other message may wait under their keys. Returns the first retry (epoch ms),
    never before its message is due, or None if an operator decides about all of them; and what to count."""
    records: list[tuple[object, ...]] = []
    retries: list[tuple[Parcel, int]] = []
    keyed: list[tuple[bytes, int, int, int]] = []
    changes: Changes = Counter()
    entries = []
    for (parcel, hold), new in zip(parcels, await new_ids(connection, len(parcels)), strict=True):
        lane, retry_ms = lane_of(parcel, place), hold.retry_ms(max(now_ms + pause_ms(1, new), parcel.due_ms))
        if retry_ms is not None:
            retries.append((parcel, retry_ms))
        if parcel.key is not None:
            keyed.append((parcel.key, lane, parcel.due_ms, new))
        records.append((*stored_row(parcel, lane), new, retry_ms, 1, *hold_columns(hold), parcel.token or None))
        changes.update([(lane, "parked"), (lane, "held")])
        entries.append(history.of_parcel(history.HELD, new, parcel, now_ms, parked_ms=None, kind=hold.kind))
    await connection.copy_records_to_table("held", records=records, columns=HELD_COLUMNS)
    reach("park.copied")
    await notify(connection, {}, to_notify(place, retries))
    if keyed:
        await keys.point(connection, (), keyed)
    if place.history:
        await history.write(connection, entries)
    return min((retry_ms for _, retry_ms in retries), default=None), changes


async def _count(connection: Connection, place: Placement, changes: Changes) -> None:
    """Update the counters, if the lane is still ours; the last statement before the commit."""
    if place.epoch is None:
        return await add_counts(connection, changes)
    # Cancels that found nothing change no counter, but must be fenced as well.
    changed = sorted((of, kind, n) for (of, kind), n in changes.items() if n) or [(place.number, "parked", 0)]
    lanes, kinds, numbers = zip(*changed, strict=True)
    if not await connection.fetch(statements.COUNT_PARKED, lanes, kinds, numbers, place.number, place.epoch):
        raise LaneLost(f"lane {place.number}: it changed its owner since epoch {place.epoch}")
