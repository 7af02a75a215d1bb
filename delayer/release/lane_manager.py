"""The lanes of this process: its even share of the store's lanes, each with a release loop.

Once a second the manager looks at the store: how many processes live, and which lanes have an owner. It drops lanes
above its share and takes free ones up to it. Lanes of limited routes are shared apart from the others, and their extra
lanes go to the last processes, so that no process has two lanes more than another.

A process that has been without its broker for 10 seconds drops all lanes and its presence, so that others take them.
Before its first connection to the broker it takes none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from itertools import count
from typing import Final, TypeVar

import structlog

from delayer.broker.connection import ReconnectingConnection
from delayer.broker.ports import Heartbeat, Lane, LivePolicy, Store
from delayer.broker.retry import LOSSES, Backoff, first_set, raise_first, take_failures
from delayer.core.backoff import LogThrottle
from delayer.core.counters import Counters
from delayer.core.errors import LaneLost, StoreLost
from delayer.core.hold import Hold
from delayer.core.message import LaneRow, LaneTable, Parcel
from delayer.core.segment import Restoration
from delayer.release.loop import LaneRelease

log = structlog.get_logger(__name__)

T = TypeVar("T")

POLL_SECONDS: Final = 1.0
ONE_BROKER: Final = "give each broker and virtual host a database of its own; stop daemons with the wrong store.url"
MORE_LANES: Final = "`delayer db lanes N` raises the number of lanes"
AWAY_SECONDS: Final = 10.0
UPKEEP_LOOKS: Final = 60
"""Looks between two rounds of partition upkeep."""
BULK_MESSAGES: Final = 400
BULK_BYTES: Final = 1 << 20
"""From so many messages or bytes on, each write goes to the next lane, so that all lanes release in parallel. With one
lane a process releases a fifth less in bulk. Smaller writes stay in one lane, so that messages that are due together
share one claim, publish and commit."""
SMALL_BATCH_LANE_SECONDS: Final = 300.0
"""After this time small writes go to the next lane, so all lanes share messages parked over hours for one instant."""


def share(lanes: int, live: int, rank: int) -> int:
    """How many of ``lanes`` the process of this rank owns, among ``live`` ones.

    >>> [share(5, 3, rank) for rank in range(3)]
    [2, 2, 1]
    """
    return lanes // live + (rank < lanes % live)


class LaneManager:
    """Satisfies ports.Parking, whether a store is configured, reached, or neither."""

    def __init__(
        self,
        release: Callable[[Lane], LaneRelease],
        *,
        heartbeat: Heartbeat,
        counters: Counters,
        connection: ReconnectingConnection | None = None,
        broker: Callable[[], str] = str,
        poll_seconds: float = POLL_SECONDS,
        away_seconds: float = AWAY_SECONDS,
    ) -> None:
        """``connection``: to the broker that the lanes publish to. ``broker``: its mark (store/lanes/locks.py).
        ``poll_seconds`` lie between two looks at the store. Without a broker a process keeps lanes ``away_seconds``."""
        self.configured = False
        self.ready = asyncio.Event()
        """Set while there is a lane to park into."""
        self.out_of_reach = asyncio.Event()
        """Set while the last look at the store failed."""
        self.spare = asyncio.Event()
        """Set while there are more processes than lanes, and this one has no share."""
        self._release = release
        self._heartbeat = heartbeat
        self._counters = counters
        self._connection = connection
        self._live: LivePolicy | None = None
        self._broker = broker
        self._poll_seconds = poll_seconds
        self._away_seconds = away_seconds
        self._away_since: float | None = None
        self._connect: Callable[[], Awaitable[Store]] | None = None
        self._store: Store | None = None
        self._lanes: list[Lane] = []  # Lanes to park into.
        self._releases: dict[asyncio.Task[None], tuple[Lane, LaneRelease]] = {}
        self._upkeep: asyncio.Task[None] | None = None
        self._others: list[int] = []  # Lanes whose owners publish to another broker.
        self._turn = count()
        self._began = time.monotonic()

    def configure(self, connect: Callable[[], Awaitable[Store]], live: LivePolicy) -> None:
        """There is a store: :meth:`run` will connect to it. Limited routes of ``live`` get lanes of their own."""
        self.configured, self._connect, self._live = True, connect, live

    @property
    def usable(self) -> bool:
        """Whether there is a lane to park into."""
        return self.ready.is_set()

    @property
    def reached(self) -> bool:
        """Whether the store is connected, and the last look reached it."""
        return self._store is not None and not self.out_of_reach.is_set()

    @property
    def numbers(self) -> list[int]:
        """The lanes that this process releases from."""
        return sorted(lane.number for lane, _ in self._releases.values())

    def now_upper_ms(self) -> int | None:
        """An upper bound of the store's clock, or None while no store was reached yet."""
        return None if self._store is None else self._store.now_upper_ms()

    def now_lower_ms(self) -> int | None:
        """A lower bound of the store's clock, or None while no store was reached yet."""
        return None if self._store is None else self._store.now_lower_ms()

    async def wait_usable(self, seconds: float) -> None:
        """Raises StoreLost if there is no lane after ``seconds``."""
        if not self.configured:
            raise StoreLost("no store is configured")
        if not await first_set(self.ready, seconds=seconds):
            raise self._without_lane()

    def reason_without_lane(self) -> str:
        """Why the store gives this process no lane. Empty if it has one, if no store is configured, and if a store in
        reach waits for the broker: its connection is the reason then."""
        if not self.configured or self.usable:
            return ""
        if self.spare.is_set():
            return "no lane for this process: there are more processes than lanes"
        if not self.reached:
            return "the store is out of reach, or refuses us"
        return "" if self._connection is not None and self._connection.current is None else "no free lane in the store"

    def _without_lane(self) -> StoreLost:
        reason = self.reason_without_lane() or "no lane without a connection to the broker"
        return StoreLost(reason, MORE_LANES if self.spare.is_set() else "")

    async def wait_known(self, seconds: float) -> None:
        """Wait until there is a lane, or no store in reach; ``seconds`` at most. Raises StoreLost where a store is
        reached and this process has no share of its lanes."""
        if not self.configured:
            return
        await first_set(self.ready, self.out_of_reach, self.spare, seconds=seconds)
        if self.spare.is_set() and not self.usable:
            raise self._without_lane()

    async def park(self, parcels: Sequence[Parcel], cancels: Sequence[bytes]) -> frozenset[bytes]:
        return await self._write(lambda store, lane: store.park(lane, parcels, cancels), parcels)

    async def hold(self, items: Sequence[tuple[Parcel, Hold]]) -> None:
        await self._write(lambda store, lane: store.hold(lane, items), [parcel for parcel, _ in items])

    async def _write(self, work: Callable[[Store, Lane], Awaitable[T]], parcels: Sequence[Parcel]) -> T:
        """A lane that is lost under a write costs one try; the next one is another lane."""
        bulk = len(parcels) >= BULK_MESSAGES or sum(len(parcel.body) for parcel in parcels) >= BULK_BYTES
        while True:
            store = self._reached()
            lane = self._place(bulk=bulk)
            try:
                return await work(store, lane)
            except LaneLost as lost:
                self._counters.lanes_lost += 1
                self._drop([lane], str(lost))

    def _place(self, *, bulk: bool) -> Lane:
        """The lane for the next park. Raises StoreLost if there is none."""
        if not self._lanes:
            raise StoreLost("no lane of ours to park into")
        if not bulk:
            behind = {lane for lane, release in self._releases.values() if release.behind}
            first = int((time.monotonic() - self._began) / SMALL_BATCH_LANE_SECONDS) % len(self._lanes)
            for lane in self._lanes[first:] + self._lanes[:first]:
                if lane not in behind:
                    return lane
        return self._lanes[next(self._turn) % len(self._lanes)]

    async def restore(self, ahead_ms: int) -> Restoration:
        """Restore the soonest segment, if something in it is due within ``ahead_ms``."""
        store = self._reached()
        return await store.restore(store.now_upper_ms() + ahead_ms)

    def _reached(self) -> Store:
        if self._store is None:
            raise StoreLost("the store was not reached yet" if self.configured else "no store is configured")
        return self._store

    async def run(self, stopping: asyncio.Event) -> None:
        """Look once a second until stopping is set; then wait for the release loops to drop their lanes.

        Raises errors of the store that waiting does not mend (its schema is too old), and bugs.
        """
        try:
            await self._look_on(stopping)
            await self._all_dropped()
        finally:
            # After a bug, or a stop that took too long, loops may still run.
            for loop in self._releases:
                loop.cancel()
            await self._all_dropped()
            self.ready.clear()
            self._heartbeat.forget("lanes")
            ended = set() if self._upkeep is None else {self._upkeep}
            for upkeep in ended:
                upkeep.cancel()  # The next upkeep does the rest.
                await asyncio.wait([upkeep])
            if self._store is not None:
                await self._store.close()
            raise_first(take_failures(ended), unless=LOSSES)

    async def _look_on(self, stopping: asyncio.Event) -> None:
        beat = partial(self._heartbeat.beat, "lanes")
        retry, throttle = Backoff(beat, stopping), LogThrottle()
        for number in count():
            if stopping.is_set():
                return
            beat()
            try:
                await self._look(number, stopping)
            except StoreLost as lost:
                self.out_of_reach.set()
                told = throttle.should_log(str(lost), time.monotonic())
                if told and lost.advice:
                    log.error("store refused", reason=str(lost), next_step=lost.advice)
                elif told:
                    log.warning("store unreachable", reason=str(lost))
            else:
                self.out_of_reach.clear()
                retry.succeeded()
                throttle.reset()
            if self.out_of_reach.is_set():
                await retry.pause()
            await first_set(stopping, seconds=self._poll_seconds)  # A lane that fails at once is taken once a second.
            self._collect()

    async def _look(self, number: int, stopping: asyncio.Event) -> None:
        """Connect if necessary, and take or drop lanes. Without a broker drop all. Raises StoreLost."""
        if self._store is None:
            if self._connect is None:
                raise StoreLost("no store is configured")
            self._store = await self._connect()
            log.info("store connected")
        try:
            if self._away():
                self._drop(list(self._lanes_held()), "no broker")
                self._store.leave()
            else:
                await self._take_share(self._store, stopping)
        finally:
            self._start_upkeep(self._store, number)

    def _away(self) -> bool:
        """Whether the broker has been out of reach for ``away_seconds``, or since the start."""
        now = time.monotonic()
        if self._connection is None or self._connection.current is not None:
            self._away_since = None
            return False
        if not self._connection.connects:
            return True
        self._away_since = self._away_since or now
        return now - self._away_since >= self._away_seconds

    async def _take_share(self, store: Store, stopping: asyncio.Event) -> None:
        """Raises StoreLost."""
        look = await self._routed(store, self._live.rates if self._live else ())
        ordinary = [lane.number for lane in look.lanes if lane.route is None]
        if not ordinary:
            raise StoreLost("the store has no lanes", "run `delayer db upgrade`")
        self._warn_of_other_brokers(look.lanes)
        free = {lane.number for lane in look.lanes if not lane.owned}
        part = share(len(ordinary), look.live, look.rank)
        self._say_spare(spare=part == 0, live=look.live, lanes=len(ordinary))
        for numbers, wanted in (
            (ordinary, part),
            (sorted(look.routes.values()), share(len(look.routes), look.live, look.live - 1 - look.rank)),
        ):
            ours = [lane for lane in self._lanes_held() if lane.number in numbers]
            self._drop(ours[wanted:], "above the share of this process")
            # Each process begins at another lane, so fewer of them try to take the same one.
            begin = look.rank * len(numbers) // look.live
            for number in numbers[begin:] + numbers[:begin]:
                if len(ours) >= wanted or stopping.is_set():
                    break
                if number in free and (lane := await store.take(number)) is not None:
                    ours.append(lane)
                    self._begin(lane, stopping)

    async def limit(self, routes: Collection[bytes]) -> None:
        """Make a lane for each of these routes before its limit counts, if the store is connected. Raises StoreLost."""
        if self._store is not None:
            await self._routed(self._store, routes)

    async def _routed(self, store: Store, routes: Collection[bytes]) -> LaneTable:
        """Look, and make the lanes of these routes that are not there yet. Raises StoreLost."""
        look = await store.look()
        if missing := set(routes) - set(look.routes):
            await store.add_routes(missing)
            look = await store.look()
        return look

    def _begin(self, lane: Lane, stopping: asyncio.Event) -> None:
        release = self._release(lane)
        route = {} if lane.route is None else {"route": lane.route}
        log.info("lane taken", lane=lane.number, **route)
        loop = asyncio.create_task(release.run(stopping), name=f"release lane {lane.number}")
        loop.add_done_callback(lambda _: self._forget(lane))
        self._releases[loop] = lane, release
        if lane.route is None:
            self._lanes.append(lane)
            self.ready.set()

    def _lanes_held(self) -> list[Lane]:
        """The lanes that are ours to keep, in the order in which they were taken."""
        return [lane for lane, release in self._releases.values() if lane.owned and not release.leaving.is_set()]

    def _drop(self, lanes: Sequence[Lane], reason: str) -> None:
        """Tell their loops to end after the open claims."""
        for lane, release in list(self._releases.values()):
            if lane in lanes:
                log.info("lane dropped", lane=lane.number, reason=reason)
                release.leave()
                self._forget(lane)

    def _forget(self, lane: Lane) -> None:
        """Park into this lane no more."""
        if lane in self._lanes:
            self._lanes.remove(lane)
        if not self._lanes:
            self.ready.clear()

    def _say_spare(self, *, spare: bool, live: int, lanes: int) -> None:
        if spare and not self.spare.is_set():
            log.warning("no lane", processes=live, lanes=lanes, next_step=MORE_LANES)
        (self.spare.set if spare else self.spare.clear)()

    def _warn_of_other_brokers(self, lanes: Sequence[LaneRow]) -> None:
        """Daemons of another broker own lanes here: they publish our messages there, and we theirs here."""
        ours = self._broker()
        others = [lane.number for lane in lanes if lane.owned and ours and lane.broker not in ("", ours)]
        if others and others != self._others:
            log.warning("store shared", lanes=others, next_step=ONE_BROKER)
        self._others = others

    def _start_upkeep(self, store: Store, look: int) -> None:
        """Start the upkeep. It runs beside the looks: it may wait for locks, and the lanes must not wait for it.

        Raises the failure of the last round.
        """
        if self._upkeep is not None and self._upkeep.done():
            last, self._upkeep = self._upkeep, None
            last.result()
        if self._upkeep is None and look % UPKEEP_LOOKS == 0:
            self._upkeep = asyncio.create_task(store.maintain(), name="upkeep")

    def _collect(self) -> None:
        """Forget the loops that have ended, and their lanes. Raises what one of them failed of: a bug."""
        ended = {task for task in self._releases if task.done()}
        for task in ended:
            lane, _ = self._releases.pop(task)
            self._forget(lane)
        raise_first(take_failures(ended))

    async def _all_dropped(self) -> None:
        """Wait until every loop has ended."""
        while self._releases:
            await asyncio.wait(self._releases)
            self._collect()
