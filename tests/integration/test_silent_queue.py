"""Queues that neither confirm nor refuse: no other queue waits for them, and they get their messages later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count

import aio_pika
import pytest

from delayer.amqp.address import Address
from delayer.amqp.errors import BrokerLost
from delayer.amqp.values import CONFIRMED, Outgoing
from delayer.broker.connection import ReconnectingConnection
from delayer.broker.isolation import Isolation
from delayer.broker.publisher import AmqpPublisher
from delayer.core.hold import HoldKind, Outcome, unanswered
from tests.conformance.broker_world import AdminHand, codes, message, relay_to
from tests.support.fakes import kind_of
from tests.support.place import eventually
from tests.support.servers import RabbitMQ
from tests.support.silent import silent

WAIT = 4.0
"""Seconds that these publishers wait for confirms."""
KINDS = (pytest.param("classic", marks=pytest.mark.long), "quorum")
OTHER_KINDS = ("classic", pytest.param("quorum", marks=pytest.mark.long))


class Scene:
    """Queues ``good`` and ``bad``, bound to the exchange ``x`` with any key that begins with their name."""

    def __init__(self, vhost: str, reconnecting: ReconnectingConnection, isolation: Isolation, hand: AdminHand) -> None:
        self.vhost = vhost
        self.reconnecting = reconnecting
        self.isolation = isolation
        self.hand = hand

    def publisher(self) -> AmqpPublisher:
        return AmqpPublisher(self.reconnecting, isolation=self.isolation, confirm_timeout=WAIT)


@asynccontextmanager
async def scene(rabbitmq: RabbitMQ, url: str, kind: str) -> AsyncIterator[Scene]:
    address = Address.parse(url)
    async with (
        await aio_pika.connect(url) as connection,
        await connection.channel() as channel,
        relay_to(address) as reconnecting,
    ):
        hand = AdminHand(rabbitmq, address.vhost, channel)
        await hand.exchange("x", kind="topic")
        for name in ("good", "bad"):
            await hand.queue(name, {"x-queue-type": kind})
            await hand.bind(name, "x", f"{name}.#")
        await reconnecting.connection(30)
        yield Scene(address.vhost, reconnecting, Isolation(reconnecting, timeout=WAIT, probe_seconds=1.0), hand)


async def until_settled(publisher: AmqpPublisher, batch: Sequence[Outgoing]) -> tuple[list[Outcome], int]:
    """Publish like a lane, which repeats all after an interruption. The outcomes, and the number of interruptions."""
    for interruptions in range(20):
        try:
            return await publisher.publish(batch), interruptions
        except BrokerLost:
            await asyncio.sleep(0.3)  # a lane pauses too before it begins again
    raise AssertionError("interrupted again and again")


def mixed(count: int, stuck: Sequence[int], key: Callable[[int], str] = lambda _: "") -> list[Outgoing]:
    return [message(n, f"{'bad' if n in stuck else 'good'}{key(n)}", "x") for n in range(count)]


def stuck_of(outcomes: Sequence[Outcome]) -> list[int]:
    """The indexes of messages without an answer; the rest must be confirmed."""
    silent = [index for index, outcome in enumerate(outcomes) if kind_of(outcome) is HoldKind.UNANSWERED]
    assert [outcome for outcome in outcomes if kind_of(outcome) is not HoldKind.UNANSWERED] == [CONFIRMED] * (
        len(outcomes) - len(silent)
    )
    return silent


def seen(scene: Scene, queue: str, found: list[bytes]) -> Callable[[], Awaitable[int]]:
    """A function that adds arrivals to ``found``, and returns their total."""

    async def look() -> int:
        found.extend(await scene.hand.drain(queue))
        return len(found)

    return look


@pytest.mark.parametrize("kind", KINDS)
async def test_a_silent_queue_in_a_batch_does_not_delay_other_queues(kind: str, rabbitmq: RabbitMQ, vhost: str) -> None:
    """The first batch has every outcome in time, and with classic queues no copies. Later batches do not wait."""
    async with scene(rabbitmq, vhost, kind) as it:
        publisher, batch = it.publisher(), mixed(100, [50])
        assert await publisher.publish([message("first", "good", "x")]) == [CONFIRMED]
        async with silent(rabbitmq, it.vhost, "bad"):
            other = it.publisher()
            beside = asyncio.create_task(steady(other))
            outcomes = await publisher.publish(batch)
            assert stuck_of(outcomes) == [50]
            assert outcomes[50] == unanswered(WAIT, b"x", b"bad")
            more = [message(n, "bad" if n % 10 == 0 else "good", "x") for n in range(1000, 1100)]
            loop = asyncio.get_running_loop()
            began = loop.time()
            assert len(stuck_of(await publisher.publish(more))) == 10
            assert stuck_of(await other.publish([batch[50], message("good one", "good", "x")])) == [0]
            assert loop.time() - began < WAIT / 4
            beside.cancel()
        if kind == "classic":
            good = [body for body in await it.hand.drain("good") if not body.startswith(b"steady")]
            assert len(good) == len(set(good)) == 1 + 99 + 90 + 1


async def steady(publisher: AmqpPublisher) -> None:
    """Keep publishing good messages, so that the broker keeps answering."""
    for n in count():
        await publisher.publish([message(f"steady {n}", "good", "x")])
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("kind", OTHER_KINDS)
async def test_a_silent_queue_gets_its_messages_when_it_answers(kind: str, rabbitmq: RabbitMQ, vhost: str) -> None:
    """Its breaker is half-open after a pause; then one message is published, and the rest follow."""
    async with scene(rabbitmq, vhost, kind) as it:
        publisher, batch = it.publisher(), [message(n, "bad", "x") for n in range(3)]
        async with silent(rabbitmq, it.vhost, "bad"):
            assert stuck_of(await publisher.publish([*batch, message("good", "good", "x")])) == [0, 1, 2]

        async def tried() -> list[Outcome]:
            return await publisher.publish(batch)

        await eventually(tried, lambda outcomes: outcomes == [CONFIRMED] * 3)
        found: list[bytes] = []
        await eventually(seen(it, "bad", found), lambda count: count >= 3)
        assert {b"0", b"1", b"2"} == set(found)


@pytest.mark.long
async def test_ever_new_keys_of_a_silent_queue_do_not_delay_good_messages(rabbitmq: RabbitMQ, vhost: str) -> None:
    """After some such keys the isolation probes the whole exchange: good messages pass, bad ones cost little time."""
    async with scene(rabbitmq, vhost, "classic") as it:
        publisher = it.publisher()
        async with silent(rabbitmq, it.vhost, "bad"):
            batch = mixed(300, [10, 100, 200, 250], lambda n: f".{n}")
            outcomes, _ = await until_settled(publisher, batch)
            assert stuck_of(outcomes) == [10, 100, 200, 250]
            loop = asyncio.get_running_loop()
            for turn in range(1, 4):
                began = loop.time()
                batch = mixed(200, [3, 7], lambda n, turn=turn: f".{turn}.{n}")  # type: ignore[misc]
                batch = [one._replace(token=b"%d.%b" % (turn, one.token)) for one in batch]
                assert stuck_of(await publisher.publish(batch)) == [3, 7]
                assert loop.time() - began < WAIT


@asynccontextmanager
async def few_channels(rabbitmq: RabbitMQ, most: int) -> AsyncIterator[None]:
    """Connections opened in this context have at most ``most`` channels."""
    rabbitmq.ctl("eval", f"application:set_env(rabbit, channel_max, {most}).")
    try:
        yield
    finally:
        rabbitmq.ctl("eval", "application:set_env(rabbit, channel_max, 2047).")


@pytest.mark.long
@pytest.mark.parametrize(("channels", "apart"), [(12, True), (24, False)], ids=["a second connection", "one for all"])
async def test_more_probes_than_channels_do_not_end_a_connection(
    rabbitmq: RabbitMQ, vhost: str, channels: int, apart: bool
) -> None:
    """Probes without a free channel get their verdict in a later round, and no connection is closed. The same is true
    if the broker does not allow a second connection, and the probes use the publishers'."""
    async with few_channels(rabbitmq, channels), scene(rabbitmq, vhost, "classic") as it:
        if not apart:
            await it.hand.limit_connections(2)  # the publishers' and ours
            with pytest.raises(BrokerLost):
                await it.reconnecting.another(2)
        publisher, bad = it.publisher(), range(0, 45, 3)
        batch = mixed(45, bad, lambda n: f".{n}")
        async with silent(rabbitmq, it.vhost, "bad"):
            for turn in range(20):
                try:  # with a newly due message, whose confirm shows that the broker answers
                    outcomes = await publisher.publish([*batch, message(100 + turn, "good", "x")])
                except BrokerLost:
                    await asyncio.sleep(0.3)  # a lane pauses too before it begins again
                    continue
                break
            assert stuck_of(outcomes) == list(bad)
            assert it.reconnecting.connects == 1


