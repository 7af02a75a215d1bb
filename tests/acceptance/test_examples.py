"""config/examples: each is applied to a broker unchanged, and its messages are followed end to end.

Broker and store are the test's own; a message that waits a minute in an example waits seconds here.
"""

from __future__ import annotations

import asyncio
import json
import re
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aio_pika
import pytest

from delayer.broker.admin import Admin
from delayer.core.cascade import Cascade
from delayer.core.topology import Queue, Topology, arguments
from tests.acceptance.test_takeover import by_kombu, endpoints, nservicebus_message, tasks_of_celery
from tests.support.daemon import EXECUTABLE, DaemonProcess
from tests.support.place import eventually
from tests.support.raw import Arrival, Message, Props, Raw, array, now_ms, number, text, wire_instant
from tests.support.servers import RabbitMQ
from tests.support.topology import declare

EXAMPLES = Path(__file__).parents[2] / "config" / "examples"
COMING_FROM = Path(__file__).parents[2] / "docs" / "coming-from.md"
LATE_MS = 3_000
SAGA = "2d6f1c1e-6e7c-4d0b-9f6c-b2a300e5c1aa"


@dataclass
class Example:
    """One running example. ``sent``: the published messages, each with its due instant and its expected queue."""

    rabbitmq: RabbitMQ
    vhost: str
    raw: Raw
    daemon: DaemonProcess
    sent: list[tuple[Message, int, str]] = field(default_factory=list)

    async def send(self, message: Message, due_ms: int, queue: str) -> None:
        self.sent.append((message, due_ms, queue))
        await self.raw.publish(message)

    async def account(self) -> list[Arrival]:
        """Check that each message arrived once, in its queue, neither early nor late, with its body and properties."""
        queues = dict.fromkeys(queue for _, _, queue in self.sent)
        inboxes = {queue: await self.raw.inbox(queue) for queue in queues}
        for queue, inbox in inboxes.items():
            await inbox.got([message.body for message, _, to in self.sent if to == queue])
        await self.raw.round_trip()
        arrivals = []
        for message, due_ms, queue in self.sent:
            arrival = inboxes[queue].only(message.body)
            assert due_ms <= arrival.at_ms <= due_ms + LATE_MS, (message.body, arrival.at_ms - due_ms)
            assert isinstance(message.props, Props)
            left, expected = without_traces(arrival.props), edited(message.props)
            assert sorted(left.headers or ()) == sorted(expected.headers or ())
            assert replace(left, headers=None).encode() == replace(expected, headers=None).encode()
            arrivals.append(arrival)
        assert sum(len(inbox.arrivals) for inbox in inboxes.values()) == len(self.sent)
        return arrivals


