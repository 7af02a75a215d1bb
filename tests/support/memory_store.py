"""An in-memory store that behaves like the Postgres store (tests/conformance), for tests and simulations.

A :class:`MemoryStore` is shared by several daemons; each has a :class:`MemoryBacklog`. There are no threads and no
randomness, and the caller passes in the clock. Waiting uses the event loop's clock. Each statement happens at once,
after :attr:`MemoryStore.travel`. A claim is an open transaction: it locks its messages until it is settled or given up,
and a write that names the key of a locked message waits for that. Segments, and brokers that differ, are left out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from delayer.core.backoff import pause_ms
from delayer.core.errors import LaneLost, StoreLost
from delayer.core.hold import Hold
from delayer.core.message import REPLACE, WINDOW_MS, Due, Parcel, Target
from delayer.core.operations import Applied, Fold, Operation, Term, fold
from delayer.retry import first_set
from delayer.store.lanes.ownership import share
from delayer.store.postgres import FAR_MS

LEAD_MS = 40
LONGEST_SLEEP = 60.0


@dataclass(eq=False)
class Message:
    """A message that waits, or is held. ``parked_ms``: that of the first message of its burst."""

    id: int
    lane: int
    parcel: Parcel
    parked_ms: int
    attempts: int = 0
    hold: Hold | None = None
    """Why it is held; None of a message that waits."""
    retry_ms: int | None = None
    """When a held message is retried; None if only by an operator."""
    locked_by: MemoryClaimer | None = None

    @property
    def next_ms(self) -> int | None:
        """The earliest time at which a claim may take it."""
        return self.parcel.due_ms - WINDOW_MS if self.hold is None else self.retry_ms

    @property
    def as_due(self) -> Due:
        parked_ms = self.parked_ms if self.hold is None else None
        return Due(self.id, self.parcel.due_ms, self.attempts, self.parcel, True, self.hold, parked_ms)


class Change(NamedTuple):
    """An entry of the history."""

    what: str
    route: bytes
    target: Target
    due_ms: int


@dataclass
class LaneState:
    """A lane as all daemons see it."""

    route: bytes | None = None
    owner: MemoryLane | None = None


class MemoryStore:
    """The messages, keys, counters, history and lanes that daemons share."""

    def __init__(self, now_ms: Callable[[], int], lanes: int = 4) -> None:
        self.now_ms = now_ms
        self.messages: dict[int, Message] = {}
        self.keys: dict[bytes, Message] = {}
        self.counters: Counter[tuple[int, str]] = Counter()
        self.history: list[Change] = []
        self.lanes = {number: LaneState() for number in range(1, lanes + 1)}
        self.live: list[MemoryBacklog] = []
        self.travel: Callable[[], Awaitable[None]] = self._at_once
        """Awaited before each statement. A simulation delays statements there, or raises StoreLost."""
        self.intake = 0
        """The epoch of the intake: how often a process began to apply operations with keys."""
        self._ids = count(1)

    async def _at_once(self) -> None:
        await asyncio.sleep(0)

    def put(self, lane: int, parcel: Parcel, hold: Hold | None = None) -> None:
        """Park a message, or hold one that never waited."""
        since_ms = self.now_ms() if parcel.since_ms is None else parcel.since_ms
        parcel = parcel._replace(mode=REPLACE, since_ms=None)  # As a row, which does not have them.
        message = Message(next(self._ids), lane, parcel, since_ms)
        self.messages[message.id] = message
        if parcel.key is not None:
            self.keys[parcel.key] = message
        self.counters[lane, "parked"] += 1
        if hold is not None:
            self.hold(message, hold, not_before_ms=parcel.due_ms)
        self.wake(lane)

    def hold(self, message: Message, hold: Hold, not_before_ms: int = 0) -> None:
        """Hold a message, for the first time or again."""
        if message.hold is None:
            self.counters[message.lane, "held"] += 1
            self.note("held", message.parcel)
        message.attempts += 1
        message.hold = hold
        again_ms = self.now_ms() + pause_ms(message.attempts, message.id)
        message.retry_ms = hold.retry_ms(max(again_ms, not_before_ms))

    def take_out(self, message: Message, what: str) -> None:
        """Delete a released or cancelled message."""
        del self.messages[message.id]
        if (key := message.parcel.key) is not None and self.keys.get(key) is message:
            del self.keys[key]
        self.counters[message.lane, what] += 1
        if message.hold is not None:
            self.counters[message.lane, "held"] -= 1
        self.note(what, message.parcel)

    def note(self, what: str, parcel: Parcel) -> None:
        self.history.append(Change(what, parcel.route, parcel.target, parcel.due_ms))

    def lane_of(self, parcel: Parcel, own: int, far: int) -> int:
        """The lane of the message's route; else lane ``own`` or, if it is due late enough, lane ``far``."""
        of_route = [number for number, lane in self.lanes.items() if lane.route == parcel.route]
        return of_route[0] if of_route else far if parcel.due_ms >= self.now_ms() + FAR_MS else own

    def wake(self, lane: int) -> None:
        if (owner := self.lanes[lane].owner) is not None:
            owner.woken.set()

    def standing(self, batch: Fold) -> list[Message]:
        """The messages under the keys and groups of a batch."""
        groups = tuple(batch.groups)
        return [one for key, one in self.keys.items() if key in batch.keys or key.startswith(groups)]

    def free_in(self, lane: int) -> Iterator[Message]:
        """The messages of a lane that no claim has, in the order in which they came."""
        return (one for one in self.messages.values() if one.lane == lane and one.locked_by is None)

    def conserved(self) -> dict[str, int]:
        """Check the law of conservation, lane by lane; the counters of all lanes together."""
        for number in self.lanes:
            there = [one for one in self.messages.values() if one.lane == number]
            of = {kind: self.counters[number, kind] for kind in ("parked", "released", "cancelled", "held")}
            assert of["held"] == sum(one.hold is not None for one in there), f"lane {number}: {of}"
            assert of["parked"] == of["released"] + of["cancelled"] + len(there), f"lane {number}: {of}, {len(there)}"
        total: Counter[str] = Counter()
        for (_, kind), n in self.counters.items():
            total[kind] += n
        return total


