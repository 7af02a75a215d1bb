"""The publisher and the consumer over a real broker behind a proxy: the contracts of their ports, and reconnecting."""

from __future__ import annotations

import asyncio
import math
import struct
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import quote

import aio_pika
import pytest

from delayer.amqp.address import Address
from delayer.amqp.connection import Connection
from delayer.amqp.edits import ID
from delayer.amqp.errors import AccessRefused
from delayer.amqp.properties import encode_headers, entry, long_string
from delayer.broker.connection import ReconnectingConnection
from delayer.broker.consumer import ENOUGH, AmqpConsumer, AmqpSubscription, Fitting, Inflow
from delayer.broker.publisher import BATCH, AmqpPublisher
from delayer.core.counters import Counters
from delayer.core.errors import BrokerLost, LaneLost
from delayer.core.message import CONFIRMED, ClosedChannel, ClosedConnection, Delivery, Outcome, Outgoing
from delayer.release.loop import Release
from tests.conformance.broker_contract import BrokerContract
from tests.conformance.broker_world import BOUND, GATHER, Objection, World, bodies, message, publish_all, take
from tests.faults.place import eventually
from tests.support.fakes import Heartbeat, ScriptedLane, ScriptedLive, due
from tests.support.proxy import Proxy
from tests.support.servers import RabbitMQ

USER = "reconnecting-test"
A_READ = 256_000
"""Bytes that uvloop takes from a socket at once, at most."""


NO_REPLIES = ("garbage", "g2EF.k", "g1h2AA==.x", "!!.x")


async def _connects(reconnecting: ReconnectingConnection) -> int:
    return reconnecting.connects


def poisonous(token: object) -> Outgoing:
    """With a number that Erlang does not have. No publisher gets it through a broker, but an import may bring it."""
    one = message(token, "q")
    headers = entry(ID, long_string(one.token)) + entry(b"rate", b"d" + struct.pack(">d", math.nan))
    return one._replace(properties=encode_headers(headers))


async def take_acked(subscription: AmqpSubscription, count: int) -> list[Delivery]:
    """Exactly that many, each acknowledged, or few would ever be here."""
    found: list[Delivery] = []
    while len(found) < count:
        batch = await subscription.next_batch(count - len(found), GATHER)
        if batch:
            subscription.ack(batch[-1].tag, multiple=True)
        found += batch
    return found


class AdminHand:
    """An operator, with aio-pika and the management API."""

    def __init__(self, broker: RabbitMQ, vhost: str, channel: aio_pika.abc.AbstractChannel) -> None:
        self._broker = broker
        self._vhost = vhost
        self._channel = channel

    async def queue(self, name: str, arguments: Mapping[str, int | str] | None = None) -> None:
        await self._channel.declare_queue(name, durable=True, arguments=dict(arguments or {}))

    async def exchange(self, name: str, *, kind: str = "direct", internal: bool = False) -> None:
        await self._channel.declare_exchange(name, kind, durable=True, internal=internal)

    async def bind(self, queue: str, exchange: str, key: str) -> None:
        bound = await self._channel.get_queue(queue, ensure=False)
        await bound.bind(exchange, key)

    async def delete_exchange(self, name: str) -> None:
        await self._channel.exchange_delete(name)

    async def delete_queue(self, name: str) -> None:
        await self._channel.queue_delete(name)

    async def drain(self, queue: str) -> list[bytes]:
        found = await self._channel.get_queue(queue, ensure=False)
        taken = []
        while (one := await found.get(no_ack=True, fail=False)) is not None:
            taken.append(one.body)
        return taken

    async def forbid(self, *, write: str = ".*", topic: tuple[str, str] | None = None) -> None:
        at = f"{quote(self._vhost, safe='')}/{USER}"
        permissions = {"configure": ".*", "write": write, "read": ".*"}
        await asyncio.to_thread(self._broker.api, "PUT", f"/api/permissions/{at}", permissions)
        if topic is not None:
            rule = {"exchange": topic[0], "write": topic[1], "read": ".*"}
            await asyncio.to_thread(self._broker.api, "PUT", f"/api/topic-permissions/{at}", rule)

    async def alarm(self, on: bool) -> None:
        await asyncio.to_thread(self._broker.ctl, "set_vm_memory_high_watermark", "0.0000001" if on else "0.4")


