"""One level of another system's cascade: messages are parked immediately or returned, and a takeover can end."""

from __future__ import annotations

import asyncio

import pytest

from delayer.amqp.properties import entry, int64, long_string
from delayer.amqp.values import Delivery
from delayer.core.cascade import Cascade, Kind, routing_key
from delayer.core.counters import Counters
from delayer.core.errors import StoreLost
from delayer.core.message import Parcel
from delayer.core.nservicebus import DELAY_IN_SECONDS, TIME_SENT
from delayer.intake.consume import QueueConsumer
from delayer.intake.takeover import MOST_DELIVERIES, LevelTakeover, intake_of
from tests.support.fakes import NOW, Heartbeat, ScriptedConsumer, ScriptedLive, ScriptedSubscription, delivery
from tests.support.memory_store import MemoryBacklog, MemoryStore
from tests.support.raw import wire_instant

LEVEL = 11
KEY = routing_key(3600, b"Sales.Orders")


def met(tag: int, *headers: bytes, key: bytes = KEY) -> Delivery:
    return delivery(tag, *headers, exchange=b"nsb.v2.delay-level-11", key=key, body=b"%d" % tag)


def sent(ago_ms: int) -> bytes:
    return entry(TIME_SENT, long_string(wire_instant(NOW - ago_ms).encode())) + entry(
        DELAY_IN_SECONDS, b"I" + (3600).to_bytes(4, "big")
    )


def delivered(times: int) -> bytes:
    return entry(b"x-delivery-count", int64(times))


class Scene:
    def __init__(self, *subscriptions: ScriptedSubscription, cascade: Kind = "nservicebus-v2") -> None:
        self.store = MemoryStore(lambda: NOW)
        self.backlog = MemoryBacklog(self.store)
        self.backlog.look()
        self.stopping = asyncio.Event()
        self.heartbeat = Heartbeat()
        self.counters = Counters()
        self.ready = 0
        handler = LevelTakeover(Cascade(cascade), LEVEL, self.backlog, ScriptedLive(), self.counters)
        self.takeover = QueueConsumer(
            intake_of(Cascade(cascade).level(LEVEL)), ScriptedConsumer(*subscriptions), handler, self._prepare,
            self.heartbeat,
        )  # fmt: skip

    async def _prepare(self) -> None:
        self.ready += 1

    @property
    def parked(self) -> list[Parcel]:
        return [one.parcel for one in self.store.messages.values()]

    def fail_once(self) -> None:
        """Make the store unreachable for one statement."""
        travel = self.store.travel

        async def fail() -> None:
            self.store.travel = travel
            raise StoreLost("no store")

        self.store.travel = fail

    def start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.takeover.run(self.stopping))

    async def run_until_read(self, subscription: ScriptedSubscription) -> None:
        """Run until the subscription is read to its end, then stop."""
        task = self.start()
        await subscription.read.wait()
        self.stopping.set()
        await task


async def test_broken_bytes_are_parked_unchanged() -> None:
    broken = [met(1)._replace(properties=b"\x20\x00\xff"), met(2)._replace(properties=b"\x20\x00\0\0\0\x02\x01x")]
    subscription = ScriptedSubscription([broken])
    it = Scene(subscription)
    await it.run_until_read(subscription)
    assert [parcel.properties for parcel in it.parked] == [one.properties for one in broken]


async def test_without_a_store_a_takeover_returns_its_batch_and_waits() -> None:
    first, second = ScriptedSubscription([[met(1)]]), ScriptedSubscription([[met(1, delivered(1))]])
    it = Scene(first, second)
    it.fail_once()
    await it.run_until_read(second)
    assert first.acked == []
    assert "closed" in first.events
    assert second.acked == [(1, True)]
    assert it.ready == 2, "the takeover waits for the store before it consumes"


def again(tag: int, times: int) -> Delivery:
    return met(tag, delivered(times))._replace(redelivered=True)


@pytest.mark.parametrize("size", [1, 2 << 20])
async def test_a_message_delivered_too_often_ends_the_takeover(size: int) -> None:
    batch = [met(1)._replace(body=bytes(size)), again(2, MOST_DELIVERIES)._replace(body=bytes(size))]
    subscription = ScriptedSubscription([[again(8, MOST_DELIVERIES - 1)], batch])
    it = Scene(subscription)
    await it.start()
    assert not it.stopping.is_set(), "the takeover ended by itself"
    assert [parcel.body for parcel in it.parked] == [b"8"]
    assert subscription.acked == [(8, True)]
    assert subscription.events[-1] == "closed"
    assert it.heartbeat.forgotten == ["nsb.v2.delay-level-11"]


async def test_a_forged_count_does_not_end_a_takeover() -> None:
    """A classic queue does not count deliveries or drop messages, so the header is the publisher's own."""
    subscription = ScriptedSubscription([[again(1, MOST_DELIVERIES), met(2)]])
    it = Scene(subscription, cascade="nservicebus-v1")
    await it.run_until_read(subscription)
    assert [parcel.body for parcel in it.parked] == [b"1", b"2"]


async def test_deliveries_of_other_queues_do_not_end_a_takeover() -> None:
    """A consumer of another queue passed the message on with that queue's count."""
    subscription = ScriptedSubscription([[met(1, delivered(MOST_DELIVERIES))], [met(2)]])
    it = Scene(subscription)
    await it.run_until_read(subscription)
    assert [parcel.body for parcel in it.parked] == [b"1", b"2"]
