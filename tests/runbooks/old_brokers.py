"""The delayed-message plugin, and queues with a TTL: over to delayer, and back."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import aio_pika

from delayer.broker.admin import Admin
from delayer.core.topology import Binding, Exchange, Queue, Topology, arguments
from tests.faults.place import eventually
from tests.runbooks.account import Account, parked, waiting
from tests.runbooks.desk import NOT_OK, Desk
from tests.runbooks.old_worlds import depth, example
from tests.support.raw import Message, Props, Raw, now_ms, number
from tests.support.servers import Postgres, RabbitMQ

PLUGINS = "RUNBOOKS_PLUGINS"
PLUGIN = "rabbitmq_delayed_message_exchange"
DOCUMENT = Path(__file__).parents[2] / "docs" / "importing.md"
QUEUES = {"orders.eu": "eu.#", "orders.us": "us.#"}
AHEAD_MS = 30_000
"""How far ahead of the dump the cutoff lies: "some minutes" on the page."""


# ---- the plugin


async def plugin(desk: Desk) -> None:
    """Orders wait in the plugin's tables; they are dumped and imported, and the plugin goes. Then it comes back."""
    broker, postgres = with_plugin(RabbitMQ()), Postgres()
    await desk.server(broker)
    await desk.server(postgres)
    example(desk, "delayed-exchange", broker.url(), postgres.url())
    await the_old_exchange(broker.url())
    raw = await desk.stack.enter_async_context(await Raw.connect(broker.url()))
    account = Account(desk, [await raw.inbox(name) for name in QUEUES])
    desk.notes.restart()
    async with publisher(broker.url()) as orders:
        await send(account, orders, "soon", 20, AHEAD_MS // 2)
        await send(account, orders, "later", 40, AHEAD_MS + 30_000)
    desk.notes.step(
        "the plugin holds 60 orders: 20 are due in 15 s, 40 in a minute. 1: the exchange behind, its bindings"
    )
    await admin(desk, broker, "declare", "exchange", "name=orders.due", "type=topic")
    for name, key in QUEUES.items():
        await admin(
            desk, broker, "declare", "binding", "source=orders.due", f"destination={name}", f"routing_key={key}"
        )
    desk.notes.step("2: the publishers are stopped")
    await desk.delayer("db", "upgrade", lines=2)
    dump = desk.directory / "dump.txt"
    dump.write_text(await asyncio.to_thread(broker.ctl, "eval", one_liner()))
    desk.notes.step(f"$ rabbitmqctl eval --silent '…' > dump.txt   # {len(dump.read_text().splitlines())} lines")
    cutoff_ms = now_ms() + AHEAD_MS - 10_000
    cutoff = f"{datetime.fromtimestamp(cutoff_ms // 1000, UTC):%Y-%m-%dT%H:%M:%SZ}"
    words = ("import", "delayed-exchange", "run", "dump.txt", "--cutoff", cutoff, "--yes")
    said = await desk.quietly(*words[:3], str(dump), *words[4:])
    desk.notes.step(f"$ delayer {' '.join(words)}")
    desk.notes.seen(said)
    await account.arrive(20)
    await eventually(clock, lambda now: now > cutoff_ms + 2_000, timeout=60)
    desk.notes.step("3: that instant is over; the plugin delivered the 20 that were due before")
    await admin(desk, broker, "delete", "exchange", "name=orders")
    await plugins(desk, broker, "disable")
    desk.notes.step("4 and 5:")
    await desk.delayer("topology", "apply", lines=4)
    await desk.begin()
    await raw.publish(*ordered(account, "new", 20, 5_000))
    desk.notes.step("the daemon runs, and the publishers: 20 new orders, due in 5 s")
    await desk.delayer("check", show=NOT_OK, expect=None)
    await account.all_back()
    account.balance()
    await raw.publish(*ordered(account, "last", 20, 15_000))
    await parked(desk, 20)
    desk.notes.step("THE WAY BACK: 20 orders more are parked; the plugin is there again, the publishers are stopped")
    await plugins(desk, broker, "enable")
    await parked(desk, 0)
    await desk.delayer("status", show="parked:")
    await desk.end()
    desk.notes.step("nothing waits here any more: the daemon is stopped")
    await admin(desk, broker, "delete", "exchange", "name=orders")
    await the_old_exchange(broker.url())
    desk.notes.step("orders is declared as it was, of type x-delayed-message, and the queues are bound to it")
    async with publisher(broker.url()) as orders:
        await send(account, orders, "back", 20, 5_000)
    await account.all_back()
    account.balance()


def with_plugin(broker: RabbitMQ) -> RabbitMQ:
    """The same, with the plugin in reach and enabled from the start."""
    own = next(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/plugins"))
    broker._environment["RABBITMQ_PLUGINS_DIR"] = f"{own}:{os.environ[PLUGINS]}"
    (broker._directory / "enabled_plugins").write_text(f"[rabbitmq_management,{PLUGIN}].\n")
    return broker


async def plugins(desk: Desk, broker: RabbitMQ, verb: str) -> None:
    words = broker._entering(broker._programs / "rabbitmq-plugins", verb, PLUGIN)
    done = await asyncio.to_thread(
        subprocess.run,
        words,
        env=broker._environment,
        cwd=broker._directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    desk.notes.step(f"$ rabbitmq-plugins {verb} {PLUGIN}")


async def admin(desk: Desk, broker: RabbitMQ, *words: str) -> None:
    where = ("--host=127.0.0.1", f"--port={broker.management_port}", "--username=guest", "--password=guest")
    await desk.run("/usr/bin/rabbitmqadmin", *where, *words, shown=f"rabbitmqadmin {' '.join(words)}")


def one_liner() -> str:
    """What stands between the quotes in the documentation."""
    found = re.search(r"rabbitmqctl eval --silent '(.*?)' > dump.txt", DOCUMENT.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


async def the_old_exchange(url: str) -> None:
    async with publisher(url) as orders:
        for name, key in QUEUES.items():
            queue = await orders.channel.declare_queue(name, durable=True, arguments={"x-queue-type": "quorum"})
            await queue.bind(orders, key)


@asynccontextmanager
async def publisher(url: str) -> AsyncIterator[aio_pika.abc.AbstractExchange]:
    """The exchange as its publishers declare it."""
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        yield await channel.declare_exchange(
            "orders", "x-delayed-message", durable=True, arguments={"x-delayed-type": "topic"}
        )


async def send(account: Account, orders: aio_pika.abc.AbstractExchange, name: str, count: int, delay_ms: int) -> None:
    for n in range(count):
        body = account.owe(f"{name} {n}".encode(), now_ms() + delay_ms)
        message = aio_pika.Message(body, headers={"x-delay": delay_ms}, delivery_mode=2, message_id=f"{name}-{n}")
        await orders.publish(message, f"{('eu', 'us')[n % 2]}.{n}", mandatory=False)


def ordered(account: Account, name: str, count: int, delay_ms: int) -> list[Message]:
    """The same, for the exchange that is an ordinary one now."""
    props = Props(headers=((b"x-delay", number("I", delay_ms)),), delivery_mode=2)
    return [
        Message("orders", (b"eu.x", b"us.x")[n % 2], props, account.owe(f"{name} {n}".encode(), now_ms() + delay_ms))
        for n in range(count)
    ]


async def clock() -> int:
    return now_ms()


# ---- queues with a TTL


HOLDS = {
    # Symfony's, Laravel's, and a retry pair by hand.
    "delay_messages_work_40000_delay": {
        "x-message-ttl": 40_000, "x-expires": 80_000,
        "x-dead-letter-exchange": "messages", "x-dead-letter-routing-key": "work",
    },
    "work.delay.45000": {"x-message-ttl": 45_000, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "work"},
    "work.wait": {"x-message-ttl": 30_000, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "work"},
}  # fmt: skip


async def hold_queues(desk: Desk) -> None:
    """Jobs wait in three queues with a TTL; they are imported, the publishers change over; then they change back."""
    broker, postgres = RabbitMQ(), Postgres()
    await desk.server(broker)
    await desk.server(postgres)
    desk.configure(
        broker.url(), postgres.url(), more={"broker": {"url": broker.url(), "management_url": broker.management_url}}
    )
    await the_old_queues(broker.url())
    raw = await desk.stack.enter_async_context(await Raw.connect(broker.url()))
    account = Account(desk, [await raw.inbox("work")])
    await desk.quietly("db", "upgrade")
    desk.notes.restart()
    await raw.publish(*jobs(account, "old"))
    desk.notes.step(f"30 jobs wait in {', '.join(HOLDS)}")
    await desk.delayer("topology", "apply", lines=3)
    await desk.begin()
    await admin(desk, broker, "declare", "exchange", "name=delayer.out", "type=topic")
    await admin(desk, broker, "declare", "binding", "source=delayer.out", "destination=work", "routing_key=work")
    desk.notes.step("2: the publishers publish to delayer.in with x-delay, 10 jobs for 30 s from now")
    props = Props(headers=((b"x-delay", number("I", 30_000)),), delivery_mode=2)
    due_ms = now_ms() + 30_000
    await raw.publish(*(Message("delayer.in", b"work", props, account.owe(b"new %d" % n, due_ms)) for n in range(10)))
    desk.notes.step("3: what still waits in the old queues")
    words = [word for name in ("delay_*", "*.delay.*", "work.wait") for word in ("--queue", name)]
    await desk.delayer("import", "hold-queues", "preview", *words)
    await desk.delayer("import", "hold-queues", "run", *words, "--yes")
    desk.notes.step(
        f"{await waiting(desk)} jobs are parked, {sum([await depth(broker.url(), name) for name in HOLDS])} left there"
    )
    desk.notes.step("THE WAY BACK: the publishers publish to the old queues again")
    await raw.publish(*jobs(account, "back"))
    await parked(desk, 0)
    await desk.delayer("status", show="parked:")
    await desk.end()
    desk.notes.step("nothing waits here any more: the daemon is stopped")
    await account.all_back()
    account.balance()


async def the_old_queues(url: str) -> None:
    made = tuple(Queue(name, arguments(of)) for name, of in HOLDS.items())
    work = Queue("work", arguments({"x-queue-type": "quorum"}))
    async with await Admin.connect(url) as there:
        await there.declare(
            Topology((Exchange("messages", "direct"),), (work, *made), (Binding("messages", "work", "queue", "work"),))
        )


def jobs(account: Account, name: str) -> list[Message]:
    """Ten for each queue."""
    return [
        Message(
            "", hold.encode(), Props(delivery_mode=2, message_id=f"{name} {hold} {n}".encode()),
            account.owe(f"{name} {hold} {n}".encode(), now_ms() + int(of["x-message-ttl"])),  # type: ignore[call-overload]
        )
        for hold, of in HOLDS.items()
        for n in range(10)
    ]  # fmt: skip
