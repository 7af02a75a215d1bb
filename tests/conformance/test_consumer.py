"""The port Consumer, at a broker behind a proxy and in memory: unsettled deliveries return to their places.

The real consumer's memory is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from delayer.amqp.errors import BrokerLost
from delayer.amqp.properties import encode_headers, entry, long_string
from delayer.amqp.values import CONFIRMED, Outgoing
from delayer.broker.consumer import PROPERTIES_BYTES, SAMPLE_PREFETCHES, AdaptivePrefetch, AmqpConsumer, FlowControl
from delayer.core.cascade import ONE_CONSUMER
from delayer.intake.ports import Subscription
from tests.conformance.broker_world import (
    GATHER,
    Either,
    Place,
    World,
    bodies,
    message,
    numbered,
    relay_to,
    take,
    until_published,
    until_subscribed,
)
from tests.support.place import eventually

A_READ = 256_000
"""The maximum number of bytes that uvloop reads from a socket at once."""


async def filled(world: World, count: int) -> None:
    await world.hand.queue("q")
    await sent(world, [message(n, "q") for n in range(count)])


async def sent(world: World, messages: list[Outgoing], at_once: int = 50) -> None:
    """Publish in small batches: the publisher gives up after BOUND seconds, and the simulated broker is slow."""
    for first in range(0, len(messages), at_once):
        part = messages[first : first + at_once]
        assert await world.publisher.publish(part) == [CONFIRMED] * len(part)


@asynccontextmanager
async def reading(either: Either, count: int, prefetch: int = 100) -> AsyncIterator[tuple[World, Subscription]]:
    """A world with this many messages in the queue ``q``, and a subscription to it."""
    async with either.world() as world:
        await filled(world, count)
        subscription = await world.consumer.subscribe("q", prefetch)
        yield world, subscription
        await subscription.close()


async def test_deliveries_arrive_in_order_and_as_published(either: Either) -> None:
    async with reading(either, 500, 1000) as (_, subscription):
        found = await take(subscription, 500)
        assert bodies(found) == numbered(range(500))
        tags = [one.tag for one in found]
        assert tags == sorted(set(tags))
        assert found[7][:6] == (tags[7], False, b"", b"q", message(7, "q").properties, b"7")
        assert found[0].read_at <= found[7].read_at


async def test_a_batch_keeps_its_limit_and_an_idle_queue_returns_an_empty_batch(either: Either) -> None:
    async with reading(either, 30) as (_, subscription):
        assert bodies(await subscription.next_batch(1, GATHER)) == [b"0"]
        assert bodies(await take(subscription, 29)) == numbered(range(1, 30))
        assert await subscription.next_batch(10, GATHER) == []


async def test_a_batch_as_large_as_the_prefetch_does_not_wait(either: Either) -> None:
    """The broker sends no more before an acknowledgement, so waiting is useless."""
    async with reading(either, 5, prefetch=2) as (_, subscription), asyncio.timeout(20):
        for expected in ([b"0", b"1"], [b"2", b"3"]):
            found = await subscription.next_batch(30, 60.0)
            assert bodies(found) == expected
            subscription.ack(found[-1].tag, multiple=True)
        assert bodies(await subscription.next_batch(30, GATHER)) == [b"4"]


async def test_the_prefetch_bounds_unsettled_deliveries(either: Either) -> None:
    async with reading(either, 10, prefetch=4) as (_, subscription):
        found = await take(subscription, 4)
        assert await subscription.next_batch(10, GATHER) == []
        subscription.ack(found[1].tag, multiple=True)
        assert bodies(await take(subscription, 2)) == [b"4", b"5"]


async def test_unsettled_deliveries_return_to_the_queue(either: Either) -> None:
    """The close returns them; acknowledged deliveries, single or multiple, are gone."""
    async with reading(either, 10) as (world, subscription):
        found = await take(subscription, 10)
        subscription.ack(found[2].tag, multiple=True)
        subscription.ack(found[5].tag, multiple=False)
        subscription.ack(found[9].tag, multiple=False)
        await subscription.close()
        again = await world.consumer.subscribe("q", 100)
        found = await take(again, 5)
        assert sorted(bodies(found)) == [b"3", b"4", b"6", b"7", b"8"]
        assert all(one.redelivered for one in found)
        again.ack(found[-1].tag, multiple=True)
        await again.close()
        assert await world.hand.drain("q") == []


async def test_settling_after_deliveries_were_stopped(either: Either) -> None:
    async with reading(either, 5) as (world, subscription):
        found = await take(subscription, 5)
        subscription.stop()
        await filled(world, 1)
        assert await subscription.next_batch(10, GATHER) == []
        subscription.ack(found[3].tag, multiple=True)
        await subscription.close()
        assert sorted(await world.hand.drain("q")) == [b"0", b"4"]


@pytest.mark.parametrize("one_active", [False, True])
async def test_acknowledged_deliveries_are_not_repeated_after_the_end(either: Either, one_active: bool) -> None:
    """Also by a busy replicated queue: there, acknowledgements wait for each other."""
    async with either.world() as world:
        consumer = world.of_one[0] if one_active else world.consumer
        for attempt in range(4):
            queue = f"busy {attempt}"
            await world.hand.queue(queue, {"x-queue-type": "quorum"} | ({ONE_CONSUMER: True} if one_active else {}))
            await sent(world, [message(n, queue) for n in range(400)])
            more = asyncio.create_task(
                until_published(world.publisher, [message(f"more {n}", queue) for n in range(600)])
            )
            subscription = await consumer.subscribe(queue, 5000)
            found = await take(subscription, 400)
            subscription.stop()
            for one in found[::2]:
                subscription.ack(one.tag, multiple=False)
            subscription.ack(found[-1].tag, multiple=True)
            await subscription.close()
            await more
            again = await consumer.subscribe(queue, 5000)
            rest = await take(again, 600 + 400 - len(found))
            assert await again.next_batch(5000, GATHER) == []
            await again.close()
            assert not set(bodies(rest)) & set(bodies(found))


@pytest.mark.parametrize("kind", ["quorum", "classic"])
async def test_a_standby_gets_the_messages_in_their_order(either: Either, kind: str) -> None:
    """The active consumer of a single-active-consumer queue leaves unacknowledged and newer messages behind. The
    messages it acknowledged are not delivered again."""
    async with either.world() as world:
        await world.hand.queue("one", {"x-queue-type": kind, ONE_CONSUMER: True})
        first, other = world.of_one
        active, standby = await first.subscribe("one", 100), await other.subscribe("one", 1000)
        assert (first.active, other.active) == (True, False)
        await sent(world, [message(n, "one") for n in range(400)])
        found = await take(active, 60)
        active.ack(found[29].tag, multiple=True)
        assert await standby.next_batch(10, GATHER) == []
        await active.close()
        assert bodies(await take(standby, 370)) == numbered(range(30, 400))
        assert other.active
        await standby.close()


async def test_a_missing_queue(either: Either) -> None:
    async with either.world() as world:
        with pytest.raises(BrokerLost, match="404"):
            await world.consumer.subscribe("missing", 10)
        await filled(world, 1)
        subscription = await world.consumer.subscribe("q", 10)
        assert bodies(await take(subscription, 1)) == [b"0"]
        await subscription.close()


async def until_lost(subscription: Subscription) -> None:
    with pytest.raises(BrokerLost):
        while True:
            assert await subscription.next_batch(10, GATHER) == []


async def test_a_queue_deleted_under_its_consumer(either: Either) -> None:
    async with reading(either, 3) as (world, subscription):
        found = await take(subscription, 3)
        await world.hand.delete_queue("q")
        await until_lost(subscription)
        subscription.ack(found[-1].tag, multiple=True)
        subscription.stop()


async def test_a_cut_connection(either: Either) -> None:
    """The subscription ends; a new one gets all unsettled deliveries."""
    async with reading(either, 6) as (world, subscription):
        found = await take(subscription, 6)
        subscription.ack(found[1].tag, multiple=True)
        await world.network.refuse()
        await until_lost(subscription)
        subscription.ack(found[-1].tag, multiple=True)  # has no effect
        subscription.stop()
        await subscription.close()
        with pytest.raises(BrokerLost):
            await world.consumer.subscribe("q", 10)
        await world.network.accept()
        again = await until_subscribed(world.consumer, "q")
        missing = set(numbered(range(2, 6)))  # the acknowledgement itself may be lost with the connection
        while missing:
            missing -= set(bodies(await again.next_batch(10, GATHER)))
        await again.close()


async def test_a_buffer_is_bounded_by_bytes(place: Place) -> None:
    """The consumer stops reading the socket while the buffer is full; in the end everything has arrived."""
    size, count, bound = 1 << 18, 64, 1 << 20
    async with place.world("q") as world:
        for n in range(count):
            assert await world.publisher.publish([message(n, "q", body=bytes((n,)) * size)]) == [CONFIRMED]
        async with relay_to(place.address) as reconnecting:
            flow = FlowControl(bound)
            consumer = AmqpConsumer(reconnecting, batch_bytes=bound // 2, flow_control=flow)
            subscription = await consumer.subscribe("q", count)
            found = []
            most = 0
            while len(found) < count:
                batch = await subscription.next_batch(count, GATHER)
                assert sum(len(one.body) for one in batch) <= bound // 2 + size
                most = max(most, flow.buffered)
                found += batch
            assert bodies(found) == [bytes((n,)) * size for n in range(count)]
            assert most <= bound + 2 * size  # one read of the socket beyond the bound
            assert not flow.paused
            subscription.ack(found[-1].tag, multiple=True)
            await subscription.close()
        assert await world.hand.drain("q") == []


async def test_a_batch_has_few_messages_with_many_headers(place: Place) -> None:
    """The process does nothing else while it decodes a batch."""
    count, many = 16, encode_headers(entry(b"note", long_string(bytes(100_000))))
    async with place.world("q") as world:
        await sent(world, [message(n, "q")._replace(properties=many) for n in range(count)], at_once=1)
        subscription = await world.consumer.subscribe("q", count)
        found = []
        while len(found) < count:
            batch = await subscription.next_batch(count, 0.1)
            assert len(batch) <= PROPERTIES_BYTES // len(many) + 1
            found += batch
        assert bodies(found) == numbered(range(count))
        subscription.ack(found[-1].tag, multiple=True)
        await subscription.close()


async def test_stopping_with_a_full_buffer(place: Place) -> None:
    """The consumer keeps no more deliveries, reads the broker's answer, and gives everything back."""
    async with place.world("q") as world:
        for n in range(32):
            await world.publisher.publish([message(n, "q", body=b"%d" % n + bytes(1 << 17))])
        async with relay_to(place.address) as reconnecting:
            flow = FlowControl(1 << 18)
            subscription = await AmqpConsumer(reconnecting, flow_control=flow).subscribe("q", 32)
            first = await subscription.next_batch(1, GATHER)
            await eventually(lambda: flow.paused)
            subscription.stop()
            assert (flow.paused, flow.buffered) == (set(), 0)
            subscription.ack(first[0].tag, multiple=False)
            await subscription.close()
        left = await world.hand.drain("q")
        assert sorted(int(body.rstrip(b"\0")) for body in left) == list(range(1, 32))


