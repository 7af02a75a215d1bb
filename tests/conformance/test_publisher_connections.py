"""The connections of publishers at a real broker: distant, closed for a message, given up, or refused."""

from __future__ import annotations

import asyncio
import math
import random
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from delayer.amqp.address import Address
from delayer.amqp.channel import Channel
from delayer.amqp.connection import Connection
from delayer.amqp.errors import BrokerLost
from delayer.amqp.properties import encode_headers, entry, long_string
from delayer.amqp.values import CONFIRMED, Outgoing
from delayer.broker import addresses
from delayer.broker import connection as connection_module
from delayer.broker.admin import Admin
from delayer.broker.connection import ReconnectingConnection
from delayer.broker.isolation import NOT_TRIED, Isolation
from delayer.broker.pipelined_admin import pipelined_admin
from delayer.broker.publisher import MAX_BATCH, AmqpPublisher
from delayer.core.backoff import LogThrottle
from delayer.core.counters import Counters
from delayer.core.errors import LaneLost
from delayer.core.hold import HoldKind, Outcome
from delayer.core.marks import ID
from delayer.core.publisher import Isolated
from delayer.release.loop import LaneRelease
from tests.conformance.broker_world import Place, World, codes, message, publish_all, relay_to
from tests.support.fakes import Heartbeat, ScriptedLane, ScriptedLive, due, kind_of
from tests.support.logged import capture_logs
from tests.support.place import eventually
from tests.support.proxy import Proxy, deaf


def poisonous(token: object) -> Outgoing:
    """A message with a number that Erlang does not have. No broker accepts it, but an import may bring it."""
    one = message(token, "q")
    headers = entry(ID, long_string(one.token)) + entry(b"rate", b"d" + struct.pack(">d", math.nan))
    return one._replace(properties=encode_headers(headers))


@asynccontextmanager
async def far_away(place: Place, round_trip: float) -> AsyncIterator[tuple[World, ReconnectingConnection]]:
    """A broker with this latency in seconds, and a topic exchange that routes only the key ``open``."""
    async with place.world("q") as world, Proxy(place.broker.port) as proxy:
        await world.hand.exchange("news", kind="topic", to_q="#")
        await world.hand.forbid(topic=("news", "^open$"))
        proxy.slow(delay=round_trip / 2)
        async with relay_to(place.behind(proxy)) as reconnecting:
            await reconnecting.connection(30)
            yield world, reconnecting


async def all_released(connection: Connection) -> None:
    """Wait until the broker has confirmed the close of every channel."""
    for one in list(connection.receivers.values()):
        if isinstance(one, Channel) and one.closed.done():
            await one.number_freed


async def test_forbidden_topics_over_a_slow_connection(place: Place) -> None:
    """Every outcome is exact; after the first batch every good message is delivered once."""
    batch = [message(n, "closed" if n % 2 else "open", "news") for n in range(400)]
    async with far_away(place, 0.005) as (world, reconnecting):
        publisher = AmqpPublisher(reconnecting)
        good = [b"%d" % n for n in range(0, 400, 2)]
        for round_ in range(2):
            outcomes = await publish_all(publisher, batch)
            assert codes(outcomes) == [CONFIRMED, 403] * 200
            there = await world.hand.drain("q")
            assert set(there) == set(good)
            assert round_ == 0 or there == good


async def test_forbidden_topics_over_a_connection_too_slow_for_the_batch(place: Place) -> None:
    """A batch that exceeds its deadline makes the next batch smaller, until all are through."""
    left = [message(n, "closed" if n % 2 else "open", "news") for n in range(60)]
    outcomes, in_doubt = [], 0
    async with far_away(place, 0.01) as (world, reconnecting):
        publisher = AmqpPublisher(reconnecting, confirm_timeout=0.3)
        async with asyncio.timeout(30):
            while left:
                portion = left[: publisher.batch_limit]
                try:
                    outcomes += await publisher.publish(portion)
                except BrokerLost:
                    in_doubt += 1
                else:
                    del left[: len(portion)]
        assert codes(outcomes) == [CONFIRMED, 403] * 30
        assert set(await world.hand.drain("q")) == {b"%d" % n for n in range(0, 60, 2)}
    assert in_doubt < 15


@pytest.mark.parametrize("ahead", [0, 60])
async def test_a_message_that_ends_the_connection_is_identified(place: Place, ahead: int) -> None:
    """Every outcome is exact. The broker closes the publishers' connection once, though more such messages follow."""
    good = [message(n, "q") for n in range(100)]
    batch = [*good[:ahead], poisonous(100), *good[ahead:], poisonous(101)]
    async with place.world("q") as world, relay_to(place.address) as reconnecting:
        publisher, beside = AmqpPublisher(reconnecting), AmqpPublisher(reconnecting)
        for one in (publisher, beside):
            assert await one.publish([message("first", "q")]) == [CONFIRMED]
        for _ in range(2):
            outcomes = await publisher.publish(batch)
            ended = {index for index, one in enumerate(outcomes) if kind_of(one) is HoldKind.CLOSED_CONNECTION}
            assert ended == {ahead, len(batch) - 1}
            assert sum(one is CONFIRMED for one in outcomes) == len(good)
        assert await beside.publish(good) == [CONFIRMED] * len(good)
        found = Counter(await world.hand.drain("q"))
        assert found.keys() == {b"first", *(one.body for one in good)}
        copies = Counter(found[one.body] - 3 for one in good)  # two batches of the one, and one of the other
        assert min(copies) >= 0
        assert max(copies) <= 10
        assert copies[0] + copies[1] + copies[2] >= 80
        await eventually(lambda: reconnecting.connects, lambda connects: connects == 2)


