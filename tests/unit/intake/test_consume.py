"""Consuming one queue: batches handled concurrently, losses, bugs, and the stop. The consumer acknowledges only
accepted messages, each once."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayer.amqp.errors import BrokerLost
from delayer.amqp.values import Delivery
from delayer.core.errors import NotTaken, StoreLost
from delayer.intake.consume import Intake, QueueConsumer
from delayer.intake.session import KEPT_BYTES, AckTracker, Session, Unsettled
from delayer.retry import Backoff, raise_first
from tests.support.fakes import Carrier, Heartbeat, ScriptedConsumer, ScriptedSubscription, delivery, until

Batch = Sequence[Delivery]


def batch(*tags: int) -> list[Delivery]:
    return [delivery(tag) for tag in tags]


class Scene:
    def __init__(
        self,
        *subscriptions: ScriptedSubscription | Exception,
        prepare: Callable[[], Awaitable[None]] | None = None,
        in_flight: int = 3,
    ) -> None:
        self.carrier = Carrier()
        self.consumer = ScriptedConsumer(*subscriptions)
        self.heartbeat = Heartbeat()
        self.stopping = asyncio.Event()
        self.attempts: list[int] = []
        self.pause_seconds, self.connects = 0.001, 0
        intake = Intake("delays", 100, in_flight=in_flight)
        self.session = QueueConsumer(
            intake,
            self.consumer,
            self.carrier,
            prepare=prepare or ready,
            heartbeat=self.heartbeat,
            reached=lambda: self.connects,
        )

    def start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.session.run(self.stopping, self.pause))

    def pause(self, attempt: int, _random: float) -> float:
        """A pause, by default of a millisecond. The list has the attempt number of each."""
        self.attempts.append(attempt)
        return self.pause_seconds

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """Run from the start to the end of a clean stop."""
        task = self.start()
        yield task
        self.stopping.set()
        await task


async def ready() -> None:
    """The broker and the store are ready."""


async def test_batches_are_read_carried_and_acknowledged() -> None:
    subscription = ScriptedSubscription([batch(1, 2), [], batch(3)])
    it = Scene(subscription)
    async with it.running():
        await it.session.consuming.wait()
        await subscription.read.wait()
    assert subscription.events == ["ack 2", "ack 3", "stopped", "closed"]
    assert not it.session.consuming.is_set()
    assert it.heartbeat.forgotten == ["delays"]


async def test_batches_overlap_up_to_the_limit() -> None:
    subscription = ScriptedSubscription([batch(n) for n in range(1, 7)])
    it = Scene(subscription, in_flight=3)
    it.carrier.hold_back(1, 2, 3)
    async with it.running():
        await until(lambda: len(it.carrier.begun) == 3)
        for _ in range(20):
            await asyncio.sleep(0)
        assert it.carrier.begun == [1, 2, 3]
        for tag in (3, 2, 1):
            it.carrier.gates[tag].set()
        await subscription.read.wait()
    assert it.carrier.most == 3
    assert subscription.acked[-1] == (6, True)


async def test_stopping_waits_for_batches_in_flight() -> None:
    subscription = ScriptedSubscription([batch(1), batch(2)])
    it = Scene(subscription)
    it.carrier.hold_back(1)
    task = it.start()
    await subscription.read.wait()
    it.stopping.set()
    await until(lambda: "stopped" in subscription.events)
    assert not task.done()
    it.carrier.gates[1].set()
    await task
    assert subscription.events == ["stopped", "ack 2", "closed"]


@pytest.mark.parametrize("loss", [BrokerLost("gone"), StoreLost("out of reach")])
async def test_a_failed_batch_is_read_again_and_accepted_ones_are_not(loss: Exception) -> None:
    first, second = ScriptedSubscription([batch(1), batch(2, 3)]), ScriptedSubscription([batch(1)])
    it = Scene(first, second)
    it.carrier.hold_back(1)
    it.carrier.failures[1] = loss
    async with it.running():
        await until(lambda: it.carrier.begun == [1, 2])
        it.carrier.gates[1].set()
        await until(lambda: "closed" in first.events)
        assert first.acked == [(2, False), (3, False)]
        assert it.carrier.flushed == isinstance(loss, StoreLost), "the other messages do not wait for the store"
        del it.carrier.failures[1]
        await second.read.wait()
    assert second.acked == [(1, True)]


async def test_a_lost_subscription_waits_for_batches_in_flight() -> None:
    first, second = ScriptedSubscription([batch(1), BrokerLost("cut")]), ScriptedSubscription([])
    it = Scene(first, second)
    it.carrier.hold_back(1)
    it.carrier.failures[1] = StoreLost("at the same time")  # the session has ended, so it may ignore this
    async with it.running():
        await until(lambda: it.carrier.begun == [1])
        for _ in range(10):
            await asyncio.sleep(0)
        assert first.events == []
        it.carrier.gates[1].set()
        await second.read.wait()
        assert first.events == ["closed"]
        assert (it.carrier.flushed, it.carrier.ended) == (0, 1)


async def test_a_lost_subscription_ends_the_wait_for_instants() -> None:
    """Its deliveries will be redelivered, so a publish now would be a repeat."""
    first, second = ScriptedSubscription([batch(1), BrokerLost("cut")]), ScriptedSubscription([])
    it = Scene(first, second)
    it.carrier.punctual = True
    it.carrier.hold_back(1)
    async with it.running():
        await second.read.wait()
    assert first.events == ["closed"]


@pytest.mark.parametrize("end", ["at once", "with the subscription", "beside a loss"])
async def test_a_bug_ends_the_session(end: str) -> None:
    script: list[Batch | Exception] = [batch(1), batch(2)]
    if end == "with the subscription":
        script.append(BrokerLost("cut"))
    subscription = ScriptedSubscription(script)
    it = Scene(subscription)
    it.carrier.failures[2] = ZeroDivisionError()
    if end != "at once":
        it.carrier.hold_back(1, 2)
        it.carrier.failures[1] = StoreLost("gone")
    task = it.start()
    await until(lambda: it.carrier.begun == [1, 2])
    for gate in it.carrier.gates.values():
        gate.set()
    with pytest.raises(ZeroDivisionError):
        await task
    assert subscription.events[-1] == "closed"


async def test_a_forced_stop_ends_batches_in_flight() -> None:
    subscription = ScriptedSubscription([batch(1), batch(2)])
    it = Scene(subscription)
    it.carrier.hold_back(1)
    task = it.start()
    await subscription.read.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert subscription.events == ["ack 2", "closed"]  # a forced stop still acknowledges accepted messages


async def test_pauses_grow_until_a_batch_is_accepted() -> None:
    """A read is not a success: a batch that always fails must not return without a pause."""
    fails = [ScriptedSubscription([batch(1)]) for _ in range(4)]
    good = ScriptedSubscription([batch(1), BrokerLost("cut")])
    last = ScriptedSubscription([])
    it = Scene(*fails, good, last, in_flight=1)
    it.carrier.failures[1] = StoreLost("out of reach")
    async with it.running():
        await until(lambda: "closed" in fails[3].events)
        it.carrier.failures.clear()
        await last.read.wait()
    assert it.attempts == [0, 1, 2, 3, 0]


@pytest.mark.parametrize("when", ["during the attempt", "during the pause"])
async def test_a_pause_ends_when_a_server_is_reached_again(when: str) -> None:
    """Every attempt fails while the connection waits for its own pause, so this pause has grown."""
    last = ScriptedSubscription([])

    async def prepare() -> None:
        if when == "during the attempt":
            it.connects += not it.attempts

    it = Scene(BrokerLost("cut"), last, prepare=prepare)
    it.pause_seconds = 10_000
    async with it.running():
        await until(lambda: bool(it.attempts))
        if when == "during the pause":
            await asyncio.sleep(0)
            it.connects += 1
        await last.read.wait()
    assert it.attempts == [0]


async def test_messages_without_room_do_not_lengthen_the_pause() -> None:
    """If other messages were accepted, the pause is reset; otherwise it grows."""
    subscriptions = [ScriptedSubscription([batch(1)]) for _ in range(4)]
    it = Scene(*subscriptions)
    accepts = iter([False, False, True, True])

    async def carry(deliveries: Batch, settler: AckTracker) -> None:
        if next(accepts):
            settler.accept([1])
        raise NotTaken("the refused queue is full")

    it.carrier.carry = carry  # type: ignore[method-assign]
    async with it.running():
        await until(lambda: len(it.attempts) >= 4)
    assert it.attempts[:4] == [0, 1, 0, 0]


async def test_the_pause_stays_short_while_the_next_subscription_reads_others_first() -> None:
    subscriptions = [ScriptedSubscription([batch(1)]) for _ in range(6)]
    for one in subscriptions[:3]:
        one.passes_over = True
    it = Scene(*subscriptions)

    async def carry(deliveries: Batch, settler: AckTracker) -> None:
        settler.postpone([one.tag for one in deliveries])
        raise NotTaken("the refused queue is full")

    it.carrier.carry = carry  # type: ignore[method-assign]
    async with it.running():
        await until(lambda: len(it.attempts) >= 5)
    assert it.attempts[:5] == [0, 0, 0, 1, 2]
    assert "postponed [1]" in subscriptions[0].events


async def test_an_overrun_subscription_closes_cleanly_and_begins_again() -> None:
    """The consumer settles the batches in flight, and then subscribes again without a pause."""
    first, second = ScriptedSubscription([batch(1), batch(2)]), ScriptedSubscription([batch(1)])
    it = Scene(first, second)
    it.carrier.hold_back(1)
    async with it.running():
        await first.read.wait()
        first.overrun = True
        await until(lambda: "stopped" in first.events)
        assert not first.acked
        it.carrier.gates[1].set()
        await until(lambda: second.acked == [(1, True)])
        assert first.acked == [(2, True)]
        assert first.events[-1] == "closed"


# Failures: the one to raise, and no memory held by a failure, with or without the garbage collector.


@pytest.mark.parametrize(
    ("results", "raised"),
    [
        ([None, StoreLost("one"), BrokerLost("two")], StoreLost),
        ([StoreLost("one"), None, KeyError("a bug")], KeyError),
        ([KeyError("a bug"), BrokerLost("one")], KeyError),
    ],
)
def test_a_bug_is_raised_before_a_loss(results: Sequence[BaseException | None], raised: type[BaseException]) -> None:
    with pytest.raises(raised):
        raise_first(results)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Traced:
    """An object that a frame refers to."""


@pytest.mark.usefixtures("no_collector")
async def test_a_failed_batch_is_freed() -> None:
    """Freed before the next read: a full disk fails one batch after the other, for hours."""
    it = Scene(*(ScriptedSubscription([batch(1)]) for _ in range(2)))
    traced: list[weakref.ref[Traced]] = []
    alive: list[int] = []

    async def carry(_batch: Batch, _settler: AckTracker) -> None:
        alive.append(sum(reference() is not None for reference in traced))
        held = Traced()
        traced.append(weakref.ref(held))
        if len(traced) == 2:
            it.stopping.set()
        raise StoreLost("the disk is full")

    it.carrier.carry = carry  # type: ignore[method-assign]
    await it.start()
    assert alive == [0, 0]


@pytest.mark.usefixtures("no_collector")
async def test_a_pause_frees_reference_cycles() -> None:
    ring = Traced()
    ring.__dict__["itself"] = ring
    reference = weakref.ref(ring)
    del ring
    assert reference() is not None
    stopping = asyncio.Event()
    stopping.set()
    await Backoff(lambda: None, stopping).pause()
    assert reference() is None


# Acknowledgements.


def test_deliveries_after_a_kept_one_are_acknowledged_one_by_one() -> None:
    acks = ScriptedSubscription()
    settler = AckTracker(acks)
    settler.add(batch(1, 2, 3, 4))
    settler.keep(delivery(2))
    settler.accept([1, 3])
    assert acks.acked == [(1, True), (3, False)]
    assert (settler.outstanding, settler.kept) == (2, 1)
    settler.accept([4])
    settler.accept([2])
    assert acks.acked[2:] == [(4, False), (2, True)]
    assert (settler.outstanding, settler.kept, settler.kept_bytes) == (0, 0, 0)


def test_accepted_deliveries_are_progress() -> None:
    """While a batch that the database rejects is refused one by one, the intake is not stuck."""
    beats: list[int] = []
    tracker = AckTracker(ScriptedSubscription(), lambda: beats.append(1))
    tracker.add([delivery(1), delivery(2)])
    tracker.accept([])
    assert not beats
    tracker.accept([2])
    assert beats


def test_large_deliveries_count_until_they_are_accepted() -> None:
    settler = AckTracker(ScriptedSubscription())
    large = [delivery(tag)._replace(body=b"x" * (9 << 20)) for tag in (1, 2)]
    settler.add([*large, delivery(3)])
    assert settler.kept_bytes >> 20 == 18
    settler.accept([3, 2])
    assert settler.kept_bytes >> 20 == 9
    settler.accept([1])
    assert settler.kept_bytes == 0


async def test_no_batch_is_read_while_large_ones_are_worked_on() -> None:
    session = Session(ScriptedSubscription(), lambda: None, 3)
    session.acks.add([delivery(1)._replace(body=b"x" * KEPT_BYTES)])
    done = asyncio.Event()

    async def work() -> None:
        await done.wait()
        session.acks.accept([1])

    session.start(work())
    room = asyncio.create_task(session.wait_for_room())
    await asyncio.sleep(0)
    assert not room.done()
    done.set()
    await room


def gone(acks: ScriptedSubscription, read: list[int]) -> list[int]:
    """The tags that the broker has settled: `multiple` settles all unsettled tags up to this one."""
    left, found = list(read), []
    for tag, multiple in acks.acked:
        taken = [one for one in left if one <= tag] if multiple else [tag]
        assert set(taken) <= set(left), "acknowledged twice"
        found += taken
        left = [one for one in left if one not in taken]
    return found


@given(st.data())
def test_every_order_of_acceptance_acknowledges_each_tag_once(data: st.DataObject) -> None:
    tags = sorted(data.draw(st.sets(st.integers(1, 60), min_size=1)))
    accepted = data.draw(st.permutations(tags))[: data.draw(st.integers(0, len(tags)))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(accepted)), max_size=5)))
    acks = ScriptedSubscription()
    settler = AckTracker(acks)
    settler.add(batch(*tags))
    for tag in data.draw(st.sets(st.sampled_from(tags))):
        settler.keep(delivery(tag))
    done: set[int] = set()
    for start, stop in zip([0, *cuts], [*cuts, len(accepted)], strict=True):
        settler.accept(accepted[start:stop])
        done |= set(accepted[start:stop])
        assert set(gone(acks, tags)) <= done
        assert settler.outstanding == len(tags) - len(gone(acks, tags))
    settler.flush()
    assert sorted(gone(acks, tags)) == sorted(done)
    assert settler.outstanding == len(tags) - len(done)


async def test_work_that_settles_nothing_is_stuck_across_sessions() -> None:
    """The time is measured from its start, across losses, and ends when part of it is settled or none is left."""
    now = 0.0
    unsettled = Unsettled(lambda: now)
    for at in (100.0, 125.0):
        now, session, gate = at, Session(ScriptedSubscription(), lambda: None, 3, unsettled), asyncio.Event()
        session.start(lost_after(gate))
        gate.set()
        with pytest.raises(StoreLost):
            await session.wait_until_idle()
    now = 131.0
    assert unsettled.stuck_seconds == 31.0
    gates = [asyncio.Event(), asyncio.Event()]
    for gate in gates:
        session.start(done_after(gate))
    for gate, stuck in zip(gates, (40.0, 0.0), strict=True):
        gate.set()
        await until(lambda: not unsettled.stuck_seconds)
        now += 40.0
        assert unsettled.stuck_seconds == stuck, "some work is left only after the first one"


async def lost_after(gate: asyncio.Event) -> None:
    await gate.wait()
    raise StoreLost("planted")


async def done_after(gate: asyncio.Event) -> None:
    await gate.wait()


async def test_a_queue_without_messages_is_not_stuck() -> None:
    scene = Scene(ScriptedSubscription())
    scene.session.unsettled.begin()
    running = scene.start()
    await until(lambda: scene.session.unsettled._since is None)
    scene.stopping.set()
    await running