async def test_a_full_buffer_is_returned_and_less_is_read_ahead(place: Place) -> None:
    """The connection stays, and nothing is lost or repeated. With small messages the prefetch grows again."""
    size, bound = 1 << 16, 1 << 18
    async with place.world("q") as world, relay_to(place.address) as reconnecting:
        await world.publisher.publish([message(n, "q", body=b"%d " % n + bytes(size)) for n in range(32)])
        adaptive, flow_control = AdaptivePrefetch(bound), FlowControl(bound, 0.3)
        reader = AmqpConsumer(reconnecting, adaptive_prefetch=adaptive, flow_control=flow_control)
        first = await reader.subscribe("q", 32)
        assert first.prefetch == 32
        carried = await take(first, 1)
        connection = await reconnecting.connection(30)
        await eventually(lambda: first.overrun)
        assert await first.next_batch(32, GATHER) == []
        assert (flow_control.paused, flow_control.buffered) == (set(), 0)
        # With the usual limit: on a busy machine the second subscription could also overrun 0.3 s.
        reader = AmqpConsumer(reconnecting, adaptive_prefetch=adaptive, flow_control=FlowControl(bound))
        first.ack(carried[0].tag, multiple=True)
        await first.close()
        second = await reader.subscribe("q", 32)
        # The messages that fit, plus those of one more read of the socket; one less if a message was taken before.
        assert bound // size - 1 <= second.prefetch <= (bound + A_READ) // size
        assert connection is await reconnecting.connection(30)
        found = carried + await take(second, 31, ack=True)
        assert sorted(int(one.body.split()[0]) for one in found) == list(range(32))
        small = 2 * SAMPLE_PREFETCHES * second.prefetch
        await sent(world, [message(n, "q") for n in range(small)])
        await take(second, small, ack=True)
        assert second.overrun
        await second.close()
        third = await reader.subscribe("q", 32)
        assert third.prefetch == 32
        await third.close()
        assert await world.hand.drain("q") == []


async def test_queues_that_share_a_connection_share_its_limit_of_bytes(place: Place) -> None:
    """The number of queues does not matter, and one queue can stop while the rest are full."""
    size, count, bound, queues = 1 << 16, 5, 1 << 18, ("a", "b", "c", "d")
    async with place.world(*queues) as world, relay_to(place.address) as reconnecting:
        flow = FlowControl(bound)
        reader = AmqpConsumer(reconnecting, flow_control=flow)
        subscriptions = [await reader.subscribe(name, count) for name in queues]
        for name in queues:
            await world.publisher.publish([message(n, name, body=bytes((n,)) * size) for n in range(count)])
        await eventually(lambda: flow.paused)
        assert bound < flow.buffered <= bound + A_READ + size
        await asyncio.wait_for(subscriptions[0].close(), 10)
        assert subscriptions[0].is_settled
        found = await asyncio.gather(*(take(one, count, ack=True) for one in subscriptions[1:]))
        assert [bodies(some) for some in found] == [[bytes((n,)) * size for n in range(count)]] * 3
        for one in subscriptions[1:]:
            await one.close()
        assert len(await world.hand.drain("a")) == count
