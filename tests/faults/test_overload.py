"""More load than the store can handle, a broker that accepts nothing, a dead store: the daemon continues all possible
work. The rest waits in a safe place, and afterwards the daemon recovers by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import unquote

import aio_pika
import psutil
import pytest

from delayer.amqp.address import Address
from delayer.amqp.connection import Connection
from delayer.store.admin.stats import overview
from tests.soak.result import LARGEST_MB
from tests.support.daemon import DaemonProcess
from tests.support.ledger import Ledger
from tests.support.place import Place, eventually
from tests.support.proxy import Proxy
from tests.support.raw import Message, Props, Raw, number
from tests.support.servers import Postgres, RabbitMQ

SEED = 7_000
GROWN_MB = 120
"""The most memory that load may add to a daemon: its prefetch, a few batches, and the interpreter's reserve."""
FACTOR = 10
"""How many times more is sent than the store can take, over the whole overload."""
TAKEN_AT_MOST = 100_000
"""Bytes a second at first; the test lowers it while the store takes more than a tenth of the messages."""
DEEP = 10_000
"""The least depth of the queue: twice the prefetch."""
FULL = 0.9
"""The part of the rate before the overload that one pass must reach afterwards. That rate is the slowest of three."""
GIVEN_BACK_SECONDS = 45.0
"""Far less than the 30 minutes after which RabbitMQ closes the channel of a slow consumer."""
CONSUMER_TIMEOUT = 60.0
"""The same limit of the test's broker in seconds: the shortest that the deadlines of the store allow."""
TICK_MS = 1_000
"""Milliseconds between two checks of its channels for old deliveries."""
TOO_OLD = "delivery acknowledgement on channel"
"""The broker's log line when it closes a consumer's channel for that; it logs nothing when it cancels a consumer."""


SLOW_PUBLISHES = 40_000
"""Bytes a second of a slow broker: these messages take over a minute, and the largest takes less than 8 s."""
SLOW = 700_000
"""Bytes a second of a slow store, each way."""
SLOW_SECONDS = 75.0


def destination(rabbitmq: RabbitMQ, vhost: str) -> None:
    """Queue ``out``, for everything published to delayer.out."""
    rabbitmq.api("PUT", f"/api/exchanges/{vhost}/delayer.out", {"type": "topic", "durable": True})
    rabbitmq.api("PUT", f"/api/queues/{vhost}/out", {"durable": True})
    rabbitmq.api("POST", f"/api/bindings/{vhost}/e/delayer.out/q/out", {"routing_key": "#"})


async def published(raw: Raw, bodies: Sequence[bytes]) -> None:
    """Publish each, due in a second, twenty at a time."""
    props = Props(headers=((b"x-delay", number("I", 1_000)),), delivery_mode=2)
    for begin in range(0, len(bodies), 20):
        await raw.publish(*(Message("delayer.in", b"k", props, body) for body in bodies[begin : begin + 20]))


def via(server: RabbitMQ | Postgres, url: str, proxy: Proxy) -> str:
    """The same URL, through a proxy."""
    name = unquote(url.rpartition("/")[2])
    return server.url(name, port=proxy.port)


def megabytes(daemon: DaemonProcess) -> float:
    return float(psutil.Process(daemon.pid).memory_info().rss / 1e6)


@pytest.mark.deadline(120)
async def test_a_blocked_broker_stops_releasing_not_parking(postgres: Postgres, store: str) -> None:
    """Even if half of the messages are due immediately: they also wait in the store, and do not block other
    messages."""
    async with AsyncExitStack() as stack:
        rabbitmq = RabbitMQ()
        stack.callback(rabbitmq.close)
        await asyncio.to_thread(rabbitmq.start)
        place = await Place("store", rabbitmq.url(rabbitmq.add_vhost()), store).declare()
        ledger = await stack.enter_async_context(place.ledger(SEED))
        daemon = await stack.enter_async_context(place.working())
        await ledger.publish(100, longest_ms=500)
        await ledger.all_back()
        await daemon.stop()
        for delay_ms in (0, 5_000) * 5:
            await ledger.publish(500, delay_ms=delay_ms)
        await asyncio.to_thread(rabbitmq.ctl, "set_vm_memory_high_watermark", "0.0000001")
        daemon = await stack.enter_async_context(place.working())
        await eventually(place.rows, lambda rows: rows == 5_000)
        assert ledger.total() == 100, "released while the broker takes nothing"
        assert "memory" in (await daemon.event("broker blocked"))["reason"]
        await asyncio.to_thread(rabbitmq.ctl, "set_vm_memory_high_watermark", "0.4")
        await daemon.event("broker unblocked")
        await place.ended(ledger, repeats=True)


