"""Scripted stand-ins for ports, each for tests of one service: they follow a script and record each call.

None of them behaves like a broker or a store: memory_broker.py and memory_store.py do. A script injects the failure, or
records the call, that a test is about.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

from delayer.amqp.errors import BrokerLost
from delayer.amqp.properties import encode_headers, entry, long_string
from delayer.amqp.values import CONFIRMED, Delivery, Outgoing, Pace
from delayer.core.cascade import Cascade
from delayer.core.hold import Hold, HoldKind, Limits, Outcome
from delayer.core.marks import ID
from delayer.core.message import Due, LaneRow, LaneTable, Parcel, Target
from delayer.core.operations import Applied, Fold, Term
from delayer.core.plan import Mode, Policy
from delayer.core.segment import Restoration
from delayer.format.envelope import Endpoints
from delayer.intake.consume import Handler
from delayer.intake.session import AckTracker, Session

NOW = 1_800_000_000_000


def delivery(
    tag: int, *headers: bytes, exchange: bytes = b"orders.in", key: bytes = b"k", body: bytes = b""
) -> Delivery:
    """A delivery with these encoded header entries."""
    return Delivery(tag, False, exchange, key, encode_headers(b"".join(headers)), body)


WHY = Hold(HoldKind.NACKED, "why")
LATE = Hold(HoldKind.LATE, "too late")
NO_CONFIRM = Hold(HoldKind.UNANSWERED, "no confirm", may_be_delivered=True)


def due(id: int, *, attempts: int = 0, sound: bool = True, properties: bytes = b"\0\0", key: bytes = b"k") -> Due:
    parcel = Parcel(NOW - 5, b"orders.in", b"orders.in", b"k", Target(b"orders.out", key), properties, b"%d" % id)
    return Due(id, parcel.due_ms, attempts, parcel, sound)


def outgoing(token: bytes, exchange: bytes = b"orders.out") -> Outgoing:
    return Outgoing(exchange, b"k", encode_headers(entry(ID, long_string(token))), b"", token)


def ids() -> Callable[[], bytes]:
    """id-0, id-1, …"""
    numbers = count()
    return lambda: b"id-%d" % next(numbers)


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until the condition holds. For conditions without an event; the test's deadline bounds it."""
    while not condition():  # noqa: ASYNC110 - the conditions are counts and lists of scripts
        await asyncio.sleep(0)


class Heartbeat:
    """Notes the names of loops that beat, and of loops that said goodbye."""

    def __init__(self) -> None:
        self.beats: list[str] = []
        self.forgotten: list[str] = []

    def beat(self, loop: str) -> None:
        self.beats.append(loop)

    def forget(self, loop: str) -> None:
        self.forgotten.append(loop)


class ScriptedSubscription:
    """Hands out the script's batches and raises its exceptions; after its end there are no more batches."""

    def __init__(self, script: Iterable[Sequence[Delivery] | Exception] = ()) -> None:
        self.acked: list[tuple[int, bool]] = []
        self.behind = False
        self.prefetch = 5_000
        self.overrun = False
        self.passes_over = False
        self._script = deque(script)
        self.read = asyncio.Event()
        self.events: list[str] = []

    async def next_batch(self, limit: int, gather: float) -> list[Delivery]:
        await asyncio.sleep(0)
        if not self._script:
            self.read.set()
            return []
        step = self._script.popleft()
        if isinstance(step, Exception):
            raise step
        return list(step)

    def ack(self, tag: int, *, multiple: bool) -> None:
        self.acked.append((tag, multiple))
        self.events.append(f"ack {tag}")

    def postpone(self, tags: Sequence[int]) -> bool:
        self.events.append(f"postponed {[*tags]}")
        return self.passes_over

    def stop(self) -> None:
        self.events.append("stopped")

    async def close(self) -> None:
        self.events.append("closed")


class ScriptedConsumer:
    """Hands out these subscriptions one by one, then raises BrokerLost."""

    def __init__(self, *subscriptions: ScriptedSubscription | Exception) -> None:
        self._left = deque(subscriptions)

    async def subscribe(self, queue: str, prefetch: int) -> ScriptedSubscription:
        one = self._left.popleft() if self._left else BrokerLost("no more")
        if isinstance(one, Exception):
            raise one
        return one


