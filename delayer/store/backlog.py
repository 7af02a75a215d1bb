"""The daemon's view of the store: it connects, owns lanes, parks into them, and yields them for release."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Final, TypeVar

import structlog

from delayer.core.backoff import LogThrottle
from delayer.core.counters import Counters
from delayer.core.errors import LaneLost, Rejected, StoreLost
from delayer.core.heartbeat import Heartbeat
from delayer.core.hold import Hold
from delayer.core.message import Parcel
from delayer.core.operations import Applied, Cancel, Fold, Operation, Term, fold
from delayer.core.segment import Restoration
from delayer.retry import LOSSES, Backoff, first_set, raise_first, take_failures
from delayer.store.errors import STORE_RUNS, plain_reason
from delayer.store.lanes.lane import PostgresLane
from delayer.store.lanes.ownership import AWAY_SECONDS, MORE_LANES, BrokerLink, LaneOwnership
from delayer.store.lanes.session import LaneSession
from delayer.store.postgres import PostgresStore

log = structlog.get_logger(__name__)

T = TypeVar("T")

POLL_SECONDS: Final = 1.0
"""Seconds between polls of the store."""
UPKEEP_LOOKS: Final = 60
"""Polls between two rounds of partition upkeep."""

BULK_MESSAGES: Final = 400
BULK_BYTES: Final = 1 << 20
"""From this size on, each write goes to the process's next lane, so that its lanes release in parallel. One lane
releases a fifth less in bulk. Smaller writes stay in one lane, where messages due together share claim, publish and
commit."""
SMALL_BATCH_LANE_SECONDS: Final = 300.0
"""After this time small writes go to the next lane, so all lanes share messages parked over hours for one instant."""

Connect = Callable[[], Awaitable[PostgresStore]]


@dataclass(eq=False)
class PostgresBacklog:
    """Implements the ports of intake and release: Backlog, Releases. Works even before a store is reached.

    ``link``: the broker connection for publishing. Without it a process keeps its lanes for ``away_seconds``.
    """

    link: BrokerLink
    heartbeat: Heartbeat
    counters: Counters
    poll_seconds: float = POLL_SECONDS
    away_seconds: float = AWAY_SECONDS

    def __post_init__(self) -> None:
        self.configured = False
        self.out_of_reach = asyncio.Event()
        """Set while the last poll of the store failed."""
        self.refusal = ""
        """Why the store refuses this daemon until an operator acts. Empty if it does not, as far as known."""
        self._ownership = LaneOwnership(self.link, self.away_seconds)
        self._term = Term(0)
        self._turn, self._far_turn = count(), count()
        self._began = time.monotonic()
        self.spare = self._ownership.spare
        """Set while this process has no share, because there are more processes than lanes."""
        self._connect: Connect | None = None
        self._store: PostgresStore | None = None
        self._upkeep: asyncio.Task[None] | None = None

    def configure(self, connect: Connect, routes: Collection[bytes] = ()) -> None:
        """Set the store to which :meth:`run` connects. ``routes``: the limited routes, which get their own lanes."""
        self.configured, self._connect, self._ownership.routes = True, connect, routes

    @property
    def usable(self) -> bool:
        """Whether there is a lane to park into."""
        return self._ownership.usable.is_set()

    @property
    def reached(self) -> bool:
        """Whether the store is connected and the last poll succeeded."""
        return self._store is not None and not self.out_of_reach.is_set()

    @property
    def is_alone(self) -> bool:
        """Whether this process was the store's only process at the last poll."""
        return self.reached and self._ownership.live == 1

    @property
    def numbers(self) -> list[int]:
        """The lanes from which this process releases."""
        return self._ownership.numbers

    @property
    def stuck(self) -> list[int]:
        """The lanes of this process that do not advance."""
        return self._ownership.stuck

    @property
    def reason(self) -> str:
        """Why the store gives this process no lane, or another role may keep it from its work. Empty if it has one, if
        no store is configured, and if a reachable store waits for the broker, whose connection is then the reason."""
        if self.reached and self._ownership.foreign:
            return "; ".join(self._ownership.foreign)
        if not self.configured or self.usable:
            return ""
        if self.spare.is_set():
            return "no lane for this process: there are more processes than lanes"
        if not self.reached:
            return "the store is out of reach, or refuses us"
        return "" if self.link.current is None else "no free lane in the store"

    def now_upper_ms(self) -> int | None:
        """An upper bound of the store's clock; None before the store was first reached."""
        return None if self._store is None else self._store.now_upper_ms()

    def now_lower_ms(self) -> int | None:
        """A lower bound of the store's clock; None before the store was first reached."""
        return None if self._store is None else self._store.now_lower_ms()

    async def wait_usable(self, seconds: float | None = None) -> None:
        """Raises StoreLost if there is no lane after ``seconds``; None waits forever."""
        if not self.configured:
            raise StoreLost("no store is configured")
        if not await first_set(self._ownership.usable, seconds=seconds):
            raise self._without_lane()

    async def wait_known(self, seconds: float) -> None:
        """Wait up to ``seconds`` until there is a lane or the store is unreachable. Raises StoreLost if the store is
        reachable but gives this process no share of its lanes."""
        if not self.configured:
            return
        await first_set(self._ownership.usable, self.out_of_reach, self.spare, seconds=seconds)
        if self.spare.is_set() and not self.usable:
            raise self._without_lane()

    def _without_lane(self) -> StoreLost:
        reason = self.reason or "no lane without a connection to the broker"
        return StoreLost(reason, MORE_LANES if self.spare.is_set() else "")

    def begin_term(self) -> None:
        """From now on an operation with a key fails those of earlier terms: see intake.ports.Backlog."""
        self._term = Term(self._ownership.intake)

    async def apply(self, operations: Sequence[Operation]) -> Applied:
        """Commit operations: see intake.ports.Backlog."""
        term = self._term
        applied = await self._apply(operations, term)
        self._ownership.intake = max(self._ownership.intake, term.epoch or 0)
        return applied

    async def move(self, operations: Sequence[Operation], rows: Sequence[int]) -> Applied:
        """Commit operations of the SQL inbox, and delete its ``rows``: see intake.ports.Inbox."""
        return await self._apply(operations, None, rows)

    async def _apply(self, operations: Sequence[Operation], term: Term | None, rows: Sequence[int] = ()) -> Applied:
        ordered = any(isinstance(one, Cancel) or one.key is not None for one in operations)
        batch = fold(operations) if ordered else Fold([one for one in operations if isinstance(one, Parcel)])
        lanes = self._ownership.ordinary
        far = lanes[next(self._far_turn) % len(lanes)] if lanes else 0
        bulk = is_bulk(batch.kept)
        return await self._write(lambda store, lane: store.apply(lane, batch, far, term, rows), bulk=bulk)

    async def hold(self, items: Sequence[tuple[Parcel, Hold]]) -> None:
        """Commit held messages: see intake.ports.Backlog."""
        bulk = is_bulk([parcel for parcel, _ in items])
        try:
            return await self._write(lambda store, lane: store.hold(lane, items), bulk=bulk)
        except Rejected as rejected:
            if len(items) > 1:
                raise
            plain = [(parcel, replace(hold, text=plain_reason(rejected.__cause__))) for parcel, hold in items]
        await self._write(lambda store, lane: store.hold(lane, plain), bulk=bulk)

    async def _write(self, work: Callable[[PostgresStore, PostgresLane], Awaitable[T]], *, bulk: bool) -> T:
        """Write into a lane, or into the next lane if the first is lost during the write."""
        while True:
            store = self._require_store()
            lane = self._own_lane(bulk=bulk)
            try:
                return await work(store, lane)
            except LaneLost as lost:
                self.counters.lanes_lost += 1
                self._ownership.drop([lane], str(lost))

    def _own_lane(self, *, bulk: bool) -> PostgresLane:
        """The lane for messages due soon. Raises StoreLost if this process has none."""
        lanes = [lane for lane in self._ownership.own if lane.owned]
        if not lanes:
            raise StoreLost("no lane of ours to park into")
        if not bulk:
            first = int((time.monotonic() - self._began) / SMALL_BATCH_LANE_SECONDS) % len(lanes)
            for lane in lanes[first:] + lanes[:first]:
                if not lane.behind:
                    return lane
        return lanes[next(self._turn) % len(lanes)]

    @property
    def owns_first_lane(self) -> bool:
        """Whether this process owns the store's first lane, whose owner reads the SQL inbox."""
        first = self._ownership.ordinary[:1]
        return any(lane.number in first and lane.owned for lane in self._ownership.own)

    async def take_inbox(self, wake: Callable[[], None]) -> LaneSession | None:
        """Acquire the SQL inbox: see LaneLocks."""
        return await self._require_store().locks.take_inbox(wake)

    async def restore(self, ahead_ms: int) -> Restoration:
        """Restore the soonest segment whose first message is due within ``ahead_ms``. Raises StoreLost; then nothing is
        changed."""
        store = self._require_store()
        return await store.restore(store.now_upper_ms() + ahead_ms)

    async def limit(self, routes: Collection[bytes]) -> None:
        """Create a lane for each of these limited routes, now or at a later look. Raises StoreLost."""
        self._ownership.routes = routes
        if self._store is not None and self.usable:
            await self._ownership.ensure_lanes(self._store.locks, routes)

    def lanes(self) -> AsyncIterator[PostgresLane]:
        """Yield each lane once this process has taken it: see release.ports.Releases."""
        return self._ownership.lanes()

    def _require_store(self) -> PostgresStore:
        if self._store is None:
            raise StoreLost("the store was not reached yet" if self.configured else "no store is configured")
        return self._store

    async def run(self, stopping: asyncio.Event) -> None:
        """Poll once a second until stopping is set, then wait until the releases have closed their lanes. Raises bugs,
        and store errors that waiting does not fix, such as an outdated schema."""
        try:
            await self._look_on(stopping)
            await self._ownership.end()
        finally:
            # After a bug or a slow stop, releases may still be running.
            await self._ownership.close()
            self.heartbeat.forget("lanes")
            ended = set() if self._upkeep is None else {self._upkeep}
            for upkeep in ended:
                upkeep.cancel()  # The next upkeep finishes the work.
                await asyncio.wait([upkeep])
            if self._store is not None:
                await self._store.close()
            raise_first(take_failures(ended), unless=LOSSES)

    async def _look_on(self, stopping: asyncio.Event) -> None:
        beat = partial(self.heartbeat.beat, "lanes")
        retry, throttle = Backoff(beat, stopping), LogThrottle()
        for number in count():
            if stopping.is_set():
                return
            beat()
            try:
                await self._look(number, stopping)
            except StoreLost as lost:
                self.out_of_reach.set()
                self.refusal = str(lost) if lost.advice else ""
                told = throttle.should_log(str(lost), time.monotonic())
                if told and lost.advice:
                    log.error("store refused", reason=str(lost), next_step=lost.advice)
                elif told:
                    log.warning("store unreachable", reason=str(lost), next_step=STORE_RUNS)
            else:
                self.out_of_reach.clear()
                self.refusal = ""
                retry.succeeded()
                throttle.reset()
            if self.out_of_reach.is_set():
                await retry.pause()
            await first_set(stopping, seconds=self.poll_seconds)  # Retry a lane that fails right away once a second.

    async def _look(self, number: int, stopping: asyncio.Event) -> None:
        """Connect if necessary, and take or drop lanes. Raises StoreLost."""
        if self._store is None:
            if self._connect is None:
                raise StoreLost("no store is configured")
            self._store = await self._connect()
            log.info("store connected")
        try:
            await self._ownership.look(self._store.locks, stopping)
        finally:
            self._start_upkeep(self._store, number)

    def _start_upkeep(self, store: PostgresStore, look: int) -> None:
        """Start the upkeep as a task, so that lanes do not wait for its locks. If a round fails, the next one comes all
        the same. Raises a bug of the last round."""
        if self._upkeep is not None and self._upkeep.done():
            last, self._upkeep = self._upkeep, None
            try:
                last.result()
            except StoreLost as lost:
                log.error("upkeep failed", reason=str(lost), next_step=lost.advice or STORE_RUNS)
        if self._upkeep is None and look % UPKEEP_LOOKS == 0:
            self._upkeep = asyncio.create_task(store.maintain(), name="upkeep")


def is_bulk(parcels: Collection[Parcel]) -> bool:
    """Whether a write of these messages goes to the next lane."""
    return len(parcels) >= BULK_MESSAGES or sum(len(parcel.body) for parcel in parcels) >= BULK_BYTES