async def test_isolated_messages_do_not_end_other_connections(place: Place) -> None:
    """Each publisher may retry the message, also one that never met it; other batches are not isolated then."""
    async with place.world("q") as world, relay_to(place.address) as reconnecting:
        for round_ in range(3):
            isolation = Isolation(reconnecting, timeout=8.0)
            publisher = AmqpPublisher(reconnecting, isolation=isolation)
            good = [message(f"{round_}-{n}", "q") for n in range(50)]
            ender = Isolated(*poisonous(f"{round_}-bad"))
            outcomes = await publisher.publish([*good[:20], ender, *good[20:]])
            assert codes(outcomes) == [*[CONFIRMED] * 20, 541, *[CONFIRMED] * 30]
            assert publisher.batch_limit == MAX_BATCH
            assert isolation.isolating_until == -math.inf
        assert reconnecting.connects == 1
        assert len(await world.hand.drain("q")) == 150


async def test_without_a_second_connection(place: Place) -> None:
    """The isolation uses the publishers' own connection: every outcome is exact. A known poisonous message is held
    without a try."""
    batch = [message(0, "q"), poisonous(1), message(2, "q")]
    async with place.world("q") as world, relay_to(place.address) as reconnecting:
        await reconnecting.connection(30)
        await world.hand.limit_connections(4)  # this one, and three of the world
        publisher = AmqpPublisher(reconnecting, confirm_timeout=4.0)
        assert codes(await publisher.publish(batch)) == [CONFIRMED, 541, CONFIRMED]
        assert set(await world.hand.drain("q")) == {b"0", b"2"}
        connects = reconnecting.connects
        [outcome] = await publisher.publish([Isolated(*poisonous(3))])
        assert outcome == NOT_TRIED
        assert reconnecting.connects == connects


async def test_a_second_connection_that_opens_no_channel_is_replaced(place: Place) -> None:
    async with (
        place.world("q") as world,
        Proxy(place.broker.port) as proxy,
        relay_to(place.behind(proxy)) as reconnecting,
    ):
        await reconnecting.connection(30)
        publisher = AmqpPublisher(reconnecting)
        # The second connection opens the first channel.
        proxy.overhears = lambda sent: proxy.stall() if b"\0\x14\0\x0a" in sent else None
        with pytest.raises(BrokerLost):
            await publisher.publish([message(1, "q")])
        proxy.overhears = deaf
        proxy.resume()
        assert await publisher.publish([message(2, "q")]) == [CONFIRMED]
        assert (reconnecting.connects, proxy.accepted) == (1, 3)
        assert await world.hand.drain("q") == [b"2"]


async def test_messages_are_published_once_a_permission_is_restored(place: Place) -> None:
    """The breaker is half-open after a second: the publisher tries the next message."""
    async with far_away(place, 0) as (world, reconnecting):
        publisher = AmqpPublisher(reconnecting)
        for _ in range(2):
            [outcome] = await publisher.publish([message(1, "closed", "news")])
            assert kind_of(outcome) is HoldKind.CLOSED_CHANNEL
        assert await publisher.publish([message(1, "open", "news")]) == [CONFIRMED]
        await world.hand.forbid(topic=("news", ".*"))

        async def tried() -> list[Outcome]:
            return await publisher.publish([message(2, "closed", "news")])

        await eventually(tried, lambda outcomes: outcomes == [CONFIRMED])


async def test_lost_lanes_leave_no_channels_behind(place: Place) -> None:
    async with place.world("k") as world, relay_to(place.address) as reconnecting:
        await world.hand.exchange("orders.out")
        await world.hand.bind("k", "orders.out", "k")
        connection = await reconnecting.connection(30)
        before = dict(connection.receivers)
        for number in range(5):
            lane = ScriptedLane(number, claims=[[due(1), due(2)], LaneLost("somebody else's")])
            parts = {"heartbeat": Heartbeat(), "counters": Counters()}
            await LaneRelease(lane, AmqpPublisher(reconnecting), ScriptedLive(), **parts).run(asyncio.Event())
            assert lane.events[-1] == "release"
            await all_released(connection)
            assert connection.receivers == before
        assert len(await world.hand.drain("k")) == 10