@pytest.mark.deadline(150)
async def test_a_slow_broker_stops_releasing_not_parking(
    rabbitmq: RabbitMQ, postgres: Postgres, vhost: str, store: str
) -> None:
    """The link carries few publishes, so due messages wait in the store while the daemon parks every new message. All
    go out when the link is fast again."""
    async with Proxy(rabbitmq.port) as proxy, AsyncExitStack() as stack:
        place = await Place("store", vhost, store, via_broker=via(rabbitmq, vhost, proxy)).declare()
        ledger = await stack.enter_async_context(place.ledger(SEED + 3))
        daemon = await stack.enter_async_context(place.working())
        await ledger.publish(100, longest_ms=500)
        await ledger.all_back()
        before, parked_before = megabytes(daemon), await parked(place)
        proxy.slow(bytes_per_second=SLOW_PUBLISHES, to_client=False)
        # So far ahead that no message is due at its reading, on a busy machine too: due messages are not parked.
        await ledger.publish(8_000, delay_ms=4_000)
        await eventually(lambda: parked(place), lambda count: count == parked_before + 8_000, timeout=60)
        released = ledger.account.back - 100
        print(f"all parked, {released} released; {before:.0f} → {megabytes(daemon):.0f} MB")
        assert released < 4_000, "the broker was not slow"
        assert await place.depth("delays") == 0
        assert megabytes(daemon) - before < GROWN_MB
        proxy.resume()
        await place.ended(ledger, repeats=True)


async def passing(ledger: Ledger, count: int) -> float:
    """Messages a second, from the first publish to the last arrival."""
    began = time.monotonic()
    await ledger.publish(count, delay_ms=500)
    await ledger.all_back(timeout=120)
    return count / (time.monotonic() - began)


async def parked(place: Place) -> int:
    """Messages that the store ever took."""
    assert place.store
    return (await overview(place.store)).counters["parked"]


@pytest.mark.deadline(900)
@pytest.mark.parametrize("seconds", [6.0, pytest.param(60.0, marks=pytest.mark.long)])
async def test_ten_times_more_than_the_store_can_take(
    seconds: float, rabbitmq: RabbitMQ, postgres: Postgres, vhost: str, store: str
) -> None:
    """The store takes a tenth of the sent messages for at least ``seconds``; then it is fast again."""
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(Proxy(postgres.port))
        place = await Place("store", vhost, store, via_store=via(postgres, store, proxy)).declare()
        ledger = await stack.enter_async_context(place.ledger(SEED + 1))
        daemon = await stack.enter_async_context(place.working())
        await overloaded(seconds, place, proxy, ledger, daemon)
        await place.ended(ledger, repeats=True)