@asynccontextmanager
async def relay_to(address: Address) -> AsyncIterator[ReconnectingConnection]:
    reconnecting = ReconnectingConnection(address, "reconnecting test", heartbeat=20, timeout=BOUND)
    reconnecting.start()
    try:
        yield reconnecting
    finally:
        await reconnecting.close()


class TestRelay(BrokerContract):
    @pytest.fixture
    def place(self, rabbitmq: RabbitMQ, vhost: str) -> str:
        self._broker = rabbitmq
        self._vhost = Address.parse(vhost).vhost
        rabbitmq.add_user(USER, "secret", vhost=self._vhost, configure=".*", write=".*", read=".*")
        return vhost

    @asynccontextmanager
    async def world(self, place: str) -> AsyncIterator[World]:
        async with (
            Proxy(self._broker.port) as proxy,
            await aio_pika.connect(place) as connection,
            await connection.channel() as channel,
        ):
            url = self._broker.url(self._vhost, port=proxy.port, user=f"{USER}:secret")
            address = Address.parse(url)
            async with relay_to(address) as publishing, relay_to(address) as consuming:
                await asyncio.gather(publishing.connection(30), consuming.connection(30))
                yield World(
                    AmqpPublisher(publishing, confirm_timeout=BOUND),
                    AmqpConsumer(consuming),
                    AdminHand(self._broker, self._vhost, channel),
                    proxy,
                )

    async def test_a_buffer_is_bounded_by_bytes(self, place: str) -> None:
        """The socket is left alone while the buffer is full; in the end everything has come."""
        size, count, bound = 1 << 18, 64, 1 << 20
        async with self.world(place) as world:
            await world.hand.queue("q")
            for n in range(count):
                assert await world.publisher.publish([message(n, "q", body=bytes((n,)) * size)]) == [CONFIRMED]
            async with relay_to(Address.parse(place)) as reconnecting:
                connection = await reconnecting.connection(30)
                consumer = AmqpConsumer(reconnecting, batch_bytes=bound // 2, buffer_bytes=bound)
                subscription = await consumer.subscribe("q", count)
                found = []
                most = 0
                while len(found) < count:
                    batch = await subscription.next_batch(count, GATHER)
                    assert sum(len(one.body) for one in batch) <= bound // 2 + size
                    most = max(most, subscription._bytes)
                    found += batch
                assert bodies(found) == [bytes((n,)) * size for n in range(count)]
                assert most <= bound + 2 * size  # one read of the socket beyond the bound
                assert connection._pulse.reading
                subscription.ack(found[-1].tag, multiple=True)
                await subscription.close()
            assert await world.hand.drain("q") == []

    async def test_stopping_with_a_full_buffer(self, place: str) -> None:
        """Nothing more is kept, the broker's answer is heard, and all of it is given back."""
        async with self.world(place) as world:
            await world.hand.queue("q")
            for n in range(32):
                await world.publisher.publish([message(n, "q", body=b"%d" % n + bytes(1 << 17))])
            async with relay_to(Address.parse(place)) as reconnecting:
                connection = await reconnecting.connection(30)
                subscription = await AmqpConsumer(reconnecting, buffer_bytes=1 << 18).subscribe("q", 32)
                first = await subscription.next_batch(1, GATHER)
                while connection._pulse.reading:
                    await asyncio.wait_for(subscription._arrived.wait(), 10)
                    subscription._arrived.clear()
                await subscription.stop_deliveries()
                assert connection._pulse.reading
                assert subscription._bytes == 0
                subscription.ack(first[0].tag, multiple=False)
                await subscription.close()
            left = await world.hand.drain("q")
            assert sorted(int(body.rstrip(b"\0")) for body in left) == list(range(1, 32))

    async def test_a_full_buffer_is_returned_and_less_is_read_ahead(
        self, place: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The connection stands, nothing of it is lost or repeated; and when the messages are small again, more is."""
        size, bound = 1 << 16, 1 << 18
        async with self.world(place) as world, relay_to(Address.parse(place)) as reconnecting:
            await world.hand.queue("q")
            await world.publisher.publish([message(n, "q", body=b"%d " % n + bytes(size)) for n in range(32)])
            reader = AmqpConsumer(reconnecting, buffer_bytes=bound, fitting=Fitting(bound))
            with monkeypatch.context() as patch:
                patch.setattr("delayer.broker.consumer.UNREAD", 0.3)
                first = await reader.subscribe("q", 32)
                assert first.prefetch == 32
                carried = await take(first, 1)
                connection = await reconnecting.connection(30)
                while not first.overrun:
                    await asyncio.wait_for(first._arrived.wait(), 10)
                    first._arrived.clear()
            # From here on nobody is too slow, however busy this machine: a second one that was would end itself too.
            assert await first.next_batch(32, GATHER) == []
            assert connection._pulse.reading
            first.ack(carried[0].tag, multiple=True)
            await first.close()
            second = await reader.subscribe("q", 32)
            # What fits, and what one read of the socket brought with it; but perhaps for the one that was taken.
            assert bound // size - 1 <= second.prefetch <= (bound + A_READ) // size
            assert connection is await reconnecting.connection(30)
            found = carried + await take_acked(second, 31)
            assert sorted(int(one.body.split()[0]) for one in found) == list(range(32))
            small = 2 * ENOUGH * second.prefetch
            await world.publisher.publish([message(n, "q") for n in range(small)])
            await take_acked(second, small)
            assert second.overrun
            await second.close()
            third = await reader.subscribe("q", 32)
            assert third.prefetch == 32
            await third.close()
            assert await world.hand.drain("q") == []

    async def test_queues_that_share_a_relay_share_its_bound(self, place: str) -> None:
        """However many they are; and one that is stopped while the others are full is heard."""
        size, count, bound, queues = 1 << 16, 5, 1 << 18, ("a", "b", "c", "d")
        async with self.world(place) as world, relay_to(Address.parse(place)) as reconnecting:
            for name in queues:
                await world.hand.queue(name)
            connection = await reconnecting.connection(30)
            reader = AmqpConsumer(reconnecting, inflow=Inflow(bound))
            subscriptions = [await reader.subscribe(name, count) for name in queues]
            for name in queues:
                await world.publisher.publish([message(n, name, body=bytes((n,)) * size) for n in range(count)])

            async def waiting() -> int:
                return 0 if connection._pulse.reading else sum(one._bytes for one in subscriptions)

            assert bound < await eventually(waiting, lambda found: found > 0) <= bound + A_READ + size
            await asyncio.wait_for(subscriptions[0].close(), 10)
            assert subscriptions[0].in_order
            found = await asyncio.gather(*(take_acked(one, count) for one in subscriptions[1:]))
            assert [bodies(some) for some in found] == [[bytes((n,)) * size for n in range(count)]] * 3
            for one in subscriptions[1:]:
                await one.close()
            assert len(await world.hand.drain("a")) == count

    async def test_two_queues_on_two_relays_do_not_hold_each_other_up(self, place: str) -> None:
        async with self.world(place) as world, relay_to(Address.parse(place)) as other:
            await world.hand.queue("large")
            await world.hand.queue("small")
            for n in range(8):
                await world.publisher.publish([message(n, "large", body=bytes(1 << 18))])
            await world.publisher.publish([message(n, "small") for n in range(100)])
            await other.connection(30)
            large = await AmqpConsumer(other, buffer_bytes=1 << 18).subscribe("large", 100)
            small = await world.consumer.subscribe("small", 100)
            assert len(await take(small, 100)) == 100
            assert isinstance(large, AmqpSubscription)
            await asyncio.gather(large.close(), small.close())

    @asynccontextmanager
    async def far_away(self, place: str, round_trip: float) -> AsyncIterator[tuple[World, ReconnectingConnection]]:
        """A broker so many seconds away, with a topic exchange that takes the key ``open`` alone."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.support.proxy._pump", partial(slow_pump, round_trip / 2))
            async with self.world(place) as world, Proxy(self._broker.port) as proxy:
                await world.hand.queue("q")
                await world.hand.exchange("news", kind="topic")
                await world.hand.bind("q", "news", "#")
                await world.hand.forbid(topic=("news", "^open$"))
                url = self._broker.url(self._vhost, port=proxy.port, user=f"{USER}:secret")
                async with relay_to(Address.parse(url)) as reconnecting:
                    await reconnecting.connection(30)
                    yield world, reconnecting

    async def test_forbidden_topics_far_away(self, place: str) -> None:
        """Every outcome is exact; after the first batch every good message comes once."""
        batch = [message(n, "closed" if n % 2 else "open", "news") for n in range(400)]
        async with self.far_away(place, 0.005) as (world, reconnecting):
            publisher = AmqpPublisher(reconnecting)
            good = [b"%d" % n for n in range(0, 400, 2)]
            for round_ in range(2):
                outcomes = await publish_all(publisher, batch)
                assert [one.code if isinstance(one, Objection) else one for one in outcomes] == [CONFIRMED, 403] * 200
                there = await world.hand.drain("q")
                assert set(there) == set(good)
                assert round_ == 0 or there == good

    async def test_forbidden_topics_too_far_away_for_a_batch(self, place: str) -> None:
        """Where even a small batch is not through in time the next one is smaller: it ends."""
        left = [message(n, "closed" if n % 2 else "open", "news") for n in range(60)]
        outcomes, in_doubt = [], 0
        async with self.far_away(place, 0.01) as (world, reconnecting):
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
            assert [one.code if isinstance(one, Objection) else one for one in outcomes] == [CONFIRMED, 403] * 30
            assert set(await world.hand.drain("q")) == {b"%d" % n for n in range(0, 60, 2)}
        assert in_doubt < 15

    @pytest.mark.parametrize("ahead", [0, 60])
    async def test_a_message_that_ends_the_connection_is_identified(self, place: str, ahead: int) -> None:
        """Every outcome is exact. The publishers' connection is ended once, though more such messages follow."""
        good = [message(n, "q") for n in range(100)]
        batch = [*good[:ahead], poisonous(100), *good[ahead:], poisonous(101)]
        async with self.world(place) as world, relay_to(Address.parse(place)) as reconnecting:
            await world.hand.queue("q")
            publisher, beside = AmqpPublisher(reconnecting), AmqpPublisher(reconnecting)
            for one in (publisher, beside):
                assert await one.publish([message("first", "q")]) == [CONFIRMED]
            for _ in range(2):
                outcomes = await publisher.publish(batch)
                ended = {index for index, one in enumerate(outcomes) if isinstance(one, ClosedConnection)}
                assert ended == {ahead, len(batch) - 1}
                assert sum(one is CONFIRMED for one in outcomes) == len(good)
            assert await beside.publish(good) == [CONFIRMED] * len(good)
            found = Counter(await world.hand.drain("q"))
            assert found.keys() == {b"first", *(one.body for one in good)}
            copies = Counter(found[one.body] - 3 for one in good)  # two batches, and one beside them
            assert min(copies) >= 0
            assert max(copies) <= 10
            assert copies[0] + copies[1] + copies[2] >= 80
            await eventually(lambda: _connects(reconnecting), lambda connects: connects == 2)

    async def test_direct_replies_end_nobody_s_connection(self, place: str) -> None:
        replies = [message(f"r{n}", f"amq.rabbitmq.reply-to.{key}") for n, key in enumerate(NO_REPLIES)]
        good = [message(n, "q") for n in range(10)]
        async with self.world(place) as world, relay_to(Address.parse(place)) as reconnecting:
            await world.hand.queue("q")
            publisher = AmqpPublisher(reconnecting)
            for _ in range(2):
                outcomes = await publisher.publish([*replies, *good])
                assert outcomes[len(replies) :] == [CONFIRMED] * len(good)
                assert CONFIRMED not in outcomes[: len(replies)]
            assert reconnecting.connects == 1
            assert len(await world.hand.drain("q")) == 2 * len(good)

    async def test_isolated_messages_end_no_other_connection(self, place: str) -> None:
        """However often it is tried, and by whomever, though that one never met it."""
        async with self.world(place) as world, relay_to(Address.parse(place)) as reconnecting:
            await world.hand.queue("q")
            for round_ in range(3):
                publisher = AmqpPublisher(reconnecting)
                good = [message(f"{round_}-{n}", "q") for n in range(50)]
                ender = poisonous(f"{round_}-bad")._replace(isolated=True)
                outcomes = await publisher.publish([*good[:20], ender, *good[20:]])
                ended = outcomes.pop(20)
                assert isinstance(ended, Objection)
                assert ended.code == 541
                assert outcomes == [CONFIRMED] * len(good)
                assert publisher.batch_limit == BATCH
            assert reconnecting.connects == 1
            assert len(await world.hand.drain("q")) == 150

    async def test_without_a_second_connection(self, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The publishers' own does: every outcome is exact. A known ender is held without being tried."""
        batch = [message(0, "q"), poisonous(1), message(2, "q")]
        async with self.world(place) as world, relay_to(Address.parse(place)) as reconnecting:
            await world.hand.queue("q")
            monkeypatch.setattr(reconnecting, "another", refusing)
            publisher = AmqpPublisher(reconnecting, confirm_timeout=4.0)
            outcomes = await publisher.publish(batch)
            assert [one.code if isinstance(one, Objection) else one for one in outcomes] == [CONFIRMED, 541, CONFIRMED]
            assert set(await world.hand.drain("q")) == {b"0", b"2"}
            connects = reconnecting.connects
            assert isinstance((await publisher.publish([poisonous(3)._replace(isolated=True)]))[0], ClosedConnection)
            assert reconnecting.connects == connects

    async def test_direct_replies_share_a_connection(self, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """As long as none ends it; and the others of a batch are published though one does."""
        opened: list[str] = []
        opening = Connection.open

        async def counted(address: Address | str, *, name: str, **more: Any) -> Connection:
            opened.append(name)
            return await opening(address, name=name, **more)

        monkeypatch.setattr("delayer.broker.connection.Connection.open", counted)
        async with self.world(place) as world, relay_to(Address.parse(place)) as reconnecting:
            await world.hand.queue("q")
            publisher = AmqpPublisher(reconnecting)
            async with asking(place) as (reply_to, answers):
                for batch in range(5):
                    await publisher.publish([message(f"{batch}-{n}", reply_to) for n in range(20)])
                wanted = {b"%d-%d" % (batch, n) for batch in range(5) for n in range(20)}
                async with asyncio.timeout(10):
                    assert {await answers.get() for _ in range(100)} == wanted
                assert sum(name.endswith("isolation") for name in opened) == 1
                mixed = [message(n, reply_to) for n in range(20)]
                mixed.insert(10, message("bad", f"amq.rabbitmq.reply-to.{NO_REPLIES[1]}"))
                await publisher.publish(mixed)
                found = set()
                async with asyncio.timeout(10):
                    while len(found) < 20:
                        found.add(await answers.get())
                assert found == {b"%d" % n for n in range(20)}
            assert reconnecting.connects == 1

    async def test_a_direct_reply_arrives(self, place: str) -> None:
        async with self.world(place) as world, relay_to(Address.parse(place)) as reconnecting:
            await world.hand.queue("q")
            async with asking(place) as (reply_to, answers):
                await AmqpPublisher(reconnecting).publish([message("answer", reply_to)])
                assert await asyncio.wait_for(answers.get(), 10) == b"answer"

    async def test_a_permission_is_repaired(self, place: str) -> None:
        """The breaker is half-open after a second: the next message is tried."""
        async with self.far_away(place, 0) as (world, reconnecting):
            publisher = AmqpPublisher(reconnecting)
            for _ in range(2):
                assert isinstance((await publisher.publish([message(1, "closed", "news")]))[0], ClosedChannel)
            assert await publisher.publish([message(1, "open", "news")]) == [CONFIRMED]
            await world.hand.forbid(topic=("news", ".*"))

            async def tried() -> list[Outcome]:
                return await publisher.publish([message(2, "closed", "news")])

            await eventually(tried, lambda outcomes: outcomes == [CONFIRMED])

    async def test_lost_lanes_leave_no_channels_behind(self, place: str) -> None:
        async with self.world(place) as world, relay_to(Address.parse(place)) as reconnecting:
            await world.hand.queue("k")
            await world.hand.exchange("orders.out")
            await world.hand.bind("k", "orders.out", "k")
            connection = await reconnecting.connection(30)
            before = dict(connection.numbers.receivers)
            for number in range(5):
                lane = ScriptedLane(number, claims=[[due(1), due(2)], LaneLost("somebody else's")])
                parts = {"heartbeat": Heartbeat(), "counters": Counters()}
                await Release(lane, AmqpPublisher(reconnecting), ScriptedLive(), **parts).run(asyncio.Event())
                assert lane.events[-1] == "release"
                await all_released(connection)
                assert connection.numbers.receivers == before
            assert len(await world.hand.drain("k")) == 10

    async def test_a_publish_that_is_interrupted_leaves_no_channels_behind(self, place: str) -> None:
        """Whatever it was doing: opening a channel of its own, or waiting for a confirm."""
        async with self.far_away(place, 0.004) as (_, reconnecting):
            connection = await reconnecting.connection(30)
            before = dict(connection.numbers.receivers)
            for milliseconds in range(1, 20, 2):
                publisher = AmqpPublisher(reconnecting)
                publishing = asyncio.create_task(publisher.publish([message(n, "q") for n in range(2)]))
                await asyncio.wait([publishing], timeout=milliseconds / 1000)
                publishing.cancel()
                await asyncio.wait([publishing])
                await publisher.close()
            await all_released(connection)
            assert connection.numbers.receivers == before


@asynccontextmanager
async def asking(place: str) -> AsyncIterator[tuple[str, asyncio.Queue[bytes]]]:
    """Somebody who waits for direct replies: where to, and what comes. Asks by the queue q."""
    async with await aio_pika.connect(place) as asker, await asker.channel() as channel:
        answers: asyncio.Queue[bytes] = asyncio.Queue()
        wire = await channel.get_underlay_channel()
        await wire.basic_consume("amq.rabbitmq.reply-to", lambda one: answers.put(one.body), no_ack=True)
        question = aio_pika.Message(b"?", reply_to="amq.rabbitmq.reply-to")
        await channel.default_exchange.publish(question, "q")
        asked = await (await channel.get_queue("q", ensure=False)).get(no_ack=True)
        assert asked.reply_to is not None
        yield asked.reply_to, answers


async def refusing(_timeout: float) -> Connection:
    """In the place of ReconnectingConnection.another: a broker that lets in no second connection."""
    raise AccessRefused(530, "connection limit is reached")


async def all_released(connection: Connection) -> None:
    """Until the broker agreed to the end of every channel that we closed."""
    while connection.numbers.released:
        await asyncio.wait(connection.numbers.released.values())


async def slow_pump(delay: float, source: Any, sink: Any, flowing: asyncio.Event) -> None:
    """The proxy's pump, over a line so many seconds long."""
    loop = asyncio.get_running_loop()
    line: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def read() -> None:
        while data := await source.reader.read(1 << 16):
            line.put_nowait((loop.time() + delay, data))
        line.put_nowait((loop.time() + delay, b""))

    reading = asyncio.create_task(read())
    try:
        while True:
            arrival, data = await line.get()
            await asyncio.sleep(arrival - loop.time())
            if not data:
                return
            sink.writer.write(data)
    finally:
        reading.cancel()
        await asyncio.wait([reading])
        with suppress(OSError, asyncio.CancelledError):
            reading.result()


async def test_a_relay_that_was_never_started_is_closed() -> None:
    reconnecting = ReconnectingConnection(Address.parse("amqp://localhost/"), "reconnecting test", heartbeat=20)
    with pytest.raises(BrokerLost, match="no connection to amqp://guest@localhost"):
        await reconnecting.connection(0.01)
    await reconnecting.close()
    await reconnecting.close()


async def test_the_end_of_the_keeper_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only losses are waited out. Anything else would leave us without a connection for ever, and nobody told."""
    monkeypatch.setattr("delayer.broker.connection.Connection.open", _broken)
    async with relay_to(Address.parse("amqp://localhost/")) as reconnecting:
        with pytest.raises(BrokerLost):
            await reconnecting.connection(0.05)
        with pytest.raises(ZeroDivisionError):
            await reconnecting.connection(0.05)


async def _broken(*_: object, **__: object) -> None:
    raise ZeroDivisionError


async def test_a_broker_that_throws_us_out_is_not_asked_without_a_pause(rabbitmq: RabbitMQ, vhost: str) -> None:
    """Connections that end as soon as they stand are paused after, longer each time."""
    async with Proxy(rabbitmq.port) as proxy:
        address = Address.parse(rabbitmq.url(Address.parse(vhost).vhost, port=proxy.port))
        async with relay_to(address) as reconnecting:
            loop = asyncio.get_running_loop()
            began = loop.time()
            for _ in range(4):
                connection = await reconnecting.connection(10)
                proxy.cut()
                await asyncio.wait({connection.closed})
                await asyncio.sleep(0)
            await reconnecting.connection(10)
            assert loop.time() - began >= 0.1 + 0.2 + 0.4 + 0.8
