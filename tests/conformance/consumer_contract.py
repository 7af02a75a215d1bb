"""What every consumer must do, as a suite: see :class:`~tests.conformance.broker_contract.BrokerContract`."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

import pytest

from delayer.core.errors import BrokerLost
from delayer.core.message import Confirmed, Delivery
from tests.conformance.broker_world import (
    GATHER,
    World,
    bodies,
    message,
    numbered,
    take,
    until_published,
    until_subscribed,
)


class ConsumerContract:
    """Subclasses define ``world`` and a fixture ``place``."""

    def world(self, place: str) -> AbstractAsyncContextManager[World]:
        raise NotImplementedError

    async def _filled(self, world: World, count: int, queue: str = "q") -> None:
        await world.hand.queue(queue)
        outcomes = await world.publisher.publish([message(n, queue) for n in range(count)])
        assert all(isinstance(outcome, Confirmed) for outcome in outcomes)

    async def test_deliveries_come_in_order_and_as_published(self, place: str) -> None:
        async with self.world(place) as world:
            await self._filled(world, 500)
            subscription = await world.consumer.subscribe("q", 1000)
            found = await take(subscription, 500)
            assert bodies(found) == numbered(range(500))
            tags = [one.tag for one in found]
            assert tags == sorted(set(tags))
            assert found[7] == Delivery(tags[7], False, b"", b"q", message(7, "q").properties, b"7")
            await subscription.close()

    async def test_a_batch_has_its_limit(self, place: str) -> None:
        async with self.world(place) as world:
            await self._filled(world, 30)
            subscription = await world.consumer.subscribe("q", 100)
            first = await subscription.next_batch(1, GATHER)
            assert bodies(first) == [b"0"]
            found = await take(subscription, 29)
            assert bodies(found) == numbered(range(1, 30))
            await subscription.close()

    async def test_a_full_batch_waits_for_no_company(self, place: str) -> None:
        async with self.world(place) as world:
            await self._filled(world, 30)
            subscription = await world.consumer.subscribe("q", 100)
            async with asyncio.timeout(20):
                found = await subscription.next_batch(30, 60.0)
            assert bodies(found) == numbered(range(30))
            await subscription.close()

    async def test_a_batch_of_all_that_may_be_unsettled_waits_for_no_company(self, place: str) -> None:
        """No more would come, however long it waited."""
        async with self.world(place) as world:
            await self._filled(world, 5)
            subscription = await world.consumer.subscribe("q", 2)
            async with asyncio.timeout(20):
                for expected in ([b"0", b"1"], [b"2", b"3"]):
                    found = await subscription.next_batch(30, 60.0)
                    assert bodies(found) == expected
                    subscription.ack(found[-1].tag, multiple=True)
                assert bodies(await subscription.next_batch(30, GATHER)) == [b"4"]
            await subscription.close()

    async def test_an_idle_queue_gives_an_empty_batch(self, place: str) -> None:
        async with self.world(place) as world:
            await self._filled(world, 0)
            subscription = await world.consumer.subscribe("q", 100)
            assert await subscription.next_batch(10, GATHER) == []
            await subscription.close()

    async def test_the_prefetch_bounds_what_is_unsettled(self, place: str) -> None:
        async with self.world(place) as world:
            await self._filled(world, 10)
            subscription = await world.consumer.subscribe("q", 4)
            found = await take(subscription, 4)
            assert await subscription.next_batch(10, GATHER) == []
            subscription.ack(found[1].tag, multiple=True)
            assert bodies(await take(subscription, 2)) == [b"4", b"5"]
            await subscription.close()

    async def test_unsettled_deliveries_return_to_the_queue(self, place: str) -> None:
        """By close; what was acknowledged, one by one or all up to one, is gone."""
        async with self.world(place) as world:
            await self._filled(world, 10)
            subscription = await world.consumer.subscribe("q", 100)
            found = await take(subscription, 10)
            subscription.ack(found[2].tag, multiple=True)
            subscription.ack(found[5].tag, multiple=False)
            subscription.ack(found[9].tag, multiple=False)
            await subscription.close()
            await subscription.close()
            again = await world.consumer.subscribe("q", 100)
            found = await take(again, 5)
            assert sorted(bodies(found)) == [b"3", b"4", b"6", b"7", b"8"]
            assert all(one.redelivered for one in found)
            again.ack(found[-1].tag, multiple=True)
            await again.close()
            assert await world.hand.drain("q") == []

    async def test_settling_after_deliveries_were_stopped(self, place: str) -> None:
        async with self.world(place) as world:
            await self._filled(world, 5)
            subscription = await world.consumer.subscribe("q", 100)
            found = await take(subscription, 5)
            await subscription.stop_deliveries()
            await self._filled(world, 1)
            subscription.ack(found[3].tag, multiple=True)
            await subscription.close()
            assert sorted(await world.hand.drain("q")) == [b"0", b"4"]

    async def test_acknowledged_deliveries_are_not_repeated_after_the_end(self, place: str) -> None:
        """Also by a replicated queue that has its hands full: there, acknowledgements wait for each other."""
        async with self.world(place) as world:
            for attempt in range(4):
                queue = f"busy {attempt}"
                await world.hand.queue(queue, {"x-queue-type": "quorum"})
                await world.publisher.publish([message(n, queue) for n in range(400)])
                more = asyncio.create_task(
                    until_published(world.publisher, [message(f"more {n}", queue) for n in range(600)])
                )
                subscription = await world.consumer.subscribe(queue, 5000)
                found = await take(subscription, 400)
                await subscription.stop_deliveries()
                for one in found[::2]:
                    subscription.ack(one.tag, multiple=False)
                subscription.ack(found[-1].tag, multiple=True)
                await subscription.close()
                await more
                again = await world.consumer.subscribe(queue, 5000)
                rest = await take(again, 600 + 400 - len(found))
                assert await again.next_batch(5000, GATHER) == []
                await again.close()
                assert not set(bodies(rest)) & set(bodies(found))

    async def test_a_missing_queue(self, place: str) -> None:
        async with self.world(place) as world:
            with pytest.raises(BrokerLost, match="404"):
                await world.consumer.subscribe("missing", 10)
            await self._filled(world, 1)
            subscription = await world.consumer.subscribe("q", 10)
            assert bodies(await take(subscription, 1)) == [b"0"]
            await subscription.close()

    async def test_a_queue_deleted_under_its_consumer(self, place: str) -> None:
        async with self.world(place) as world:
            await self._filled(world, 3)
            subscription = await world.consumer.subscribe("q", 10)
            found = await take(subscription, 3)
            await world.hand.delete_queue("q")
            with pytest.raises(BrokerLost):
                while True:
                    assert await subscription.next_batch(10, GATHER) == []
            subscription.ack(found[-1].tag, multiple=True)
            await subscription.stop_deliveries()
            await subscription.close()

    async def test_a_cut_connection(self, place: str) -> None:
        """The subscription is over; a new one gets everything that was not settled."""
        async with self.world(place) as world:
            await self._filled(world, 6)
            subscription = await world.consumer.subscribe("q", 10)
            found = await take(subscription, 6)
            subscription.ack(found[1].tag, multiple=True)
            await world.network.refuse()
            with pytest.raises(BrokerLost):
                while True:
                    assert await subscription.next_batch(10, GATHER) == []
            subscription.ack(found[-1].tag, multiple=True)  # does nothing
            await subscription.stop_deliveries()
            await subscription.close()
            await subscription.close()
            with pytest.raises(BrokerLost):
                await world.consumer.subscribe("q", 10)
            await world.network.accept()
            again = await until_subscribed(world.consumer, "q")
            missing = set(numbered(range(2, 6)))  # the acknowledgement itself may be lost with the connection
            while missing:
                missing -= set(bodies(await again.next_batch(10, GATHER)))
            await again.close()

    async def test_a_waiting_batch_hears_of_the_cut(self, place: str) -> None:
        async with self.world(place) as world:
            await self._filled(world, 0)
            subscription = await world.consumer.subscribe("q", 10)
            waiting = asyncio.create_task(subscription.next_batch(10, GATHER))
            await asyncio.wait({waiting}, timeout=0.05)
            world.network.cut()
            with pytest.raises(BrokerLost):
                await waiting
            await subscription.close()
