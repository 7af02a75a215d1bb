"""The contract of Handler: it accepts every delivery, or its work raises a loss and the rest returns to the queue.

Each handler runs on an in-memory broker and store. Every message must always be in at least one place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from delayer.amqp.properties import encode_headers, entry, int64, long_string
from delayer.amqp.values import Outgoing
from delayer.core.cascade import LEVELS, Cascade
from delayer.core.counters import Counters
from delayer.core.errors import StoreLost
from delayer.core.message import Parcel, Target
from delayer.core.plan import Mode, Policy, Route
from delayer.daemon.live_settings import NATIVE_KEEP_MS
from delayer.format.envelope import Endpoints, envelope_properties
from delayer.intake.consume import Handler
from delayer.intake.dispatch import Dispatch
from delayer.intake.handle import KEEP_MS, DueHandler, IntakeHandler
from delayer.intake.session import Session
from delayer.intake.takeover import LevelTakeover
from delayer.retry import LOSSES
from tests.support.fakes import Carrier, HostLive, host_ms, ids
from tests.support.memory_broker import MemoryBroker, MemoryConsumer, MemoryLink, MemoryPublisher
from tests.support.memory_store import MemoryBacklog, MemoryStore

CASCADE = Cascade()
OUR_QUEUES = (CASCADE.delivery, CASCADE.strays, "delays.refused", *map(CASCADE.level, range(LEVELS)))


class Scene:
    """A queue, a handler for it, and everything that the handler may put messages into."""

    def __init__(self, make: Callable[[Scene], Handler]) -> None:
        self.broker = MemoryBroker()
        for name in ("delays", "out", *OUR_QUEUES):
            self.broker.declare(name)
        self.broker.bindings = {name: [(name, "#")] for name in OUR_QUEUES}
        self.broker.bindings |= {"orders.in": [("delays", "#")], "orders.out": [("out", "k")]}
        self.consuming, self.publishing = MemoryLink(self.broker), MemoryLink(self.broker)
        self.publisher = MemoryPublisher(self.publishing)
        self.store = MemoryStore(host_ms)
        self.backlog = MemoryBacklog(self.store)
        self.backlog.look()
        self.counters = Counters()
        places = Endpoints(CASCADE, b"delays.due", b"delays.refused", 10_000)
        self.live = HostLive(places=places, limits={b"orders.in": 60_000})
        self.handler = make(self)

    def dispatch(self) -> Dispatch:
        return Dispatch(self.publisher, self.backlog, self.live, self.counters, new_id=ids())

    def send(self, messages: list[Outgoing]) -> None:
        for message in messages:
            self.broker.publish(message)

    async def handle(self, *, end_early: bool = False) -> None:
        """Handle what waits in the queue, in small batches, as the consumer does. Raises the first loss."""
        subscription = await MemoryConsumer(self.consuming).subscribe("delays", 1000)
        session = Session(subscription, lambda: None, 3)
        self.handler.begin(session)
        try:
            while subscription.behind:
                batch = await subscription.next_batch(7, 0.0)
                session.acks.add(batch)
                self.handler.handle(batch)
                await session.wait_for_room()
            if not end_early:
                self.handler.flush()
                await session.wait_until_idle()
        except LOSSES:
            self.handler.flush()
            await session.wait_while(lambda: self.handler.is_waiting)  # A loss does not block the rest.
            raise
        finally:
            if end_early:
                session.start = no_more  # type: ignore[method-assign]
            self.handler.end()
            await session.finish()
            session.acks.flush()
            await subscription.close()

    @property
    def left(self) -> list[bytes]:
        """The messages waiting in the queue."""
        return self._in("delays")

    @property
    def elsewhere(self) -> list[bytes]:
        """The messages the handler stored or published."""
        waiting = [one.parcel.body for one in self.store.messages.values()]
        return sorted([*waiting, *(body for name in ("out", *OUR_QUEUES) for body in self._in(name))])

    def _in(self, queue: str) -> list[bytes]:
        return [one.body for one in self.broker.queues[queue].ready]


def no_more(_: object, **__: object) -> None:
    raise AssertionError("work began after the end")


def intake(mode: Mode, *, has_store: bool = True) -> Callable[[Scene], Handler]:
    def make(it: Scene) -> Handler:
        keep_ms = KEEP_MS if mode is Mode.STORE else NATIVE_KEEP_MS
        route = Route(b"orders.in", b"orders.out", late_limit_ms=60_000)
        it.live.in_force = Policy(mode, {b"orders.in": route}, 10**12, keep_ms=keep_ms, has_store=has_store)
        it.live.holds_in_store = has_store
        return IntakeHandler(it.live, it.dispatch(), it.backlog, it.counters)

    return make


def takeover(it: Scene) -> Handler:
    return LevelTakeover(Cascade("nservicebus-v2"), 11, it.backlog, it.live, it.counters)


HANDLERS: dict[str, Callable[[Scene], Handler]] = {
    "store mode": intake(Mode.STORE),
    "native mode": intake(Mode.NATIVE, has_store=False),
    "native mode with a store": intake(Mode.NATIVE),
    "due queue": lambda it: DueHandler(it.live, it.dispatch()),
    "takeover": takeover,
}
"""The real handlers. The fake accepts everything and stores nothing, so it has a separate test."""


def says(name: bytes, value: int | bytes) -> bytes:
    return entry(name, int64(value) if isinstance(value, int) else long_string(value))


def envelope(due_ms: int, key: bytes = b"k", inner: bytes = b"\0\0") -> bytes:
    return envelope_properties(
        Parcel(due_ms, b"orders.in", b"orders.in", b"k", Target(b"orders.out", key), inner, b""), b"id"
    )


def messages() -> list[Outgoing]:
    """Good and hostile messages of every queue, with distinct bodies. Each key has three."""
    now = host_ms()
    wrong = [
        b"",
        b"\0",
        b"\xff\xff",
        b"\x20\x00\xff",
        encode_headers(b"\x03bad"),
        encode_headers(says(b"x", bytes(10_000))),
    ]
    delays: list[int | bytes] = [-5, 0, 40, 90, 400, 5_000, 3_600_000, 1 << 62, b"soon", b"1500.5"]
    asked = [says(b"x-delay", delay) for delay in delays]
    asked += [says(b"x-delay", delay) + says(b"x-delay-key", b"k%d" % delay) for delay in (0, 60, 90_000, 600_000)]
    asked += [says(b"x-deliver-at", now - 3_600_000), says(b"x-delay-key", b""), says(b"X-Delay", 5), b""]
    asked += [says(b"x-delay", 60) + says(b"x-delay-routing-key", b"gone"), says(b"x-delay-routing-key", b"gone")]
    dues = [now - 3_600_000, now - 5, now + 60, now + 800, now + 5_000, now + 3_600_000, 1 << 62]
    enveloped = [envelope(due_ms) for due_ms in dues] + [envelope(now, b"gone"), envelope(now, inner=b"\xff")]
    kinds = [*wrong, *map(encode_headers, asked), *enveloped]
    return [Outgoing(b"orders.in", b"k", properties, b"%d" % n, b"") for n, properties in enumerate(kinds * 3)]


def cancels() -> list[Outgoing]:
    """They leave no message behind."""
    keys = [b"k60", b"none"]
    return [Outgoing(b"orders.in", b"k", encode_headers(says(b"x-delay-cancel", key)), b"", b"") for key in keys]


@pytest.fixture(params=HANDLERS)
def it(request: pytest.FixtureRequest) -> Scene:
    return Scene(HANDLERS[request.param])


def bodies(sent: list[Outgoing]) -> list[bytes]:
    return sorted(message.body for message in sent)


async def test_every_delivery_is_accepted_after_its_message_is_safe(it: Scene) -> None:
    it.send(sent := messages())
    await it.handle()
    assert it.left == []
    replaced = sum(change.what == "cancelled" for change in it.store.history)
    assert len(it.elsewhere) + replaced == len(sent)
    assert set(it.elsewhere) <= set(bodies(sent))


async def test_a_cancel_is_accepted(it: Scene) -> None:
    it.send(cancels())
    await it.handle()
    assert it.left == []


async def test_the_fake_accepts_every_delivery() -> None:
    it = Scene(lambda _: Carrier())
    it.send(messages())
    await it.handle()
    assert it.left == []


async def out_of_reach() -> None:
    raise StoreLost("out of reach")


def lose_broker(it: Scene) -> None:
    it.publishing.refuse()


def lose_store(it: Scene) -> None:
    it.store.travel = out_of_reach


def fill(it: Scene) -> None:
    """Make the refused queue full."""
    it.broker.queues["delays.refused"].most = 0


@pytest.mark.parametrize("lose", [lose_broker, lose_store, fill])
async def test_a_loss_returns_what_is_not_safe_and_loses_nothing(it: Scene, lose: Callable[[Scene], Any]) -> None:
    it.send(sent := [one for one in messages() if b"x-delay-key" not in one.properties])
    lose(it)
    try:
        await it.handle()
    except LOSSES:
        assert it.left
    else:
        assert not it.left
    assert sorted([*it.left, *it.elsewhere]) == bodies(sent)
    it.publishing.accept()
    it.store.travel = MemoryStore(host_ms).travel
    it.broker.queues["delays.refused"].most = float("inf")
    await it.handle()
    assert it.left == []
    assert it.elsewhere == bodies(sent)


class HurriedLoop(asyncio.SelectorEventLoop):
    """A loop whose clock a test can set ahead."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead


def test_after_the_end_no_work_begins(it: Scene) -> None:
    """Messages waiting for a fuller batch or their due instant return to the queue and are never published."""
    unheard: list[dict[str, Any]] = []
    loop = HurriedLoop()
    loop.set_exception_handler(lambda _, context: unheard.append(context))

    async def play() -> None:
        it.send(sent := [one for one in messages() if b"x-delay-key" not in one.properties])
        await it.handle(end_early=True)
        left, elsewhere = it.left, it.elsewhere
        assert sorted([*left, *elsewhere]) == bodies(sent)
        loop.ahead = 1.0  # The instants of all messages that a handler may keep are over.
        for _ in range(10):
            await asyncio.sleep(0)
        assert (it.left, it.elsewhere) == (left, elsewhere)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(play())
    assert not unheard