@pytest.mark.long
async def test_a_silent_queue_without_other_publishes(rabbitmq: RabbitMQ, vhost: str) -> None:
    """The message is held after its first probe, because the broker answers."""
    async with scene(rabbitmq, vhost, "classic") as it, silent(rabbitmq, it.vhost, "bad"):
        outcomes, interruptions = await until_settled(it.publisher(), [message("one", "bad", "x")])
        assert stuck_of(outcomes) == [0]
        assert interruptions == 0


@pytest.mark.long
async def test_errors_of_the_broker_are_reported_even_with_a_silent_queue(rabbitmq: RabbitMQ, vhost: str) -> None:
    """A probed message may have no route, or its exchange may be gone."""
    async with scene(rabbitmq, vhost, "classic") as it:
        await it.hand.exchange("gone", kind="fanout")
        await it.hand.bind("bad", "gone", "")
        publisher = it.publisher()
        batch = [message(1, "bad", "x"), message(2, "k", "gone"), message(3, "good", "x")]
        async with silent(rabbitmq, it.vhost, "bad"):
            outcomes, _ = await until_settled(publisher, batch)
            assert stuck_of(outcomes) == [0, 1]
            await it.hand.delete_exchange("gone")

            async def tried() -> list[Outcome]:
                return (await until_settled(publisher, batch))[0]

            outcomes = await eventually(tried, lambda now: kind_of(now[1]) is not HoldKind.UNANSWERED)
            assert kind_of(outcomes[0]) is HoldKind.UNANSWERED
            assert kind_of(outcomes[1]) is HoldKind.CLOSED_CHANNEL
            assert codes(outcomes[1:2]) == [404]
            assert outcomes[2] is CONFIRMED


@pytest.mark.long
async def test_a_channel_that_waits_until_its_connection_is_not_read(rabbitmq: RabbitMQ, vhost: str) -> None:
    """With thousands of publishes behind one for a quorum queue, the broker stops reading that connection. A new
    connection replaces it, and all good messages get through."""
    async with scene(rabbitmq, vhost, "quorum") as it:
        publisher, batch = it.publisher(), mixed(3000, [0, 1, 2])
        async with silent(rabbitmq, it.vhost, "bad"):
            outcomes, _ = await until_settled(publisher, batch)
            assert stuck_of(outcomes) == [0, 1, 2]
            found = set(await it.hand.drain("good"))
            assert found == {one.body for one in batch[3:]}