class MemoryBacklog:
    """One daemon's side of the store. Satisfies the ports of intake and release: Backlog, Clock, Releases."""

    def __init__(self, store: MemoryStore, routes: Collection[bytes] = (), poll_seconds: float = 1.0) -> None:
        """``routes``: limited routes have their own lanes."""
        self._store = store
        self._routes = routes
        self._poll_seconds = poll_seconds
        self._own: list[MemoryLane] = []
        self._taken: asyncio.Queue[MemoryLane | None] = asyncio.Queue()
        self._far_turn = count()
        self._term = Term(0)

    @property
    def usable(self) -> bool:
        return any(lane.route is None for lane in self._kept())

    @property
    def reason(self) -> str:
        return "" if self.usable else "no lane of ours"

    def now_upper_ms(self) -> int:
        return self._store.now_ms()

    now_lower_ms = now_upper_ms

    def begin_term(self) -> None:
        self._term = Term(self._store.intake)

    async def apply(self, operations: Sequence[Operation]) -> Applied:
        batch, store, term = fold(operations), self._store, self._term
        await store.travel()
        while locked := [one.locked_by for one in store.standing(batch) if one.locked_by is not None]:
            await locked[0].ended.wait()
        if batch.keys or batch.groups:
            if store.intake != (term.seen if term.epoch is None else term.epoch):
                raise StoreLost("another process applies the operations with keys now")
            store.intake += term.epoch is None
            term.epoch = store.intake
        standing = store.standing(batch)
        touched = [one for one in standing if one.parcel.key not in batch.yielding]
        batch = batch.settle(
            {one.parcel.key: one.as_due.parked_ms for one in standing if one.parcel.key is not None}, store.now_ms()
        )
        own, far = self._own_lane(), self._far_lane()
        for message in touched:
            store.take_out(message, "cancelled")
        for parcel in batch.dropped:
            lane = store.lane_of(parcel, own, far)
            store.counters.update([(lane, "parked"), (lane, "cancelled")])
            store.note("cancelled", parcel)
        for parcel in batch.kept:
            store.put(store.lane_of(parcel, own, far), parcel)
        return batch.applied({one.parcel.key for one in touched if one.parcel.key is not None})

    async def hold(self, items: Sequence[tuple[Parcel, Hold]]) -> None:
        await self._store.travel()
        own = self._own_lane()
        for parcel, hold in items:
            self._store.put(self._store.lane_of(parcel, own, own), parcel, hold)

    def _own_lane(self) -> int:
        """The lane of messages that are due soon."""
        for lane in self._kept():
            if lane.route is None:
                return lane.number
        raise StoreLost("no lane of ours to park into")

    def _far_lane(self) -> int:
        """The lane for messages due later: all lanes in turn, regardless of their owners."""
        numbers = [number for number, lane in self._store.lanes.items() if lane.route is None]
        return numbers[next(self._far_turn) % len(numbers)]

    async def lanes(self) -> AsyncIterator[MemoryLane]:
        while (lane := await self._taken.get()) is not None:
            yield lane

    async def run(self, stopping: asyncio.Event) -> None:
        """Take and drop lanes until ``stopping`` is set; then wait until the release has closed them."""
        while not stopping.is_set():
            with suppress(StoreLost):
                await self._store.travel()
                self.look()
            await first_set(stopping, seconds=self._poll_seconds)
        self._taken.put_nowait(None)
        for lane in self._own:
            lane.leave()
        for lane in tuple(self._own):
            await lane.closed.wait()
        self.die()

    def look(self) -> None:
        """Take an even share of the lanes, and drop any above it."""
        store = self._store
        if self not in store.live:
            store.live.append(self)
        for route in sorted(set(self._routes) - {lane.route for lane in store.lanes.values()}):
            store.lanes[max(store.lanes) + 1] = LaneState(route)
        self._own = [lane for lane in self._own if lane.owned]
        for limited in (False, True):
            numbers = [number for number, lane in store.lanes.items() if (lane.route is not None) == limited]
            ours = [lane for lane in self._kept() if lane.number in numbers]
            rank = store.live.index(self)
            wanted = share(len(numbers), len(store.live), len(store.live) - 1 - rank if limited else rank)
            for lane in ours[wanted:]:
                lane.leave()
            free = [number for number in numbers if store.lanes[number].owner is None]
            for number in free[: max(0, wanted - len(ours))]:
                lane = store.lanes[number].owner = MemoryLane(store, number, store.lanes[number].route)
                self._own.append(lane)
                self._taken.put_nowait(lane)

    def die(self) -> None:
        """End this daemon's sessions, as in a crash or hang: open claims are rolled back, and its lanes are free. A
        later poll starts over."""
        for lane in self._own:
            lane.end()
        self._own = []
        if self in self._store.live:
            self._store.live.remove(self)

    def _kept(self) -> list[MemoryLane]:
        return [lane for lane in self._own if lane.owned and not lane.leaving.is_set()]


