"""The lanes of this process: taken at the start, released from, adopted from the dead, let go at the end.

A lane is a connection, so there must not be more of them with every restart. Hence an adopted lane is given back when
nothing in it is due soon, or when a daemon that begins asks for it. Only those are adopted that need it, and not at
once by a daemon that has just begun: after the store or a whole service was away, every daemon finds its share of the
old lanes before others adopt what is left.

A daemon that cannot publish can release nothing: it adopts nothing, and lets go of what it has adopted after some
seconds. Its own lanes it keeps: a broker that takes no messages may still give some, and they must be parked. One that
does not even reach its broker has nothing to park either, and lets go of these too: others may reach it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import count
from typing import Final, TypeVar

import structlog

from delayer.core.backoff import Sparing
from delayer.core.errors import LaneLost, StoreLost
from delayer.core.hold import Hold
from delayer.core.message import Parcel
from delayer.core.segment import Restoration
from delayer.core.values import TakenOut
from delayer.services.asking import Asking
from delayer.services.counting import Counters
from delayer.services.in_hand import LanesInHand, is_small
from delayer.services.lasting import Lasting
from delayer.services.ports import Lane, Pulse, Store
from delayer.services.release import Release
from delayer.services.retry import LOSSES, Retry, raise_first, take_failures

log = structlog.get_logger(__name__)

T = TypeVar("T")

LOOK_AROUND: Final = 1.0
"""Seconds between two looks for lanes without an owner."""
PATIENCE: Final = 2
"""Looks with all lanes of our own in hand before the first that adopts: others may be about to own what is free."""
MUTE_SECONDS: Final = 10.0
"""How long a daemon that can publish nothing keeps adopted lanes, and one that is cut off from its broker all lanes."""
UPKEEP: Final = 60
"""Looks between two rounds of partition upkeep."""


class Lanes:
    """Keeps ``wanted`` lanes of its own and any number of adopted ones, each with a release loop.

    Large parks go to our own lanes in turn, small ones to one for a while; adopted lanes are only emptied. Satisfies
    ports.Parking and ports.Holder.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Store]],
        wanted: int,
        release: Callable[[Lane], Release],
        *,
        pulse: Pulse,
        counters: Counters,
        publishing: Callable[[], bool] = lambda: True,
        reaching: Callable[[], bool] = lambda: True,
    ) -> None:
        """``publishing``: whether messages can be published at present. ``reaching``: whether the broker is reached,
        even if it takes none."""
        self._mute, self._cut_off = Lasting(publishing), Lasting(reaching)
        self._connect = connect
        self._wanted = wanted
        self._pulse = pulse
        self._counters = counters
        self._store: Store | None = None
        self._in_hand = LanesInHand(release, counters)
        self._upkeep: asyncio.Task[None] | None = None
        self._asking = Asking()
        self._share = wanted
        self._complete = 0  # looks in a row that found all lanes of our own in hand
        self._out_of_reach = asyncio.Event()

    @property
    def out_of_reach(self) -> asyncio.Event:
        """Set while the last look met a store that could not be reached."""
        return self._out_of_reach

    @property
    def ready(self) -> asyncio.Event:
        """Set while at least one lane of ours can be parked into."""
        return self._in_hand.ready

    @property
    def adopted(self) -> list[int]:
        """The lanes of others that we release from."""
        return sorted(lane.number for lane in self._in_hand.adopted)

    @property
    def numbers(self) -> list[int]:
        """The lanes that we release from, our own and adopted."""
        return sorted(lane.number for lane in self._in_hand.loops.values())

    def now_ms(self) -> int | None:
        """An upper bound of the store's clock, or None while no store was reached yet."""
        return None if self._store is None else self._store.now_ms()

    def sure_ms(self) -> int | None:
        """A lower bound of the store's clock, or None while no store was reached yet."""
        return None if self._store is None else self._store.sure_ms()

    async def park(self, parcels: Sequence[Parcel], cancels: Sequence[bytes]) -> TakenOut:
        """See ports.Parking."""
        return await self._write(lambda store, lane: store.park(lane, parcels, cancels), small=is_small(parcels))

    async def hold(self, items: Sequence[tuple[Parcel, Hold]]) -> None:
        """Into the held table of a lane of ours. See ports.Holder."""
        small = is_small([parcel for parcel, _ in items])
        await self._write(lambda store, lane: store.hold(lane, items), small=small)

    async def restore(self, ahead_ms: int) -> Restoration:
        """Restore the soonest segment, if something in it is due within ``ahead_ms``, into a lane of ours."""
        return await self._write(lambda store, lane: store.restore(lane, store.now_ms() + ahead_ms))

    async def doubtful(self, ahead_ms: int) -> list[int]:
        """Segments due within ``ahead_ms`` that :meth:`restore` leaves alone. See ports.Store."""
        store, _ = self._place()
        return await store.doubtful(store.now_ms() + ahead_ms)

    async def restore_again(self, segment: int) -> Restoration:
        """Try to restore one of :meth:`doubtful` into a lane of ours."""
        return await self._write(lambda store, lane: store.restore_again(lane, segment))

    async def _write(self, work: Callable[[Store, Lane], Awaitable[T]], *, small: bool = False) -> T:
        """A lane lost under our hands costs one try; the next one is another lane."""
        while True:
            store, lane = self._place(small=small)
            try:
                return await work(store, lane)
            except LaneLost as lost:
                self._in_hand.disown(lane, lost)

    async def run(self, stopping: asyncio.Event) -> None:
        """Connect, own, adopt and maintain until stopping is set; then wait for the release loops to let go.

        Raises whatever the store says that waiting does not mend (its schema is too old).
        """
        try:
            await self._tend(stopping)
        finally:
            self._in_hand.ready.clear()
            self._pulse.forget("lanes")
            ended = set() if self._upkeep is None else {self._upkeep}
            for upkeep in ended:
                upkeep.cancel()  # half of an upkeep is as good as none
                await asyncio.wait([upkeep])
            if self._store is not None:
                await self._store.close()
            raise_first(take_failures(ended), unless=LOSSES)

    async def _tend(self, stopping: asyncio.Event) -> None:
        beat = partial(self._pulse.beat, "lanes")
        retry, sparing = Retry(stopping, beat), Sparing()
        looks = count()
        try:
            while not stopping.is_set():
                beat()
                try:
                    await self._look_around(next(looks), stopping)
                    self._out_of_reach.clear()
                    retry.succeeded()
                    sparing.over()
                except StoreLost as lost:
                    self._out_of_reach.set()
                    advice = {"next_step": lost.advice} if lost.advice else {}
                    if sparing.worth(str(lost), asyncio.get_running_loop().time()):
                        log.warning("store unreachable", reason=str(lost), **advice)
                    await retry.pause()
                await self._until_next_look(stopping)
            await self._asking.stop()
            await self._in_hand.all_let_go()
        finally:
            # After a bug, and when the time to stop in is over, nobody has told the loops.
            for loop in self._in_hand.loops:
                loop.cancel()
            await self._in_hand.all_let_go()
            await self._asking.stop()

    async def _look_around(self, look: int, stopping: asyncio.Event) -> None:
        if self._store is None:
            self._store = await self._connect()
            log.info("store connected")
        losses = []
        # One of these may fail where the others do not: taking a lane needs a connection more.
        for doing in (self._own_lanes, self._let_go, self._adopt):
            self._pulse.beat("lanes")
            try:
                await doing(self._store, stopping)
            except StoreLost as lost:
                losses.append(lost)
        self._keep_up(self._store, look)
        if losses:
            raise losses[0]

    def _keep_up(self, store: Store, look: int) -> None:
        """Upkeep goes on beside the looks: it may wait for locks, and the lanes of the dead must not wait for it.

        Raises what the last round failed of.
        """
        if self._upkeep is not None and self._upkeep.done():
            last, self._upkeep = self._upkeep, None
            last.result()
        if self._upkeep is None and look % UPKEEP == 0:
            self._upkeep = asyncio.create_task(store.maintain(), name="upkeep")

    async def _own_lanes(self, store: Store, stopping: asyncio.Event) -> None:
        """What is free is released from at once; asking others for more takes seconds, and goes on beside the looks."""
        self._in_hand.begin(self._asking.answer(), stopping)
        self._complete = 0 if self._missing > 0 else self._complete + 1
        while self._in_hand.adopted and self._missing > 0:
            await self._in_hand.keep_one()
        if self._missing > 0 and not self._asking.tasks and self._cut_off.seconds() <= MUTE_SECONDS:
            self._in_hand.begin(await store.own_free(self._missing), stopping)
            if self._missing > 0 and self._cut_off.seconds() == 0.0:
                self._asking.begin(store, self._missing)

    @property
    def _missing(self) -> int:
        return self._wanted - len(self._in_hand.own)

    async def _adopt(self, store: Store, stopping: asyncio.Event) -> None:
        """Not more than a share at a time: several daemons that find a long backlog release it together.

        The share doubles while there is more, so that whoever is alone has the lanes of many dead within seconds.
        """
        if self._complete <= PATIENCE or self._mute.seconds() > 0.0:
            return
        share, self._share = self._share, self._wanted  # what fails is asked for less the next time
        lanes = await store.adopt(share)
        self._in_hand.adopt(lanes, stopping)
        if len(lanes) == share:
            self._share = 2 * share

    async def _let_go(self, store: Store, _stopping: asyncio.Event) -> None:
        """Tell the loops of adopted lanes to end in which nothing is due soon, or that somebody else will own, or that
        cannot be released from; and those of all lanes where there is no broker to take from or to give to."""
        mute, adopted = self._mute.seconds() > MUTE_SECONDS, self._in_hand.adopted
        wanted = await store.wanted([lane.number for lane in adopted]) if adopted else set()
        for lane in [lane for lane in adopted if lane.idle or lane.number in wanted or mute]:
            reason = "asked for" if lane.number in wanted else "no broker" if mute else "idle"
            self._in_hand.let_go(lane, reason)
        while self._in_hand.own and self._cut_off.seconds() > MUTE_SECONDS:
            self._in_hand.let_go_own("no broker")

    def _place(self, *, small: bool = False) -> tuple[Store, Lane]:
        if self._store is None:
            raise StoreLost("no lane of ours to park into")
        return self._store, self._in_hand.place(small=small)

    async def _until_next_look(self, stopping: asyncio.Event) -> None:
        """Wait for a loop to end, for the order to stop, or for the time of the next look."""
        stop = asyncio.create_task(stopping.wait(), name="stopping")
        await asyncio.wait(
            [stop, *self._asking.tasks, *self._in_hand.loops], timeout=LOOK_AROUND, return_when=asyncio.FIRST_COMPLETED
        )
        stop.cancel()
        self._in_hand.collect()