class ScriptedPublisher:
    """Answers a message with the entry of ``answers`` for its routing key; confirms messages without one."""

    max_properties = 100_000

    def __init__(self, answers: dict[bytes, Outcome | BaseException] | None = None) -> None:
        self.answers = answers or {}
        self.ready = True
        self.batch_limit = 10_000
        self.published: list[Outgoing] = []
        self.paces: list[Pace] = []
        self.written_ms: dict[int, float] = {}
        self.batches = 0
        self.closed = 0

    async def publish(self, batch: Sequence[Outgoing], pace: Pace | None = None) -> list[Outcome]:
        self.batches += 1
        if pace is not None:
            self.paces.append(pace)
            pace.written_ms |= self.written_ms
        outcomes: list[Outcome] = []
        for message in batch:
            answer = self.answers.get(message.routing_key, CONFIRMED)
            if isinstance(answer, BaseException):
                raise answer
            outcomes.append(answer)
        await asyncio.sleep(0)
        self.published += batch
        return outcomes

    async def close(self) -> None:
        self.closed += 1


class Carrier(Handler):
    """Carries a batch, named by its first tag, at once; a gate delays it, a failure replaces it."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.gates: dict[int, asyncio.Event] = {}
        self.failures: dict[int, Exception] = {}
        self.most = self.flushed = self.ended = 0
        self._running = 0

    def begin(self, session: Session) -> None:
        self.session = session

    def handle(self, deliveries: Sequence[Delivery]) -> None:
        self.session.start(self.carry(deliveries, self.session.acks), punctual=self.punctual)

    is_waiting = False
    punctual = False

    def flush(self) -> None:
        self.flushed += 1

    def end(self) -> None:
        self.ended += 1

    async def carry(self, deliveries: Sequence[Delivery], settler: AckTracker) -> None:
        first = deliveries[0].tag
        self.begun.append(first)
        self._running += 1
        self.most = max(self.most, self._running)
        try:
            if first in self.gates:
                await self.gates[first].wait()
            if first in self.failures:
                raise self.failures[first]
            settler.accept(one.tag for one in deliveries)
        finally:
            self._running -= 1

    def hold_back(self, *tags: int) -> None:
        self.gates |= {tag: asyncio.Event() for tag in tags}


class ScriptedLane:
    """A lane with one claimer. Its claims come from a script, and it records how the caller settles them."""

    def __init__(self, number: int = 1, claims: Iterable[Sequence[Due] | Exception] = (), hint: float = 3600.0) -> None:
        self.number = number
        self.route: bytes | None = None
        self.owned = True
        self.hint = hint
        self.fail_settle: Exception | None = None
        self.behind = False
        self.leaving, self.ended = asyncio.Event(), asyncio.Event()
        self.on_end: Callable[[], object] = bool
        self.events: list[str] = []
        self.limits: list[int] = []
        self.settled: list[tuple[list[Due], list[tuple[Due, str]]]] = []
        self.closed = asyncio.Event()
        self.sleeping = asyncio.Event()
        self.claimers = [self]
        self._claims = deque(claims)
        self._woken = asyncio.Event()

    async def claim(self, limit: int, max_bytes: int) -> list[Due]:
        self.events.append("claim")
        self.limits.append(limit)
        self._woken.clear()  # here and not when a wait begins: a note between two waits must not be lost
        step = self._claims.popleft() if self._claims else []
        if isinstance(step, Exception):
            raise step
        return list(step)

    async def settle(
        self, released: Sequence[Due], held: Sequence[tuple[Due, str]], written_ms: Callable[[], Sequence[float]]
    ) -> None:
        self.events.append("settle")
        if self.fail_settle is not None:
            raise self.fail_settle
        self.settled.append((list(released), list(held)))

    async def give_up(self) -> None:
        self.events.append("give up")

    def sleep_hint(self) -> float:
        return 0.0 if self._claims else self.hint

    def leave(self) -> None:
        self.leaving.set()
        self._woken.set()

    def note_parked(self, due_ms: int) -> None:
        self._woken.set()

    async def wait(self, seconds: float) -> None:
        self.sleeping.set()
        deadline = time.monotonic() + seconds
        while not self._woken.is_set() and (left := deadline - time.monotonic()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._woken.wait()

    async def close(self) -> None:
        if not self.closed.is_set():
            self.events.append("release")
            self.owned = False
            self.closed.set()
            self.ended.set()
            self.on_end()


Parked = tuple[int, list[Parcel], int]
"""The lane of a park, its messages, and the lane of those that are due late enough."""


class ScriptedStore:
    """Two lanes, more on request. Calls ``on_write``, which may raise, before recording a park. Segments come from a
    script."""

    def __init__(self, lanes: int = 2) -> None:
        self.routes: dict[int, bytes | None] = dict.fromkeys(range(1, lanes + 1))
        self.others: set[int] = set()
        """Lanes that other processes own."""
        self.live, self.rank = 1, 0
        self.made: list[ScriptedLane] = []
        self.parked: list[Parked] = []
        self.held: list[tuple[int, str]] = []
        self.maintained = 0
        self.on_maintain: Callable[[], Awaitable[None]] | None = None
        self.looks = 0
        self.closed = False
        self.failure: Exception | None = None
        self.on_write: Callable[[int], Awaitable[None]] | None = None
        self.segments: deque[Restoration | Exception] = deque()
        self.horizons: list[int] = []

    def now_upper_ms(self) -> int:
        return NOW

    def now_lower_ms(self) -> int:
        return NOW

    async def apply(self, lane: ScriptedLane, batch: Fold, far: int, term: Term, inbox: Sequence[int] = ()) -> Applied:
        if self.on_write is not None:
            await self.on_write(lane.number)
        self.parked.append((lane.number, batch.kept, far))
        return Applied()

    async def hold(self, lane: ScriptedLane, parcels: Sequence[tuple[Parcel, Hold]]) -> None:
        if self.on_write is not None:
            await self.on_write(lane.number)
        self.held += [(lane.number, reason) for _, reason in parcels]

    async def restore(self, horizon_ms: int) -> Restoration:
        self.horizons.append(horizon_ms)
        if self.on_write is not None:
            await self.on_write(0)
        step = self.segments.popleft() if self.segments else None
        if isinstance(step, Exception):
            raise step
        return step

    @property
    def locks(self) -> ScriptedStore:
        return self

    @property
    def ours(self) -> set[int]:
        return {lane.number for lane in self.made if lane.owned}

    async def look(self) -> LaneTable:
        self.looks += 1
        if self.failure is not None:
            raise self.failure
        owned = self.ours | self.others
        lanes = [LaneRow(number, route, number in owned) for number, route in self.routes.items()]
        return LaneTable(lanes, self.live, self.rank)

    async def take(self, number: int) -> ScriptedLane | None:
        if self.failure is not None:
            raise self.failure
        if number in self.ours | self.others:
            return None
        lane = ScriptedLane(number, hint=0.005)
        lane.route = self.routes[number]
        self.made.append(lane)
        return lane

    async def take_limited(self, numbers: Sequence[int]) -> list[ScriptedLane]:
        return [lane for number in numbers if (lane := await self.take(number)) is not None]

    def leave(self) -> None:
        return

    async def add_routes(self, routes: Collection[bytes]) -> None:
        self.routes |= {len(self.routes) + 1 + at: route for at, route in enumerate(sorted(routes))}

    async def maintain(self) -> None:
        self.maintained += 1
        if self.on_maintain is not None:
            await self.on_maintain()

    async def close(self) -> None:
        self.closed = True


@dataclass
class ScriptedLive:
    """Satisfies IntakeSettings and ReleaseSettings."""

    in_force: Policy = field(default_factory=lambda: Policy(Mode.NATIVE, {}, 86_400_000))
    places: Endpoints = field(default_factory=lambda: Endpoints(Cascade(), b"delays.due", b"delays.refused", 10_000))
    now: int = NOW
    width: int = 0
    """Milliseconds from the lower bound of the clock to the upper one."""
    limits: Limits = field(default_factory=dict)
    holds_in_store: bool = True
    rates: Mapping[bytes, float] = field(default_factory=dict)

    def policy(self) -> Policy:
        return self.in_force

    def names(self) -> Endpoints:
        return self.places

    def late_limits(self) -> Limits:
        return self.limits

    def now_upper_ms(self) -> int:
        return self.now + self.width

    def now_lower_ms(self) -> int:
        return self.now


def host_ms() -> int:
    """This host's clock."""
    return int(time.time() * 1000)


class HostLive(ScriptedLive):
    """With this host's clock."""

    def now_upper_ms(self) -> int:
        return host_ms()

    now_lower_ms = now_upper_ms


def kind_of(outcome: Outcome) -> HoldKind | None:
    """Why the message is held; None if it was confirmed."""
    return outcome.kind if isinstance(outcome, Hold) else None
