"""The port Publisher, at a broker behind a proxy and in memory: exact outcomes, and every wait is bounded."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import pytest

from delayer.amqp.errors import BrokerLost
from delayer.amqp.properties import encode_headers, entry, long_string
from delayer.amqp.values import CONFIRMED, Pace
from delayer.broker import publisher as publishing
from delayer.broker.circuit_breaker import CircuitBreaker, Destination
from delayer.broker.isolation import Isolation
from delayer.broker.publisher import AmqpPublisher
from delayer.core.hold import NACKED, unanswered
from delayer.core.marks import ID
from tests.conformance.broker_world import (
    BOUND,
    Either,
    Place,
    codes,
    message,
    no_route,
    numbered,
    publish_all,
    relay_to,
    until_published,
)
from tests.support.fakes import until


async def test_messages_arrive_in_order(either: Either) -> None:
    async with either.world("q") as world:
        assert await world.publisher.publish([]) == []
        assert await world.publisher.publish([message(n, "q") for n in range(2000)]) == [CONFIRMED] * 2000
        assert await world.hand.drain("q") == numbered(range(2000))


async def test_each_message_has_its_own_outcome(either: Either) -> None:
    async with either.world("q") as world:
        await world.hand.queue("full", {"x-max-length": 1, "x-overflow": "reject-publish"})
        assert await world.publisher.publish([message("first", "full")]) == [CONFIRMED]
        keys = ["q", "nowhere", "full"] * 100
        outcomes = await world.publisher.publish([message(n, key) for n, key in enumerate(keys)])
        assert outcomes[0::3] == [CONFIRMED] * 100
        assert all(no_route(outcome) for outcome in outcomes[1::3])
        assert outcomes[2::3] == [NACKED] * 100
        assert await world.hand.drain("q") == numbered(range(0, 300, 3))
        assert await world.hand.drain("full") == [b"first"]


async def test_copies_of_a_message_have_their_own_outcomes(either: Either) -> None:
    async with either.world("q") as world:
        keys = ["q", "nowhere", "q", "nowhere", "q"]
        batch = [message("same", key, body=b"%d" % n) for n, key in enumerate(keys)]
        outcomes = await world.publisher.publish([*batch, message("other", "nowhere")])
        assert [no_route(outcome) for outcome in outcomes] == [False, True, False, True, False, True]
        assert sorted(await world.hand.drain("q")) == [b"0", b"2", b"4"]


async def test_copies_in_different_batches_have_their_own_outcomes(either: Either) -> None:
    async with either.world("q") as world:
        batches = [[message("same", "q" if n % 2 else "nowhere"), message(n, "q")] for n in range(20)]
        outcomes = await asyncio.gather(*(world.publisher.publish(batch) for batch in batches))
        assert [no_route(first) for first, _ in outcomes] == [True, False] * 10
        assert {second for _, second in outcomes} == {CONFIRMED}
        assert sorted(await world.hand.drain("q")) == sorted([*numbered(range(20)), *[b"same"] * 10])


async def test_messages_without_a_token(either: Either) -> None:
    async with either.world("q") as world:
        batch = [message(n, "q")._replace(token=b"", properties=b"\0\0") for n in range(3)]
        assert await world.publisher.publish(batch) == [CONFIRMED] * 3
        assert len(await world.hand.drain("q")) == 3


@pytest.mark.parametrize("first", [0, 1, 9])
async def test_a_missing_exchange(either: Either, first: int) -> None:
    """Messages to it are returned; the rest are confirmed, and arrive once."""
    async with either.world("q") as world:
        where = ["missing" if n >= first and n % 3 == first % 3 else "" for n in range(12)]
        for _ in range(2):
            outcomes = await world.publisher.publish([message(n, "q", name) for n, name in enumerate(where)])
            assert codes(outcomes) == [404 if name else CONFIRMED for name in where]
            assert await world.hand.drain("q") == numbered([n for n, name in enumerate(where) if not name])


async def test_exchanges_that_are_internal_or_forbidden(place: Place) -> None:
    async with place.world("q") as world:
        await world.hand.exchange("inner", internal=True, to_q="q")
        await world.hand.exchange("secret", to_q="q")
        await world.hand.forbid(write=r"^(|amq\.default|inner)$")
        batch = [message(n, "q", ["", "inner", "secret"][n % 3]) for n in range(12)]
        assert codes(await world.publisher.publish(batch)) == [CONFIRMED, 403, 403] * 4
        assert await world.hand.drain("q") == numbered(range(0, 12, 3))


async def test_many_forbidden_topics(place: Place) -> None:
    """Once the publisher knows that the key matters, each outcome is certain."""
    async with place.world("q") as world:
        await world.hand.exchange("news", kind="topic", to_q="#")
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
            assert codes(outcomes[::2]) == [403, CONFIRMED] * 15
            there = await world.hand.drain("q")
            assert sorted(there) == sorted([*numbered(range(1, 30, 2)), *(one.body for one in others)])


async def test_a_publisher_that_is_closed(either: Either) -> None:
    """It closes its channel, and opens another one for a later publish."""
    async with either.world() as world:
        await world.publisher.close()
        await world.hand.queue("q")
        for n in range(2):
            assert await world.publisher.publish([message(n, "q")]) == [CONFIRMED]
            await world.publisher.close()
            await world.publisher.close()
        assert await world.hand.drain("q") == [b"0", b"1"]


@pytest.mark.parametrize("silent", [True, False])
async def test_a_publisher_closes_without_its_broker(place: Place, silent: bool) -> None:
    async with place.world("q") as world:
        assert await world.publisher.publish([message(0, "q")]) == [CONFIRMED]
        if silent:
            world.network.stall()
        else:
            await world.network.refuse()
        async with asyncio.timeout(BOUND * 3):
            await world.publisher.close()
        world.network.resume()


async def test_an_exchange_that_is_deleted_later(either: Either) -> None:
    """Some messages of a batch may be delivered twice; every outcome is exact, and no message blocks another."""
    async with either.world("q") as world:
        await world.hand.exchange("brief", to_q="q")
        batch = [message(n, "q", "brief" if n == 5 else "") for n in range(10)]
        assert await world.publisher.publish(batch) == [CONFIRMED] * 10
        await world.hand.delete_exchange("brief")
        await world.hand.drain("q")
        for round_ in range(4):
            outcomes = await world.publisher.publish(batch)
            assert codes(outcomes) == [404 if n == 5 else CONFIRMED for n in range(10)]
            there = await world.hand.drain("q")
            assert set(there) == set(numbered([n for n in range(10) if n != 5]))
            assert round_ == 0 or len(there) == 9


async def test_messages_not_yet_due_wait_even_in_a_batch_with_a_bad_message(either: Either) -> None:
    """One message's exchange is missing, so the isolation republishes the rest, but not before their due instants."""
    async with either.world("q") as world:
        arrived = await world.hand.watch("q")
        due = [int(time.time() * 1000) + 20 * n for n in range(12)]
        batch = [message(n, "q", "missing" if n == 3 else "") for n in range(12)]
        outcomes = await world.publisher.publish(batch, Pace(due, lambda: time.time() * 1000))
        assert codes(outcomes) == [CONFIRMED] * 3 + [404] + [CONFIRMED] * 8
        await until(lambda: len(arrived) == 11)
        assert not [body for body, at_ms in arrived if at_ms < due[int(body)]]