async def overloaded(seconds: float, place: Place, proxy: Proxy, ledger: Ledger, daemon: DaemonProcess) -> None:
    usual = min([await passing(ledger, 10_000) for _ in range(3)])
    before = megabytes(daemon)
    pace = TAKEN_AT_MOST
    proxy.slow(bytes_per_second=pace)
    until = time.monotonic() + seconds
    largest, deepest = before, 0
    sent_before, taken_before = ledger.account.sent, await parked(place)
    sent = taken = 0
    while time.monotonic() < until or deepest < DEEP or sent < FACTOR * taken:
        await ledger.publish(5_000, delay_ms=500)
        largest, deepest = max(largest, megabytes(daemon)), max(deepest, await place.depth("delays"))
        sent, taken = ledger.account.sent - sent_before, await parked(place) - taken_before
        if sent < FACTOR * taken:
            pace = max(1_000, pace // 2)
            proxy.slow(bytes_per_second=pace)
    waiting = ledger.account.sent - ledger.account.back
    share = waiting / ledger.account.sent
    proxy.resume()
    began = time.monotonic()
    await ledger.all_back(timeout=None)  # but for the deadline of the test
    recovered = waiting / (time.monotonic() - began)
    print(
        f"{sent} sent and {taken} taken ({sent / max(1, taken):.0f} times, at {pace} bytes/s); {waiting} waiting "
        f"({share:.0%}), {deepest} in the queue; daemon {before:.0f} → {largest:.0f} MB, afterwards "
        f"{megabytes(daemon):.0f} MB; {usual:.0f}/s before, {recovered:.0f}/s afterwards"
    )
    assert sent >= FACTOR * taken
    assert largest - before < GROWN_MB, f"{before:.0f} → {largest:.0f} MB"
    assert largest < LARGEST_MB
    # Try until the machine is as free as before.
    full = await eventually(lambda: passing(ledger, 10_000), lambda rate: rate >= FULL * usual, timeout=120)
    print(f"at full rate again: {full:.0f}/s, and {usual:.0f}/s before")


@pytest.mark.deadline(120)
@pytest.mark.parametrize("store_is", ["dead", pytest.param("silent", marks=pytest.mark.long)])
async def test_a_lost_store_gives_deliveries_back(
    store_is: str, rabbitmq: RabbitMQ, postgres: Postgres, vhost: str, store: str
) -> None:
    """All prefetched messages go back to the queue, and the daemon reads none until the store is back."""
    async with Proxy(postgres.port) as proxy, AsyncExitStack() as stack:
        place = await Place("store", vhost, store, via_store=via(postgres, store, proxy)).declare()
        ledger = await stack.enter_async_context(place.ledger(SEED + 2))
        await stack.enter_async_context(place.working())
        await ledger.publish(100, longest_ms=500)
        await ledger.all_back()
        proxy.slow(bytes_per_second=20_000)  # so that it dies with messages in flight
        await ledger.publish(8_000, delay_ms=15_000)
        await eventually(lambda: place.depth("delays"), lambda depth: depth < 6_000)
        if store_is == "dead":
            await proxy.refuse()
        else:
            proxy.stall()
        began = time.monotonic()

        async def in_its_place() -> int:
            return await place.rows() + await place.depth("delays")

        await eventually(in_its_place, lambda count: count >= 8_000, timeout=GIVEN_BACK_SECONDS)
        print(f"the store is {store_is}: all given back after {time.monotonic() - began:.1f} s")
        proxy.resume()
        await proxy.accept()
        await place.ended(ledger, repeats=True)


async def large_scene(
    stack: AsyncExitStack, rabbitmq: RabbitMQ, postgres: Postgres, store: str, **more: str
) -> tuple[Place, DaemonProcess, Proxy, Raw]:
    """A daemon with a proxy in front of its store, in its own vhost with a destination."""
    vhost = rabbitmq.add_vhost()
    stack.callback(rabbitmq.drop_vhost, vhost)
    proxy = await stack.enter_async_context(Proxy(postgres.port))
    place = await Place("store", rabbitmq.url(vhost), store, via_store=via(postgres, store, proxy)).declare()
    destination(rabbitmq, vhost)
    daemon = await stack.enter_async_context(place.working(**more))
    return place, daemon, proxy, await stack.enter_async_context(await Raw.connect(place.broker))


@pytest.mark.long
@pytest.mark.deadline(300)
async def test_large_messages_into_a_slow_store_are_delivered_once(
    rabbitmq: RabbitMQ, postgres: Postgres, store: str
) -> None:
    """More bytes than the daemon keeps, for longer than the broker tolerates a connection that reads nothing (30 s).
    The daemon lowers its prefetch and keeps the connection, and nothing is repeated."""
    bodies = [b"%06d" % n + bytes(500_000) for n in range(300)]
    async with AsyncExitStack() as stack:
        place, daemon, proxy, raw = await large_scene(stack, rabbitmq, postgres, store)
        inbox = await raw.inbox("out")
        before = megabytes(daemon)
        proxy.slow(bytes_per_second=SLOW)
        await published(raw, bodies)
        largest = before

        async def long_enough() -> bool:
            nonlocal largest
            largest = max(largest, megabytes(daemon))
            return time.monotonic() > until

        until = time.monotonic() + SLOW_SECONDS
        await eventually(long_enough, bool, timeout=2 * SLOW_SECONDS)
        proxy.resume()
        await inbox.got(bodies, timeout=120)
        assert await daemon.stop() == 0, daemon.tail()
        assert not await place.standing()
    told = [event for event in daemon.events if event["event"] in ("deliveries given back", "broker connection lost")]
    print(f"{len(inbox.arrivals)} arrivals of {len(bodies)}; {before:.0f} → {largest:.0f} MB; {told}")
    assert {event["event"] for event in told} <= {"deliveries given back"}, "the connection is kept"
    assert len(inbox.arrivals) == len(bodies)
    assert largest - before < GROWN_MB


@asynccontextmanager
async def impatient_broker() -> AsyncIterator[RabbitMQ]:
    """A broker with a short consumer timeout."""
    rabbitmq = RabbitMQ(config={"consumer_timeout": int(CONSUMER_TIMEOUT * 1000)})
    try:
        await asyncio.to_thread(rabbitmq.start)
        await asyncio.to_thread(rabbitmq.ctl, "eval", f"application:set_env(rabbit, channel_tick_interval, {TICK_MS}).")
        yield rabbitmq
    finally:
        await asyncio.to_thread(rabbitmq.close)


@asynccontextmanager
async def sleeper(url: str) -> AsyncIterator[asyncio.Event]:
    """A consumer that acknowledges nothing; set when the broker has ended it, or its channel."""
    ended = asyncio.Event()
    connection = await Connection.open(Address.parse(url), name="sleeper")
    try:
        async with await aio_pika.connect(url) as other:
            channel = await other.channel()
            queue = await channel.declare_queue("sleeper", durable=True, arguments={"x-queue-type": "quorum"})
            await channel.default_exchange.publish(aio_pika.Message(b"zzz"), queue.name)
        sleeping = await connection.channel()
        sleeping.closed.add_done_callback(lambda _: ended.set())
        await sleeping.consume("sleeper", lambda _: None, ended.set)
        yield ended
    finally:
        await connection.close()


@pytest.mark.long
@pytest.mark.deadline(400)
@pytest.mark.parametrize("store_is", ["slow", "hung"])
async def test_no_delivery_stays_unacknowledged_until_the_consumer_timeout(
    store_is: str, postgres: Postgres, store: str
) -> None:
    """A slow store would make prefetched messages wait for minutes, and a hung store never answers. In both cases the
    daemon gives them back in time, and nothing is lost."""
    bodies = [b"%06d" % n + bytes(500_000) for n in range(300)]
    async with AsyncExitStack() as stack:
        rabbitmq = await stack.enter_async_context(impatient_broker())
        place, daemon, proxy, raw = await large_scene(stack, rabbitmq, postgres, store, INTAKE__GIVE_BACK_AFTER="10s")
        ended = await stack.enter_async_context(sleeper(place.broker))
        inbox = await raw.inbox("out")
        if store_is == "slow":
            proxy.slow(bytes_per_second=SLOW)
        else:
            proxy.stall()
        await published(raw, bodies)
        await eventually(ended.is_set, timeout=CONSUMER_TIMEOUT + 90)
        proxy.resume()
        await inbox.got(bodies, timeout=150)
        assert await daemon.stop() == 0, daemon.tail()
        closed = [line for line in rabbitmq.log().splitlines() if TOO_OLD in line]
        cancelled = [event for event in daemon.events if event.get("cause") == "ConsumerCancelled"]
        rows = {(one.delivery.body[:6], one.props.one(b"x-delayer-id")) for one in inbox.arrivals}
        print(
            f"{store_is}: {len(closed)} consumers closed, {len(bodies)} messages, {len(inbox.arrivals)} arrivals, "
            f"{len(inbox.arrivals) - len(rows)} of them again at release, {len(rows) - len(bodies)} at intake"
        )
        ways = ("deliveries given back", "consuming interrupted")  # After a silence, or because a park failed.
        given_back = [event for event in daemon.events if event["event"] in ways]
        assert len(closed) == (0 if rabbitmq.cancels_slow_consumers else 1), f"not only the sleeper's: {closed}"
        assert not cancelled
        assert given_back, "large messages were kept back while nothing could be carried on"
