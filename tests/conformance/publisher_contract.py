"""What every publisher must do, as a suite: see :class:`~tests.conformance.broker_contract.BrokerContract`."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, suppress

import pytest

from delayer.amqp.edits import ID
from delayer.amqp.properties import encode_headers, entry, long_string
from delayer.core.errors import BrokerLost
from delayer.core.message import CONFIRMED, NACKED, Outgoing
from tests.conformance.broker_world import (
    BOUND,
    Objection,
    World,
    message,
    no_route,
    numbered,
    publish_all,
    until_published,
)


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
                assert [one.code if isinstance(one, Objection) else one for one in outcomes] == [
                    404 if name else CONFIRMED for name in where
                ]
                assert await world.hand.drain("q") == numbered([n for n, name in enumerate(where) if not name])

    async def test_an_internal_exchange(self, place: str) -> None:
        async with self.world(place) as world:
            await world.hand.queue("q")
            await world.hand.exchange("inner", internal=True)
            await world.hand.bind("q", "inner", "q")
            outcomes = await world.publisher.publish([message(1, "q"), message(2, "q", "inner"), message(3, "q")])
            assert [one.code if isinstance(one, Objection) else one for one in outcomes] == [CONFIRMED, 403, CONFIRMED]
            assert await world.hand.drain("q") == [b"1", b"3"]

    async def test_an_exchange_that_is_closed_to_us(self, place: str) -> None:
        async with self.world(place) as world:
            await world.hand.queue("q")
            await world.hand.exchange("secret")
            await world.hand.bind("q", "secret", "q")
            await world.hand.forbid(write=r"^(|amq\.default)$")
            batch = [message(n, "q", "secret" if n % 2 else "") for n in range(10)]
            outcomes = await world.publisher.publish(batch)
            assert [one.code if isinstance(one, Objection) else one for one in outcomes] == [CONFIRMED, 403] * 5
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
            found = [one.code if isinstance(one, Objection) else one for one in outcomes]
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
                others = [message(f"other {n}", "q") for n in range(30)]
                mixed = [one for pair in zip(batch, others, strict=True) for one in pair]
                outcomes = await publish_all(world.publisher, mixed)
                assert outcomes[1::2] == [CONFIRMED] * 30
                assert [one.code if isinstance(one, Objection) else one for one in outcomes[::2]] == [
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
        """Some of one batch may come twice; every outcome is exact, and stops nobody."""
        async with self.world(place) as world:
            await world.hand.queue("q")
            await world.hand.exchange("brief")
            await world.hand.bind("q", "brief", "q")
            batch = [message(n, "q", "brief" if n == 5 else "") for n in range(10)]
            assert await world.publisher.publish(batch) == [CONFIRMED] * 10
            await world.hand.delete_exchange("brief")
            await world.hand.drain("q")
            for round_ in range(4):
                outcomes = await world.publisher.publish(batch)
                assert [one.code if isinstance(one, Objection) else None for one in outcomes] == [
                    404 if n == 5 else None for n in range(10)
                ]
                there = await world.hand.drain("q")
                assert set(there) == set(numbered([n for n in range(10) if n != 5]))
                assert round_ == 0 or len(there) == 9

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
