"""The SQL inbox as a queue of the intake: rows that applications write by delayer_send and delayer_cancel in their own
transactions (migrations/versions/0002).

One process reads it, the owner of the store's first lane. A separate connection holds an advisory lock until every
row that it has read is settled. So unless a fault occurs, no two processes work on the same row. A row
stays in the table until the transaction that moves its message into the backlog deletes it, or until its publish is
confirmed.

Transactions commit in another order than they draw ids. The reader keeps the ids that may still appear (OpenRanges),
and closes a range once every transaction that could have drawn an id there has ended. A transaction gets its own number
(xid) before it draws an id. If we draw an xid after we have seen an id, all transactions that drew this id or a lower
one have lower xids than ours. They have ended once the oldest xid that still runs has reached ours. Rows that were
inserted by hand, or restored, may have any id, so the reader also looks at all ids now and then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final, NamedTuple

from asyncpg import Connection

from delayer.amqp.values import Delivery
from delayer.core.errors import StoreLost
from delayer.core.faultpoint import reach
from delayer.core.open_ranges import OpenRanges
from delayer.core.operations import Applied, Operation
from delayer.format.inbox import delivery_of_row
from delayer.retry import first_set
from delayer.store import statements
from delayer.store.backlog import PostgresBacklog
from delayer.store.errors import translate_errors
from delayer.store.lanes.notify import VainPace
from delayer.store.lanes.session import LaneSession
from delayer.store.postgres import DELETE_INBOX

POLL_SECONDS: Final = 1.0
"""Seconds between two reads without a notification. Messages that are due later than this do not notify."""
CLOSE_SECONDS: Final = 1.0
"""Seconds between two attempts to close ranges. Each consumes an xid."""
LOOK_SECONDS: Final = 60.0
"""Seconds between two reads of all ids, if no row is known. Such a read scans past the dead rows of deleted
messages."""
MOST_RANGES: Final = 1_000
"""With more, every read would be slow. Their number grows while any program keeps a transaction open."""
BATCH_BYTES: Final = 1 << 20
"""Limit of the weight of a read: of its bodies, in which a byte of headers counts as 16 (migrations/versions/0002)."""
POSTPONE_SECONDS: Final = 10.0
"""How long the reader skips rows whose messages none of delayer's own queues took. Then a new subscription tries them
again. It does so often enough that the consumer counts as unsteady, and the daemon as not ready, while there are such
rows (UNSTEADY_SECONDS in intake/consume.py)."""
MOST_POSTPONED: Final = 100_000
"""Beyond this number no more rows are skipped: each id takes memory, and each gap between them a scan of the index."""
_HORIZON: Final = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint, pg_current_xact_id()::text::bigint"


class _Mark(NamedTuple):
    """All ids up to ``last`` were drawn by transactions with lower xids than ``xid``."""

    last: int
    xid: int


@dataclass
class Postponed:
    """The ids of rows to skip, also in later subscriptions, and until when, in seconds of the event loop."""

    ids: set[int] = field(default_factory=set)
    until: float = 0.0

    def add(self, ids: Sequence[int], now: float, *, more: bool) -> bool:
        """Skip these rows. Returns False if there would be too many. With ``more``, rows that were not read yet come
        first, and the time of the next attempt moves. Otherwise that time stays, or a trickle of new rows would keep
        the first ones waiting forever."""
        if len(self.ids) + len(ids) > MOST_POSTPONED:
            return False
        if more or not self.ids:
            self.until = now + POSTPONE_SECONDS
        self.ids.update(ids)
        return True

    def is_over(self, now: float) -> bool:
        return bool(self.ids) and now >= self.until


class InboxSubscription:
    """Satisfies intake.ports.Subscription. ``postponed``: outlives it."""

    def __init__(self, backlog: PostgresBacklog, prefetch: int, postponed: Postponed | None = None) -> None:
        self.prefetch = prefetch
        self.behind = False
        self._backlog = backlog
        self._session: LaneSession | None = None
        self._postponed = postponed or Postponed()
        self._ranges = self._all_ranges()
        self._mark: _Mark | None = None
        self._mark_at = self._read_at = self._look_at = 0.0
        self._tags = count(1)
        self._rows: dict[int, int] = {}  # The id by tag, of each row that is not settled.
        self._settled: list[int] = []  # The ids of rows to delete.
        self._woken = asyncio.Event()
        self._notified = False
        self._vain_pace = VainPace()
        self._stopped = False

    @property
    def reading(self) -> bool:
        """Whether this process holds the lock of the inbox."""
        return self._session is not None

    async def next_batch(self, limit: int, gather: float) -> list[Delivery]:
        """Wait for rows; see intake.ports.Subscription. A process that is not the reader gets none. Raises
        StoreLost."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._read_at + gather - loop.time()))
        until = loop.time() + POLL_SECONDS
        while not self._stopped:
            self._woken.clear()
            notified, self._notified = self._notified, False
            session = await self._reader()
            batch = None if session is None else await self._read(session, limit)
            if batch:
                self._read_at = loop.time()
                return batch
            if notified and batch is not None:
                await asyncio.sleep(self._vain_pace.pause(loop.time()))
            if loop.time() >= until:
                break
            await first_set(self._woken, seconds=until - loop.time())
        return []

    async def _reader(self) -> LaneSession | None:
        """Become the reader, or stay it, or stop being it. Returns its session; None if this process is not the
        reader. Raises StoreLost."""
        wanted, session = self._backlog.owns_first_lane, self._session
        if session is None:
            self._session = await self._backlog.take_inbox(self._note_notification) if wanted else None
            return self._session
        if not session.is_open:
            raise StoreLost("the connection that reads the SQL inbox is gone")
        if not wanted and not (self._rows or self._settled):
            self._session, self._ranges, self._mark = None, self._all_ranges(), None
            await session.close()
        return self._session

    def _note_notification(self) -> None:
        self._notified = True
        self._woken.set()

    async def _read(self, session: LaneSession, limit: int) -> list[Delivery] | None:
        """Read rows; None if there is no room for any, or if another process is about to read."""
        with translate_errors("read the SQL inbox"):
            async with session.turn:
                connection = session.connection
                await self._delete_settled(connection)
                limit = min(limit, self.prefetch - len(self._rows))
                if limit <= 0 or not self._backlog.owns_first_lane:
                    return None
                closed = await self._find_closed(connection)
                ranges = self._next_ranges()
                rows = await connection.fetch(statements.READ_INBOX, *ranges.bounds, limit, BATCH_BYTES)
        self.behind = len(rows) == limit or sum(row["weight"] for row in rows) >= BATCH_BYTES
        ids = [row["id"] for row in rows]
        if ids:
            self._ranges = ranges
            ranges.take(ids)
        if closed is not None and (not self.behind or ids[-1] > closed):
            self._ranges.close(closed)
        batch = [delivery_of_row(next(self._tags), row) for row in rows]
        self._rows.update((delivery.tag, id_) for delivery, id_ in zip(batch, ids, strict=True))
        return batch

    def _next_ranges(self) -> OpenRanges:
        """Return the ranges to read, now and then all ids. No row is read twice: all ids are read only when no row is
        unsettled. Then each row that was read is gone, or postponed and left out."""
        now, unsettled = asyncio.get_running_loop().time(), [*self._rows.values(), *self._settled]
        if not unsettled and now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            return self._all_ranges()
        if len(self._ranges) > MOST_RANGES:
            self._ranges.merge(MOST_RANGES // 2, [*unsettled, *self._postponed.ids])
        return self._ranges

    def _all_ranges(self) -> OpenRanges:
        """All ids, except those of postponed rows."""
        ranges = OpenRanges()
        ranges.take(sorted(self._postponed.ids))
        return ranges

    async def _find_closed(self, connection: Connection) -> int | None:
        """Return the id up to which the next read finds all rows that will ever be there; None if that is not known, or
        not needed."""
        now = asyncio.get_running_loop().time()
        if not self._ranges.has_gaps or now < self._mark_at + CLOSE_SECONDS:
            return None
        self._mark_at = now
        oldest, xid = await connection.fetchrow(_HORIZON)
        if self._mark is None:
            self._mark = _Mark(self._ranges.last, xid)
        if oldest < self._mark.xid:
            return None
        closed, self._mark = self._mark.last, None
        return closed

    async def _delete_settled(self, connection: Connection) -> None:
        if self._settled:
            settled, self._settled = self._settled, []
            await connection.execute(DELETE_INBOX, settled)
            reach("inbox.deleted")

    async def move(self, operations: Sequence[Operation], tags: Sequence[int]) -> Applied:
        """Apply the operations of these deliveries, and delete their rows: see intake.ports.Inbox."""
        applied = await self._backlog.move(operations, [self._rows[tag] for tag in tags])
        for tag in tags:
            del self._rows[tag]
        return applied

    def ack(self, tag: int, *, multiple: bool) -> None:
        """Delete rows: see intake.ports.Subscription. Those that were moved are deleted already."""
        tags = [one for one in self._rows if one <= tag] if multiple else [tag]
        self._settled += [self._rows.pop(one) for one in tags if one in self._rows]
        if self._settled:
            self._woken.set()

    @property
    def overrun(self) -> bool:
        """Whether a new subscription should try the postponed rows again."""
        return self._postponed.is_over(asyncio.get_running_loop().time())

    def postpone(self, tags: Sequence[int]) -> bool:
        """See intake.ports.Subscription. The rows stay in the table, and are tried again after POSTPONE_SECONDS."""
        ids = [self._rows[tag] for tag in tags if tag in self._rows]
        return self._postponed.add(ids, asyncio.get_running_loop().time(), more=self.behind)

    def stop(self) -> None:
        self._stopped = True
        self._woken.set()

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        try:
            if session.is_open:
                with translate_errors("read the SQL inbox"):
                    async with session.turn:
                        await self._delete_settled(session.connection)
        except StoreLost:
            pass  # These rows are read again: a fault repeats messages in flight.
        finally:
            await session.close()


@dataclass(eq=False)
class SqlInbox:
    """Satisfies intake.ports.Consumer and intake.ports.Inbox."""

    backlog: PostgresBacklog

    def __post_init__(self) -> None:
        self._subscription: InboxSubscription | None = None
        self._postponed = Postponed()

    @property
    def active(self) -> bool:
        return self._subscription is not None and self._subscription.reading

    async def subscribe(self, _queue: str, prefetch: int) -> InboxSubscription:
        if self._postponed.is_over(asyncio.get_running_loop().time()):
            self._postponed = Postponed()
        self._subscription = InboxSubscription(self.backlog, prefetch, self._postponed)
        return self._subscription

    async def move(self, operations: Sequence[Operation], tags: Sequence[int]) -> Applied:
        """See intake.ports.Inbox."""
        if self._subscription is None:
            raise StoreLost("the SQL inbox is not read")
        return await self._subscription.move(operations, tags)