class MemoryLane:
    """Satisfies release.ports.Lane."""

    def __init__(self, store: MemoryStore, number: int, route: bytes | None) -> None:
        self.store = store
        self.number = number
        self.route = route
        self.claimers = [MemoryClaimer(self), MemoryClaimer(self)]
        self.leaving = asyncio.Event()
        self.closed = asyncio.Event()
        self.woken = asyncio.Event()

    @property
    def owned(self) -> bool:
        return self.store.lanes[self.number].owner is self

    def check_owned(self) -> None:
        if not self.owned:
            raise LaneLost(f"lane {self.number}: another process may have it")

    def leave(self) -> None:
        self.leaving.set()
        self.woken.set()

    def sleep_hint(self) -> float:
        self.check_owned()
        return min(max(0.0, self._seconds_to_sleep()), LONGEST_SLEEP)

    def _seconds_to_sleep(self) -> float:
        """Until the next message is to be claimed. A waiting one is claimed a little before it is due."""
        nexts = [one.next_ms + (WINDOW_MS - LEAD_MS if one.hold is None else 0)
                 for one in self.store.free_in(self.number) if one.next_ms is not None]  # fmt: skip
        return (min(nexts) - self.store.now_ms()) / 1000 if nexts else LONGEST_SLEEP

    async def wait(self, seconds: float) -> None:
        now = asyncio.get_running_loop().time
        deadline = now() + seconds
        while self.owned and not self.leaving.is_set():
            self.woken.clear()
            left = min(deadline - now(), self._seconds_to_sleep())
            if left <= 0.0:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self.woken.wait()

    async def close(self) -> None:
        self.end()

    def end(self) -> None:
        """Roll back open claims, and free the lane."""
        for claimer in self.claimers:
            claimer.roll_back()
        if self.owned:
            self.store.lanes[self.number].owner = None
        self.woken.set()
        self.closed.set()


@dataclass(eq=False)
class MemoryClaimer:
    """Satisfies release.ports.Claimer."""

    lane: MemoryLane
    rows: list[Message] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    held_turn: bool = False

    async def claim(self, limit: int, max_bytes: int) -> list[Due]:
        if self.rows:
            raise RuntimeError(f"lane {self.lane.number}: claim before the last one was settled or given up")
        await self._statement()
        now_ms = self.lane.store.now_ms()
        ready = [one for one in self.lane.store.free_in(self.lane.number)
                 if one.next_ms is not None and one.next_ms <= now_ms]  # fmt: skip
        ready.sort(key=lambda one: (one.next_ms, one.id))
        waiting, held = ([one for one in ready if (one.hold is not None) is of] for of in (False, True))
        self.held_turn = not self.held_turn and bool(held)
        size = 0
        for one in held[: max(1, limit // 10)] if self.held_turn or not waiting else waiting[:limit]:
            if self.rows and size >= max_bytes:
                break
            size += len(one.parcel.body) + len(one.parcel.properties)
            one.locked_by = self
            self.rows.append(one)
        self.ended.clear()
        return [one.as_due for one in self.rows]

    async def settle(
        self,
        released: Sequence[Due],
        held: Sequence[tuple[Due, Hold]],
        written_ms: Callable[[], Sequence[float]] = tuple,
    ) -> None:
        if not self.rows and not (released or held):
            return self.lane.check_owned()
        await self._statement()
        if not self.rows:
            raise LaneLost(f"lane {self.lane.number}: its release was rolled back")
        if len(released) + len(held) != (claimed := len(self.rows)):
            self.roll_back()
            raise ValueError(f"claimed {claimed}, settled {len(released)} released and {len(held)} held")
        store, by_id = self.lane.store, {one.id: one for one in self.rows}
        for row in released:
            store.take_out(by_id[row.id], "released")
        for row, hold in held:
            store.hold(by_id[row.id], hold)
        self.roll_back()

    async def give_up(self) -> None:
        self.roll_back()

    def roll_back(self) -> None:
        """End the transaction; the rest of the claim is free again."""
        for one in self.rows:
            one.locked_by = None
        self.rows = []
        self.ended.set()
        self.lane.woken.set()

    async def _statement(self) -> None:
        self.lane.check_owned()
        await self.lane.store.travel()
        self.lane.check_owned()