async def test_an_interrupted_publish_leaves_no_channels_behind(place: Place) -> None:
    """The interruption may happen while the publisher opens a channel or waits for a confirm."""
    async with far_away(place, 0.004) as (_, reconnecting):
        connection = await reconnecting.connection(30)
        before = dict(connection.receivers)
        for milliseconds in range(1, 20, 2):
            publisher = AmqpPublisher(reconnecting)
            publishing = asyncio.create_task(publisher.publish([message(n, "q") for n in range(2)]))
            await asyncio.wait([publishing], timeout=milliseconds / 1000)
            publishing.cancel()
            await asyncio.wait([publishing])
            await publisher.close()
        await all_released(connection)
        assert connection.receivers == before


async def test_a_connection_can_be_closed_before_it_is_first_open() -> None:
    reconnecting = ReconnectingConnection(lambda: [], "reconnecting test", heartbeat=20)
    with pytest.raises(BrokerLost, match="no connection to the broker"):
        await reconnecting.connection(0.01)
    await reconnecting.close()
    await reconnecting.close()


async def test_a_failure_of_the_reconnecting_task_is_raised() -> None:
    """The keeper retries only after losses. Any other error ends it, so every caller must get that error."""
    async with relay_to(None) as reconnecting:  # type: ignore[arg-type]
        with pytest.raises(BrokerLost):
            await reconnecting.connection(0.05)
        with pytest.raises(AttributeError):
            await reconnecting.connection(0.05)


async def test_short_connections_do_not_lengthen_the_pause(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them was opened immediately, so the next may be as well."""
    attempts: list[int] = []

    def noted(attempt: int, _random: float) -> float:
        attempts.append(attempt)
        return 0.0

    monkeypatch.setattr(connection_module, "pause", noted)
    async with Proxy(place.broker.port) as proxy, relay_to(place.behind(proxy)) as reconnecting:
        for _ in range(8):
            connection = await reconnecting.connection(10)
            proxy.cut()
            await asyncio.wait({connection.closed})
            await asyncio.sleep(0)
        await reconnecting.connection(10)
    assert attempts == [0, 1, 2, 2, 2, 2, 2, 2]


async def test_each_address_behind_a_name_is_tried(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by the connections for administration. Nothing listens at the second address."""

    async def look_up(_host: str, _port: int) -> list[str]:
        return ["127.0.0.1", "127.0.0.2"]

    monkeypatch.setattr(addresses, "look_up", look_up)
    url = place.url.replace("127.0.0.1", "cluster.example")
    [address] = Address.parse_all(url)
    for seed in range(4):
        random.seed(seed)
        async with relay_to(address) as reconnecting:
            await reconnecting.connection(10)
            await (await reconnecting.another(10)).close()
        async with pipelined_admin(url, "test") as pipelined:
            assert not await pipelined.exists("nowhere")
        async with await Admin.connect(url) as admin:
            assert not await admin.queue_exists("nowhere")


async def test_a_lost_connection_is_opened_elsewhere(place: Place) -> None:
    """With the login of now, also for the connections of the isolation."""
    async with Proxy(place.broker.port) as one, Proxy(place.broker.port) as two:
        user = "to be renamed"
        place.broker.add_user(user, "first", vhost=place.address.vhost, configure="", write="", read="")
        password = ["first"]

        def both() -> list[Address]:
            return [replace(place.behind(proxy), user=user, password=password[0]) for proxy in (one, two)]

        reconnecting = ReconnectingConnection(both, "reconnecting test", heartbeat=20)
        reconnecting.start()
        first = await reconnecting.connection(10)
        used, other = (one, two) if one.accepted else (two, one)
        used.stall()
        used.cut()
        await asyncio.wait({first.closed})
        await asyncio.sleep(0)
        await reconnecting.connection(10)
        assert (used.accepted, other.accepted) == (1, 1)
        place.broker.add_user(user, "second", vhost=place.address.vhost, configure="", write="", read="")
        password[0] = "second"
        await (await reconnecting.another(10)).close()
        assert (used.accepted, other.accepted) == (1, 2)
        await reconnecting.close()


async def test_an_address_that_refuses_is_logged_once_although_another_works(place: Place) -> None:
    other = replace(place.address, password="wrong")
    throttle = LogThrottle()
    with capture_logs() as logs:
        for seed in range(12):  # Each starts at one of the two.
            random.seed(seed)
            reconnecting = ReconnectingConnection(
                lambda: [other, place.address], "reconnecting test", heartbeat=20, throttle=throttle
            )
            reconnecting.start()
            await reconnecting.connection(10)
            await reconnecting.close()
    (refused,) = [one for one in logs if one["event"] == "broker refused"]
    assert refused["next_step"]
    assert not [one for one in logs if one["event"] == "broker unreachable"]


async def test_a_broker_that_closes_each_connection_is_asked_after_a_pause(place: Place) -> None:
    """After each connection that closes immediately, the next is delayed, longer each time up to a bound."""
    async with Proxy(place.broker.port) as proxy, relay_to(place.behind(proxy)) as reconnecting:
        loop = asyncio.get_running_loop()
        began = loop.time()
        for _ in range(4):
            connection = await reconnecting.connection(10)
            proxy.cut()
            await asyncio.wait({connection.closed})
            await asyncio.sleep(0)
        await reconnecting.connection(10)
        assert loop.time() - began >= 0.1 + 0.2 + 0.4 + 0.4