@asynccontextmanager
async def example(
    name: str, rabbitmq: RabbitMQ, store: str, *, before: Any = None, **changed: Any
) -> AsyncIterator[Example]:
    """`delayer topology apply` with the file, `delayer check`, and the daemon. ``changed``: keys of the file
    with another value. ``before`` is awaited first, with the URL of the vhost."""
    file = EXAMPLES / f"{name}.toml"
    vhost = rabbitmq.add_vhost()
    environ = {"BROKER__URL": rabbitmq.url(vhost), "STORE__URL": store}
    environ |= {key: value if isinstance(value, str) else json.dumps(value) for key, value in changed.items()}
    if before is not None:
        await before(rabbitmq.url(vhost))
    for words in (("topology", "apply"), ("check",)):
        process = await asyncio.create_subprocess_exec(
            str(EXECUTABLE), "--config", str(file), *words,
            env=DaemonProcess(environ)._environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        said, _ = await process.communicate()
        assert process.returncode == 0, f"{words}: {said.decode()}"
    async with await Raw.connect(rabbitmq.url(vhost)) as raw, DaemonProcess(environ, config=file) as daemon:
        await daemon.ready()
        yield Example(rabbitmq, vhost, raw, daemon)
        assert await daemon.stop() == 0, daemon.tail()
    rabbitmq.drop_vhost(vhost)


def without_traces(props: Props) -> Props:
    """Without the headers that a broker and the daemon add."""
    return props.without(b"x-delayer-id", b"x-delayer-due", b"x-death", prefixes=(b"x-first-death-", b"x-last-death-"))


def edited(props: Props) -> Props:
    """The expected properties at the destination: the sign of x-delay is turned."""
    headers = props.headers
    if headers is not None:
        turned = {b"x-delay": lambda value: number("I", -int.from_bytes(value.raw, "big", signed=True))}
        headers = tuple((name, turned.get(name, lambda value: value)(value)) for name, value in headers)
    return replace(props, headers=headers)


def read(name: str) -> dict[str, Any]:
    return tomllib.loads((EXAMPLES / f"{name}.toml").read_text())


def pass_on(rabbitmq: RabbitMQ, vhost: str) -> None:
    """The policy that the documentation recommends for the queues of timeout managers."""
    found = re.search(r"set_policy timeouts '(.*?)' '(\{.*?\})' --apply-to queues", COMING_FROM.read_text())
    assert found is not None
    policy = {"pattern": found[1], "definition": json.loads(found[2]), "apply-to": "queues"}
    rabbitmq.api("PUT", f"/api/policies/{quote(vhost, safe='')}/timeouts", policy)


def message(exchange: str, key: str, body: bytes, *headers: tuple[bytes, Any], **more: Any) -> Message:
    props = Props(headers=headers or None, delivery_mode=2, message_id=b"id of " + body[:40], **more)
    return Message(exchange, key.encode(), props, body)


def test_every_example_is_tested_here() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.toml")}
    assert names == {"mailerq", "delayed-exchange", "nservicebus", "celery", "retry", "hybrid"}


async def test_mailerq(rabbitmq: RabbitMQ, store: str) -> None:
    async with example("mailerq", rabbitmq, store) as it:
        for key in ("outbox", "retries"):
            due_s = now_ms() // 1000 + 2
            stamped = message("mailerq", key, b"stamped " + key.encode(), timestamp=due_s)
            await it.send(stamped, due_s * 1000, "outbox")
            told = f"{datetime.fromtimestamp(due_s, UTC):%Y-%m-%d %H:%M:%S}"
            body = json.dumps({"envelope": "a@example.org", "key": key, "nextattempt": {"time": told}})
            await it.send(message("mailerq", key, body.encode()), due_s * 1000, "outbox")
            body = json.dumps({"envelope": "a@example.org", "key": key})
            await it.send(message("mailerq", key, body.encode()), now_ms(), "outbox")
        arrivals = await it.account()
        for (sent, _, _), arrival in zip(it.sent, arrivals, strict=True):
            assert arrival.delivery.routing_key == sent.routing_key
            assert arrival.delivery.exchange == b"amqpdelayer"
            assert arrival.props.timestamp == sent.props.timestamp  # type: ignore[union-attr]


async def test_delayed_exchange(rabbitmq: RabbitMQ, store: str) -> None:
    async with example("delayed-exchange", rabbitmq, store) as it:
        for key in ("eu.de", "us"):
            for delay in (0, 1, 1500):
                body = f"{key} after {delay}".encode()
                sent = message("orders", key, body, (b"x-delay", number("I", delay)))
                await it.send(sent, now_ms() + delay, f"orders.{key[:2]}")
        arrivals = await it.account()
        assert [arrival.props.one(b"x-delay") for arrival in arrivals] == [
            number("I", -delay) for _ in ("eu", "us") for delay in (0, 1, 1500)
        ]


async def test_nservicebus(rabbitmq: RabbitMQ, store: str) -> None:
    cascade = Cascade("nservicebus-v2")
    [takeover] = read("nservicebus")["takeover"]
    assert takeover == {"cascade": "nservicebus-v2", "levels_from": 6}
    managers: dict[str, dict[str, Any]] = {"Sales.Timeouts": {}, "Billing.Timeouts": {"x-queue-type": "quorum"}}

    async def endpoints_start(url: str) -> None:
        await asyncio.to_thread(pass_on, rabbitmq, url.rpartition("/")[2])
        queues = tuple(Queue(name, arguments(of)) for name, of in managers.items())
        await declare(url, endpoints(cascade), Topology(queues=queues))

    shortened = [takeover | {"levels_from": 1}]
    async with example("nservicebus", rabbitmq, store, before=endpoints_start, TAKEOVER=shortened) as it:
        for seconds in (1, 2, 3, 4):
            body = f"Billing after {seconds}"
            now = now_ms()
            await it.send(nservicebus_message(cascade, seconds, "Billing", body), now + seconds * 1000, "Billing")

        def timeout(body: bytes, due_ms: int, *headers: tuple[bytes, Any]) -> Message:
            expire = (b"NServiceBus.Timeout.Expire", text(wire_instant(due_ms)))
            to = (b"NServiceBus.Timeout.RouteExpiredTimeoutTo", text("Billing"))
            return message("delayer.timeouts", "", body, expire, to, *headers)

        # Messages to timeout managers that are turned off.
        for name in managers:
            now = now_ms()
            sent = timeout(f"to {name}".encode(), now + 3_000)
            await it.send(sent._replace(exchange="", routing_key=name.encode()), now + 3_000, "Billing")
        now = now_ms()
        of_saga = (b"NServiceBus.SagaId", text(SAGA))
        await it.send(timeout(b"timeout", now + 2_000), now + 2_000, "Billing")
        await it.send(timeout(b"of a saga", now + 2_000, of_saga), now + 2_000, "Billing")
        others = (b"NServiceBus.SagaId", text(SAGA.replace("2", "3")))
        for n in range(3):
            await it.raw.publish(timeout(b"cleared %d" % n, now + 2_500 + n, others))
        clear = (b"NServiceBus.ClearTimeouts", text("True"))
        await it.raw.publish(message("delayer.timeouts", "", b"", others, clear))
        await it.account()
        inbox = await it.raw.inbox("Billing")
        assert not await inbox.until(lambda: any(b"cleared" in one for one in inbox.counts), timeout=2.0)


async def test_celery(rabbitmq: RabbitMQ, store: str) -> None:
    pytest.importorskip("kombu")
    from kombu.transport import native_delayed_delivery as delayed

    [takeover] = read("celery")["takeover"]
    assert takeover == {"cascade": "celery", "levels_from": 6}

    async def worker_starts(url: str) -> None:
        await asyncio.to_thread(by_kombu, url, tasks_of_celery)

    shortened = [takeover | {"levels_from": 1}]
    async with example("celery", rabbitmq, store, before=worker_starts, TAKEOVER=shortened) as it:
        for seconds in (1, 2, 3, 5):
            key = delayed.calculate_routing_key(seconds, "tasks")
            due_ms = now_ms() + seconds * 1000 + 300
            eta = (b"eta", text(datetime.fromtimestamp(due_ms / 1000, UTC).isoformat()))
            # Celery cuts the rest of a second, as the level without takeover shows: workers wait for the eta.
            earliest = due_ms if seconds > 1 else due_ms - 300
            await it.send(message("celery_delayed_27", key, b"task after %d" % seconds, eta), earliest, "tasks")
        due_ms = now_ms() + 2_000
        eta = (b"eta", text(datetime.fromtimestamp(due_ms / 1000, UTC).isoformat()))
        await it.send(message("delayer.celery", "tasks", b"task by its eta", eta), due_ms, "tasks")
        await it.account()


async def test_hybrid(rabbitmq: RabbitMQ, store: str) -> None:
    assert read("hybrid")["store"]["park_beyond"] == "10m"
    async with example("hybrid", rabbitmq, store, STORE__PARK_BEYOND="2s") as it:
        for delay in (0, 1000, 2000, 3000, 4000):  # The plan uses the remaining delay.
            sent = message("delayer.in", "key", b"after %d" % delay, (b"x-delay", number("I", delay)))
            await it.send(sent, now_ms() + delay, "inbox")
        await it.account()
    [end] = [event for event in it.daemon.events if event["event"] == "stopped"]
    assert (end["cascaded"], end["parked"]) == (2, 2)


@pytest.mark.parametrize(
    ("mode", "fails"), [("store", 2), ("store", 4), pytest.param("native", 4, marks=pytest.mark.long)]
)
async def test_retry(rabbitmq: RabbitMQ, store: str, mode: str, fails: int) -> None:
    """A consumer that fails this many times; three retries are allowed."""
    [route] = read("retry")["route"]
    assert route["retry"]["attempts"] == 10
    route["retry"] |= {"first": "300ms", "attempts": 3}

    async def consumer_starts(url: str) -> None:
        async with await aio_pika.connect(url) as connection:
            channel = await connection.channel()
            queue = await channel.declare_queue(
                "orders", durable=True, arguments={"x-queue-type": "quorum", "x-dead-letter-exchange": "retries"}
            )
            shop = await channel.declare_exchange("shop", aio_pika.ExchangeType.TOPIC, durable=True)
            await queue.bind(shop, "order.#")
            audit = await channel.declare_queue("audit", durable=True, arguments={"x-queue-type": "quorum"})
            await audit.bind(shop, "audit")

    async with (
        example("retry", rabbitmq, store, before=consumer_starts, ROUTE=[route], MODE=mode) as it,
        await aio_pika.connect(rabbitmq.url(it.vhost)) as connection,
    ):
        seen: list[tuple[float, aio_pika.abc.AbstractIncomingMessage]] = []

        async def consume(one: aio_pika.abc.AbstractIncomingMessage) -> None:
            seen.append((now_ms(), one))
            await (one.reject(requeue=False) if len(seen) <= fails else one.ack())

        channel = await connection.channel()
        await (await channel.get_queue("orders")).consume(consume)
        copies = (b"CC", array(text("audit")))
        sent = message("shop", "order.new", b"an order", (b"mine", number("s", 5)), copies, type=b"Order")
        await it.raw.publish(sent)
        tries = min(fails, 3) + 1
        await eventually(lambda: len(seen), lambda count: count == tries)
        for n, (at_ms, one) in enumerate(seen):
            assert one.body == b"an order"
            assert (one.message_id, one.type, one.headers["mine"]) == ("id of an order", "Order", 5)
            assert one.headers.get("x-delayer-retries") == (n or None)
            assert "x-death" not in one.headers
            if n:
                wait = at_ms - seen[n - 1][0]
                assert 300 * 2 ** (n - 1) <= wait <= 330 * 2 ** (n - 1) + LATE_MS
                assert one.headers["x-delayer-error"] == "rejected in queue orders"
                assert len(one.headers["x-delayer-history"]) == n
                assert one.headers["x-delayer-cc"] == ["audit"]
                first = one.headers["x-delayer-history"][0]
                assert (first["exchange"], first["routing-key"], first["reason"]) == ("shop", "order.new", "rejected")
        parked = await it.raw.inbox("parking-lot")
        if fails > 3:
            await parked.got([b"an order"])
            assert parked.only(b"an order").props.one(b"x-delayer-retries") == number("l", 4)
        async with await Admin.connect(rabbitmq.url(it.vhost)) as admin:
            # The queue in CC got one copy, when the order was published.
            assert await admin.depths(["orders", "delays", "delays.refused", "audit"]) == {
                "orders": 0, "delays": 0, "delays.refused": 0, "audit": 1,
            }  # fmt: skip
        assert len(parked.arrivals) == (fails > 3)
