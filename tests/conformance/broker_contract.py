"""What every publisher and every consumer must do, as a suite: subclass :class:`BrokerContract`, say how they are made.

Nothing here knows of frames. ``Hand`` is the hand of an operator at the broker, by another road than the one tested.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import Protocol

import pytest

from delayer.core.errors import BrokerLost
from delayer.core.message import CONFIRMED, NACKED, Confirmed, Delivery, Outcome, Outgoing, Returned
from delayer.services.edits import ID
from delayer.services.ports import Consumer, Publisher, Subscription
from delayer.wire.properties import encode_headers, entry, long_string

GATHER = 0.02
BOUND = 1.0
"""Seconds that the publishers of this suite wait for confirms."""


class Hand(Protocol):
    """At the broker."""

    async def queue(self, name: str, arguments: Mapping[str, int | str] | None = None) -> None: ...

    async def exchange(self, name: str, *, kind: str = "direct", internal: bool = False) -> None: ...

    async def bind(self, queue: str, exchange: str, key: str) -> None: ...

    async def delete_exchange(self, name: str) -> None: ...

    async def delete_queue(self, name: str) -> None: ...

    async def drain(self, queue: str) -> list[bytes]:
        """Take every message that is ready; their bodies."""

    async def forbid(self, *, write: str = ".*", topic: tuple[str, str] | None = None) -> None:
        """From now on, the publishers may write only to exchanges that match, and to such keys of a topic exchange."""

    async def alarm(self, on: bool) -> None:
        """A resource alarm, which blocks whoever publishes."""


class Network(Protocol):
    """Between the broker and who is tested."""

    def cut(self) -> None: ...

    async def refuse(self) -> None: ...

    async def accept(self) -> None: ...

    def stall(self, *, to_server: bool = True, to_client: bool = True) -> None: ...

    def resume(self) -> None: ...


@dataclass(frozen=True)
class World:
    """Everything that a test has; ``publisher`` gives up after :data:`BOUND` seconds."""

    publisher: Publisher
    consumer: Consumer
    hand: Hand
    network: Network


def message(token: object, key: str, exchange: str = "", body: bytes | None = None) -> Outgoing:
    """A message whose body is its token, if nothing else is said."""
    name = str(token).encode()
    properties = encode_headers(entry(ID, long_string(name)))
    return Outgoing(exchange.encode(), key.encode(), properties, name if body is None else body, name)


def no_route(outcome: Outcome) -> bool:
    return isinstance(outcome, Returned) and outcome.code == 312


async def until_published(publisher: Publisher, batch: Sequence[Outgoing]) -> list[Outcome]:
    """Publish as the services do: again, until the broker is back."""
    while True:
        try:
            return await publisher.publish(batch)
        except BrokerLost:
            continue


async def publish_all(publisher: Publisher, batch: Sequence[Outgoing]) -> list[Outcome]:
    """Publish as many at a time as the publisher wants. Raises BrokerLost as soon as some are in doubt."""
    outcomes: list[Outcome] = []
    while len(outcomes) < len(batch):
        outcomes += await publisher.publish(batch[len(outcomes) :][: publisher.batch_limit])
    return outcomes


async def take(subscription: Subscription, count: int) -> list[Delivery]:
    """Exactly that many deliveries."""
    found: list[Delivery] = []
    while len(found) < count:
        found += await subscription.next_batch(count - len(found), GATHER)
    return found


def bodies(deliveries: Sequence[Delivery]) -> list[bytes]:
    return [delivery.body for delivery in deliveries]


def numbered(numbers: Sequence[int]) -> list[bytes]:
    return [b"%d" % number for number in numbers]


class PublisherContract:
    """Subclasses define ``world`` and a fixture ``place``."""

    def world(self, place: str) -> AbstractAsyncContextManager[World]:
        raise NotImplementedError

    async def test_an_empty_batch(self, place: str) -> None:
        async with self.world(place) as world:
            assert await world.publisher.publish([]) == []

    async def test_messages_arrive_in_order(self, place: str) -> None:
        async with self.world(place) as world:
            await world.hand.queue("q")
            assert await world.publisher.publish([message(n, "q") for n in range(2000)]) == [CONFIRMED] * 2000
            assert await world.hand.drain("q") == numbered(range(2000))

    async def test_each_message_has_its_own_outcome(self, place: str) -> None:
        async with self.world(place) as world:
            await world.hand.queue("q")
            await world.hand.queue("full", {"x-max-length": 1, "x-overflow": "reject-publish"})
            assert await world.publisher.publish([message("first", "full")]) == [CONFIRMED]
            keys = ["q", "nowhere", "full"] * 100
            outcomes = await world.publisher.publish([message(n, key) for n, key in enumerate(keys)])
            assert outcomes[0::3] == [CONFIRMED] * 100
            assert all(no_route(outcome) for outcome in outcomes[1::3])
            assert outcomes[2::3] == [NACKED] * 100
            assert await world.hand.drain("q") == numbered(range(0, 300, 3))
            assert await world.hand.drain("full") == [b"first"]

    async def test_copies_of_a_message_are_told_apart(self, place: str) -> None:
        async with self.world(place) as world:
            await world.hand.queue("q")
            keys = ["q", "nowhere", "q", "nowhere", "q"]
            batch = [message("same", key, body=b"%d" % n) for n, key in enumerate(keys)]
            outcomes = await world.publisher.publish([*batch, message("other", "nowhere")])
            assert [no_route(outcome) for outcome in outcomes] == [False, True, False, True, False, True]
            assert sorted(await world.hand.drain("q")) == [b"0", b"2", b"4"]

    async def test_copies_in_different_batches_are_told_apart(self, place: str) -> None:
        async with self.world(place) as world:
            await world.hand.queue("q")
            batches = [[message("same", "q" if n % 2 else "nowhere"), message(n, "q")] for n in range(20)]
            outcomes = await asyncio.gather(*(world.publisher.publish(batch) for batch in batches))
            assert [no_route(first) for first, _ in outcomes] == [True, False] * 10
            assert {second for _, second in outcomes} == {CONFIRMED}
            assert sorted(await world.hand.drain("q")) == sorted([*numbered(range(20)), *[b"same"] * 10])

    async def test_messages_without_a_token(self, place: str) -> None:
        async with self.world(place) as world:
            await world.hand.queue("q")
            batch = [message(n, "q")._replace(token=b"", properties=b"\0\0") for n in range(3)]
            assert await world.publisher.publish(batch) == [CONFIRMED] * 3
            assert len(await world.hand.drain("q")) == 3

    async def test_several_batches_in_flight(self, place: str) -> None:
        async with self.world(place) as world:
            await world.hand.queue("q")

            def batch(number: int) -> list[Outgoing]:
                return [message(number * 50 + n, "nowhere" if n % 7 == number else "q") for n in range(50)]

            found = await asyncio.gather(*(world.publisher.publish(batch(number)) for number in range(8)))
            for number, outcomes in enumerate(found):
                assert [no_route(outcome) for outcome in outcomes] == [n % 7 == number for n in range(50)]

    @pytest.mark.parametrize("first", [0, 1, 9])
    async def test_a_missing_exchange(self, place: str, first: int) -> None:
        """Its messages are returned; the others are confirmed, and there once."""
        async with self.world(place) as world:
            await world.hand.queue("q")
            where = ["missing" if n >= first and n % 3 == first % 3 else "" for n in range(12)]
            for _ in range(2):
                outcomes = await world.publisher.publish([message(n, "q", name) for n, name in enumerate(where)])
                assert [one.code if isinstance(one, Returned) else one for one in outcomes] == [
                    404 if name else CONFIRMED for name in where
                ]
                assert await world.hand.drain("q") == numbered([n for n, name in enumerate(where) if not name])

    async def test_an_internal_exchange(self, place: str) -> None:
        async with self.world(place) as world:
            await world.hand.queue("q")
            await world.hand.exchange("inner", internal=True)
            await world.hand.bind("q", "inner", "q")
            outcomes = await world.publisher.publish([message(1, "q"), message(2, "q", "inner"), message(3, "q")])
            assert [one.code if isinstance(one, Returned) else one for one in outcomes] == [CONFIRMED, 403, CONFIRMED]
            assert await world.hand.drain("q") == [b"1", b"3"]

    async def test_an_exchange_that_is_closed_to_us(self, place: str) -> None:
        async with self.world(place) as world:
            await world.hand.queue("q")
            await world.hand.exchange("secret")
            await world.hand.bind("q", "secret", "q")
            await world.hand.forbid(write=r"^(|amq\.default)$")
            batch = [message(n, "q", "secret" if n % 2 else "") for n in range(10)]
            outcomes = await world.publisher.publish(batch)
            assert [one.code if isinstance(one, Returned) else one for one in outcomes] == [CONFIRMED, 403] * 5
            assert await world.hand.drain("q") == numbered(range(0, 10, 2))

    async def test_a_topic_that_is_closed_to_us(self, place: str) -> None:
        """A permission that depends on the key says nothing of the exchange's other messages."""
        async with self.world(place) as world:
            await world.hand.queue("q")
            await world.hand.exchange("news", kind="topic")
            await world.hand.bind("q", "news", "#")
            await world.hand.forbid(topic=("news", "^open"))
            batch = [message(n, "closed" if n % 3 == 0 else "open", "news") for n in range(9)]
            outcomes = await until_published(world.publisher, batch)
            found = [one.code if isinstance(one, Returned) else one for one in outcomes]
            assert found == [403, CONFIRMED, CONFIRMED] * 3
            assert set(await world.hand.drain("q")) == set(numbered([n for n in range(9) if n % 3]))

    async def test_many_topics_that_are_closed_to_us(self, place: str) -> None:
        """Once it is known that the key matters, nothing is in doubt any more, for nobody."""
        async with self.world(place) as world:
            await world.hand.queue("q")
            await world.hand.exchange("news", kind="topic")
            await world.hand.bind("q", "news", "#")
            await world.hand.forbid(topic=("news", "^open"))
            batch = [message(n, "open" if n % 2 else "closed", "news") for n in range(30)]
            with suppress(BrokerLost):
                await publish_all(world.publisher, batch)
            await world.hand.drain("q")
            for _ in range(3):
                assert world.publisher.batch_limit <= 100
                others = [message(f"other {n}", "q") for n in range(30)]
                mixed = [one for pair in zip(batch, others, strict=True) for one in pair]
                outcomes = await publish_all(world.publisher, mixed)
                assert outcomes[1::2] == [CONFIRMED] * 30
                assert [one.code if isinstance(one, Returned) else one for one in outcomes[::2]] == [
                    403,
                    CONFIRMED,
                ] * 15
                there = await world.hand.drain("q")
                assert sorted(there) == sorted([*numbered(range(1, 30, 2)), *(one.body for one in others)])

    async def test_a_publisher_that_is_closed(self, place: str) -> None:
        """It gives its channel back, and opens another one for a later publish."""
        async with self.world(place) as world:
            await world.publisher.close()
            await world.hand.queue("q")
            for n in range(2):
                assert await world.publisher.publish([message(n, "q")]) == [CONFIRMED]
                await world.publisher.close()
                await world.publisher.close()
            assert await world.hand.drain("q") == [b"0", b"1"]

    @pytest.mark.parametrize("silent", [True, False])
    async def test_closing_a_publisher_whose_broker_is_gone(self, place: str, silent: bool) -> None:
        async with self.world(place) as world:
            await world.hand.queue("q")
            assert await world.publisher.publish([message(0, "q")]) == [CONFIRMED]
            if silent:
                world.network.stall()
            else:
                await world.network.refuse()
            async with asyncio.timeout(BOUND * 3):
                await world.publisher.close()
            world.network.resume()

    async def test_an_exchange_that_is_deleted_later(self, place: str) -> None:
        """One batch is in doubt; the next ones are exact again, and stop nobody."""
        async with self.world(place) as world:
            await world.hand.queue("q")
            await world.hand.exchange("brief")
            await world.hand.bind("q", "brief", "q")
            batch = [message(n, "q", "brief" if n == 5 else "") for n in range(10)]
            assert await world.publisher.publish(batch) == [CONFIRMED] * 10
            await world.hand.delete_exchange("brief")
            with pytest.raises(BrokerLost):
                await world.publisher.publish(batch)
            await world.hand.drain("q")
            for _ in range(3):
                outcomes = await world.publisher.publish(batch)
                assert [one.code if isinstance(one, Returned) else None for one in outcomes] == [
                    404 if n == 5 else None for n in range(10)
                ]
                assert await world.hand.drain("q") == numbered([n for n in range(10) if n != 5])

    async def test_without_a_connection(self, place: str) -> None:
        """A bound to the waiting, and then it comes back by itself."""
        async with self.world(place) as world:
            await world.hand.queue("q")
            assert await world.publisher.publish([message(0, "q")]) == [CONFIRMED]
            assert world.publisher.ready
            await world.network.refuse()
            async with asyncio.timeout(BOUND * 3):
                with pytest.raises(BrokerLost):
                    while True:  # until the cut is noticed here too
                        await world.publisher.publish([message(1, "q")])
                with pytest.raises(BrokerLost):
                    await world.publisher.publish([message(2, "q")])
            assert not world.publisher.ready
            await world.network.accept()
            assert await until_published(world.publisher, [message(3, "q")]) == [CONFIRMED]
            assert [body for body in await world.hand.drain("q") if body != b"1"] == [b"0", b"3"]

    async def test_a_cut_with_batches_in_flight(self, place: str) -> None:
        """Each is in doubt, and says so; what was confirmed is there."""
        async with self.world(place) as world:
            await world.hand.queue("q")
            assert await world.publisher.publish([message("first", "q")]) == [CONFIRMED]
            world.network.stall(to_server=False)
            batches = [[message(f"{number}.{n}", "q") for n in range(10)] for number in range(3)]
            publishing = [asyncio.create_task(world.publisher.publish(batch)) for batch in batches]
            await asyncio.wait(publishing, timeout=0.05)
            world.network.cut()
            world.network.resume()
            found = await asyncio.gather(*publishing, return_exceptions=True)
            assert all(isinstance(one, BrokerLost) for one in found), found
            for batch in batches:
                assert await until_published(world.publisher, batch) == [CONFIRMED] * 10
            there = await world.hand.drain("q")
            assert set(there) == {b"first", *(one.body for batch in batches for one in batch)}

    async def test_a_broker_that_does_not_answer(self, place: str) -> None:
        async with self.world(place) as world:
            await world.hand.queue("q")
            assert await world.publisher.publish([message(0, "q")]) == [CONFIRMED]
            world.network.stall(to_server=False)
            async with asyncio.timeout(BOUND * 4):
                with pytest.raises(BrokerLost):
                    await world.publisher.publish([message(1, "q")])
                with pytest.raises(BrokerLost):
                    await world.publisher.publish([message(2, "q", "amq.direct")])
            world.network.resume()
            assert await until_published(world.publisher, [message(3, "q")]) == [CONFIRMED]

    async def test_a_blocked_connection_publishes_nothing(self, place: str) -> None:
        async with self.world(place) as world:
            await world.hand.queue("q")
            assert await world.publisher.publish([message(0, "q")]) == [CONFIRMED]
            await world.hand.alarm(True)
            try:
                with pytest.raises(BrokerLost):
                    await world.publisher.publish([message(1, "q")])  # the broker tells only those who publish
                assert not world.publisher.ready
                for n in range(2, 4):
                    with pytest.raises(BrokerLost, match="blocks publishers"):
                        await world.publisher.publish([message(n, "q")])
            finally:
                await world.hand.alarm(False)
            assert await until_published(world.publisher, [message(4, "q")]) == [CONFIRMED]
            assert world.publisher.ready
            there = await world.hand.drain("q")
            assert there[0] == b"0"
            assert b"4" in there
            assert not {b"2", b"3"} & set(there)

    async def test_the_longest_properties(self, place: str) -> None:
        async with self.world(place) as world:
            await world.hand.queue("q")
            await world.publisher.publish([message(0, "q")])
            own = entry(ID, long_string(b"1"))
            room = world.publisher.max_properties - len(encode_headers(own + entry(b"x", long_string(b""))))
            longest = encode_headers(own + entry(b"x", long_string(b"x" * room)))
            assert len(longest) == world.publisher.max_properties
            assert await world.publisher.publish([message(1, "q")._replace(properties=longest)]) == [CONFIRMED]
            assert await world.hand.drain("q") == [b"0", b"1"]


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

    async def test_what_is_unsettled_is_given_back(self, place: str) -> None:
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

    async def test_what_is_acknowledged_before_the_end_is_not_repeated(self, place: str) -> None:
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


async def until_subscribed(consumer: Consumer, queue: str) -> Subscription:
    while True:
        try:
            return await consumer.subscribe(queue, 100)
        except BrokerLost:
            continue


class BrokerContract(PublisherContract, ConsumerContract):
    """Both ports, in one world."""