async def test_doubtful_messages_of_several_destinations_wait_until_the_last_of_them_is_due(place: Place) -> None:
    async with place.world("a", "b") as world, relay_to(place.address) as publishing:
        at_a, at_b = await world.hand.watch("a"), await world.hand.watch("b")
        seconds = 0.0
        isolation = Isolation(publishing, timeout=BOUND)
        isolation.breaker = CircuitBreaker(lambda: seconds)
        for key in (b"a", b"b"):
            isolation.breaker.open(Destination(b"", key), unanswered(BOUND, b"", key))
        seconds = 60.0  # Both breakers are half-open.
        publisher = AmqpPublisher(publishing, isolation=isolation, confirm_timeout=BOUND)
        due = [int(time.time() * 1000) + later for later in (0, 10, 20, 30, 300)]
        batch = [message(n, key) for n, key in enumerate("abbba")]
        assert await publisher.publish(batch, Pace(due, lambda: time.time() * 1000)) == [CONFIRMED] * 5
        await until(lambda: len(at_a) + len(at_b) == 5)
        assert not [body for body, at_ms in at_a + at_b if at_ms < due[int(body)]]
        await publisher.close()
        isolation.close()


async def test_a_batch_does_not_wait_for_a_clock_that_was_set_back(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is due in an hour by the new clock: its deadline ends the wait, and the caller reschedules it."""
    monkeypatch.setattr(publishing, "LONGEST_AHEAD", 0.1)
    async with place.world("q") as world:
        with pytest.raises(BrokerLost):
            async with asyncio.timeout(BOUND * 3):
                await world.publisher.publish([message(1, "q")], Pace([3_600_000], lambda: 0))
        assert await world.hand.drain("q") == []


async def test_without_a_connection(either: Either) -> None:
    """The wait is bounded, and the connection recovers by itself."""
    async with either.world("q") as world:
        assert await world.publisher.publish([message(0, "q")]) == [CONFIRMED]
        assert world.publisher.ready
        await world.network.refuse()
        async with asyncio.timeout(BOUND * 3):
            with pytest.raises(BrokerLost):
                while True:  # until the client notices the cut too
                    await world.publisher.publish([message(1, "q")])
            with pytest.raises(BrokerLost):
                await world.publisher.publish([message(2, "q")])
        assert not world.publisher.ready
        await world.network.accept()
        assert await until_published(world.publisher, [message(3, "q")]) == [CONFIRMED]
        assert {*await world.hand.drain("q")} - {b"1"} == {b"0", b"3"}, "the last may come twice on a busy machine"


async def test_a_cut_with_batches_in_flight(place: Place) -> None:
    """Each batch without confirms raises BrokerLost; confirmed messages have arrived."""
    async with place.world("q") as world:
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


async def test_a_cut_with_the_first_message_for_an_exchange_in_flight(place: Place) -> None:
    """One call publishes the message once. The caller decides whether to publish it again."""
    async with place.world("q") as world:
        await world.hand.exchange("news", kind="topic", to_q="#")
        assert await world.publisher.publish([message("first", "q")]) == [CONFIRMED]
        arrived = await world.hand.watch("q")
        world.network.stall(to_server=False)
        publishing = asyncio.create_task(world.publisher.publish([message("in flight", "q", "news")]))
        await until(lambda: len(arrived) == 2)
        world.network.cut()
        world.network.resume()
        with pytest.raises(BrokerLost):
            await publishing
        assert await until_published(world.publisher, [message("next", "q", "news")]) == [CONFIRMED]
        await until(lambda: arrived[-1][0] == b"next")
        assert [body for body, _ in arrived] == [b"first", b"in flight", b"next"]


async def test_a_broker_that_does_not_answer(place: Place) -> None:
    async with place.world("q") as world:
        assert await world.publisher.publish([message(0, "q")]) == [CONFIRMED]
        world.network.stall(to_server=False)
        async with asyncio.timeout(BOUND * 4):
            with pytest.raises(BrokerLost):
                await world.publisher.publish([message(1, "q")])
            with pytest.raises(BrokerLost):
                await world.publisher.publish([message(2, "q", "amq.direct")])
        world.network.resume()
        assert await until_published(world.publisher, [message(3, "q")]) == [CONFIRMED]


async def test_a_blocked_connection_publishes_nothing(either: Either) -> None:
    async with either.world("q") as world:
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


async def test_the_longest_properties(either: Either) -> None:
    async with either.world("q") as world:
        await world.publisher.publish([message(0, "q")])
        own = entry(ID, long_string(b"1"))
        room = world.publisher.max_properties - len(encode_headers(own + entry(b"x", long_string(b""))))
        longest = encode_headers(own + entry(b"x", long_string(b"x" * room)))
        assert len(longest) == world.publisher.max_properties
        assert await world.publisher.publish([message(1, "q")._replace(properties=longest)]) == [CONFIRMED]
        assert await world.hand.drain("q") == [b"0", b"1"]
