"""Celery and MailerQ: over to delayer, and back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from delayer.broker.admin import Admin
from delayer.core.topology import Queue, Topology, arguments
from tests.faults.place import eventually
from tests.runbooks.account import Account, parked
from tests.runbooks.desk import NOT_OK, Desk
from tests.support.raw import Message, Props, Raw, now_ms
from tests.support.servers import Postgres, RabbitMQ

EXAMPLES = Path(__file__).parents[2] / "config" / "examples"
TAKEOVER = '[[takeover]]\ncascade = "celery"\nlevels_from = 6'


def example(desk: Desk, name: str, broker: str, store: str) -> None:
    """The example as it stands, at our servers."""
    text = (EXAMPLES / f"{name}.toml").read_text()
    for given, ours in (("amqp://guest:guest@localhost:5672/", broker), ("postgresql://localhost/delayer", store)):
        assert text.count(given) == 1
        text = text.replace(given, ours)
    desk.config.write_text(text)


async def depth(url: str, queue: str) -> int:
    async with await Admin.connect(url) as admin:
        return (await admin.depths([queue]))[queue] or 0


# ---- Celery


async def celery(desk: Desk) -> None:
    """Tasks wait in Celery's own levels; they are taken over; then Celery's levels keep what is new again."""
    broker, postgres = RabbitMQ(), Postgres()
    await desk.server(broker)
    await desk.server(postgres)
    example(desk, "celery", broker.url(), postgres.url())
    await asyncio.to_thread(worker_starts, broker.url())
    raw = await desk.stack.enter_async_context(await Raw.connect(broker.url()))
    account = Account(desk, [await raw.inbox("tasks")])
    await desk.quietly("db", "upgrade")
    desk.notes.restart()
    await tasks(account, broker.url(), "first", 30, 70)
    desk.notes.step("kombu publishes 30 tasks with a countdown of 70 s; they stand in Celery's levels")
    await desk.delayer("check", show="takeover", expect=None)
    await desk.delayer("topology", "apply", lines=3)
    await desk.begin()
    await parked(desk, 30)
    desk.notes.step("the daemon runs: all 30 are parked")
    await tasks(account, broker.url(), "second", 10, 65)
    await parked(desk, 40)
    desk.notes.step("10 tasks more, with a countdown of 65 s: they are parked too")
    await desk.delayer("list", "--limit", "2", lines=4)
    desk.notes.step("THE WAY BACK: [[takeover]] is taken out of the configuration, the daemon restarted")
    await desk.end()
    text = desk.config.read_text()
    assert TAKEOVER in text
    desk.config.write_text(text.replace(TAKEOVER, ""))
    await desk.begin()
    await tasks(account, broker.url(), "third", 10, 90)
    await eventually(lambda: depth(broker.url(), "celery_delayed_6"), lambda found: found == 10)
    desk.notes.step("10 tasks more, with a countdown of 90 s: they stand in celery_delayed_6, and stay there")
    await parked(desk, 0)
    await desk.delayer("status", show="parked:")
    await desk.end()
    desk.notes.step("nothing waits here any more: the daemon is stopped")
    await account.all_back()
    account.balance()


def worker_starts(url: str) -> None:
    """What a worker declares, by kombu."""
    import kombu
    from kombu.transport import native_delayed_delivery as delayed

    with kombu.Connection(url) as connection:
        delayed.declare_native_delayed_delivery_exchanges_and_queues(connection, "quorum")
        exchange = kombu.Exchange("tasks", type="topic")
        queue = kombu.Queue("tasks", exchange, routing_key="tasks", queue_arguments={"x-queue-type": "quorum"})
        queue.bind(connection.default_channel).declare()
        delayed.bind_queue_to_native_delayed_delivery_exchange(connection, queue)


async def tasks(account: Account, url: str, name: str, count: int, seconds: int) -> None:
    """As Celery publishes a task with a countdown, which it notes as an ``eta``."""

    def publish() -> None:
        import kombu
        from kombu.transport import native_delayed_delivery as delayed

        with kombu.Connection(url, transport_options={"confirm_publish": True}) as connection:
            producer = connection.Producer(connection.default_channel)
            for n in range(count):
                due_ms = now_ms() + seconds * 1000
                body = account.owe(f"{name} {n}".encode(), due_ms)
                eta = datetime.fromtimestamp(due_ms / 1000, UTC).isoformat()
                producer.publish(
                    body,
                    exchange=delayed.level_name(delayed.MAX_LEVEL),
                    routing_key=delayed.calculate_routing_key(seconds, "tasks"),
                    headers={"task": "shop.remind", "id": f"{name}-{n}", "eta": eta, "retries": 0},
                    content_type="application/octet-stream",
                    content_encoding="binary",
                )

    await asyncio.to_thread(publish)


# ---- MailerQ


async def mailerq(desk: Desk) -> None:
    """amqpdelayer holds mail, and reads an empty queue while the daemon takes what is new; then somebody else reads
    `delays` again while the daemon releases what it has, and MailerQ's own delay queues hold what is new."""
    broker, postgres = RabbitMQ(), Postgres()
    await desk.server(broker)
    await desk.server(postgres)
    example(desk, "mailerq", broker.url(), postgres.url())
    await desk.quietly("db", "upgrade")
    desk.notes.restart()
    await desk.delayer("topology", "apply", lines=9)
    raw = await desk.stack.enter_async_context(await Raw.connect(broker.url()))
    account = Account(desk, [await raw.inbox("outbox")])
    held = [one._replace(exchange="amqpdelayer") for one in mail(account, "amqpdelayer holds", 5, 25)]
    amqpdelayer = asyncio.create_task(releases(raw, held))
    async with await Admin.connect(broker.url()) as admin:
        await admin.declare(Topology(queues=(Queue("delays.last"),)))
    desk.notes.step("amqpdelayer holds 5 mails for 25 s from now, and reads the queue delays.last from now on")
    await desk.begin()
    await raw.publish(*mail(account, "forward", 20, 20))
    await parked(desk, 20)
    desk.notes.step("MailerQ publishes 20 mails for 20 s from now, half by timestamp, half by JSON: all are parked")
    await desk.delayer("check", show=NOT_OK, expect=None)
    await account.arrive(25)
    await amqpdelayer
    assert await depth(broker.url(), "delays.last") == 0
    desk.notes.step("all 25 are delivered; amqpdelayer has nothing left, and is stopped")
    await raw.publish(*mail(account, "waits", 10, 30))
    await parked(desk, 10)
    desk.notes.step("10 mails more are parked, for 30 s from now")
    desk.notes.step("THE WAY BACK: the daemon gets a queue and an exchange of its own, that nobody publishes to")
    text = desk.config.read_text()
    for given, other in (
        ('queue = "delays"', 'queue = "delayer.retired"'),
        ('from = "mailerq"', 'from = "delayer.retired"'),
    ):
        assert text.count(given) == 1
        text = text.replace(given, other)
    desk.config.write_text(text)
    await desk.end()
    await desk.delayer("topology", "apply", show="In place")
    await desk.begin()
    late = mail(account, "for amqpdelayer", 5, 600)
    await raw.publish(*late)
    read = await raw.inbox("delays")
    await read.got([one.body for one in late])
    assert [arrival.delivery.properties for arrival in read.arrivals] == [one.props.encode() for one in late]  # type: ignore[union-attr]
    for one in late:
        del account.owed[one.body]
    desk.notes.step(
        "5 mails for the exchange mailerq come to whoever reads `delays` now, all of them, as they were sent"
    )
    desk.notes.step("or MailerQ has its old configuration, and puts what it delays into its own queue for 16 s")
    hold = {"x-message-ttl": 16_000, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "outbox"}
    async with await Admin.connect(broker.url()) as admin:
        await admin.declare(Topology(queues=(Queue("mailerq-16", arguments(hold)),)))
    due_ms = now_ms() + 16_000
    bodies = [account.owe(b"own queue %d" % n, due_ms) for n in range(10)]
    await raw.publish(*(Message("", b"mailerq-16", Props(delivery_mode=2), body) for body in bodies))
    await parked(desk, 0)
    await desk.delayer("status", show="parked:")
    await desk.end()
    desk.notes.step("nothing waits here any more: the daemon is stopped")
    await account.all_back()
    account.balance()


async def releases(raw: Raw, held: Sequence[Message]) -> None:
    """As amqpdelayer does, which is no free software."""
    await asyncio.sleep(26)
    await raw.publish(*held)


def mail(account: Account, name: str, count: int, seconds: int) -> Sequence[Message]:
    made: list[Message] = []
    for n in range(count):
        due_s = now_ms() // 1000 + seconds
        said: dict[str, Any] = {"envelope": "a@example.org", "n": f"{name} {n}"}
        stamp = due_s if n % 2 else None
        if stamp is None:
            said["nextattempt"] = {"time": f"{datetime.fromtimestamp(due_s, UTC):%Y-%m-%d %H:%M:%S}"}
        body = account.owe(json.dumps(said).encode(), due_s * 1000)
        made.append(Message("mailerq", (b"outbox", b"retries")[n % 2], Props(delivery_mode=2, timestamp=stamp), body))
    return made
