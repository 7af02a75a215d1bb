"""`make demo`: the main job, before your eyes.

Starts private servers and the daemon, sends messages with delays of 0 to 12 seconds in store mode, switches the daemon
to native mode while they wait, sends as many again, and watches everything come back. Messages that are due in days
and months are left parked, and an audit accounts for them. Exit code 0 only if every message came back exactly once,
none of them early, body, properties and headers intact, and the audit finds the others and no violation.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
from rich.console import Console

from tests.support.daemon import EXECUTABLE
from tests.support.demo_ledger import Expected, Ledger
from tests.support.demo_view import View
from tests.support.servers import StartFailed
from tests.support.stack import Stack, running_stack

DELAYS = {
    "store": (0, 0.5, 1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 12),
    "native": (
        0,
        0.5,
        1,
        1.5,
        2,
        2.5,
        3,
        3.5,
        4,
        4.5,
        5,
        5.5,
        6,
        6.5,
        7,
        8,
    ),  # the last of the first ones end with them
}
SLACK = 15.0
"""Seconds to wait for stragglers after the last one is due."""


async def declare_destinations(channel: AbstractChannel, ledger: Ledger) -> None:
    """What an application would have: an exchange with a queue behind it, and a queue."""
    exchange = await channel.declare_exchange("orders.out", aio_pika.ExchangeType.TOPIC, durable=True)
    orders = await channel.declare_queue("orders.inbox", durable=True)
    await orders.bind(exchange, "#")
    mail = await channel.declare_queue("mail.inbox", durable=True)

    def receive(queue: str) -> Callable[[AbstractIncomingMessage], Awaitable[None]]:
        async def on_message(message: AbstractIncomingMessage) -> None:
            ledger.arrived(queue, message, time.time() * 1000)
            await message.ack()

        return on_message

    for queue in (orders, mail):
        await queue.consume(receive(queue.name))


async def send(channel: AbstractChannel, ledger: Ledger, mode: str) -> None:
    """One message for every delay, through the routes in turn, saying the delay in the forms in turn."""
    orders = await channel.get_exchange("orders.in", ensure=False)
    mail = await channel.get_exchange("mail.in", ensure=False)
    straight = channel.default_exchange
    for turn, seconds in enumerate(DELAYS[mode]):
        number = len(ledger.expected)
        due = datetime.now(UTC) + timedelta(seconds=seconds)
        exchange, key, route, queue = (
            (orders, f"order.{number}", "orders.in → orders.out", "orders.inbox"),
            (mail, f"letter.{number}", "mail.in → mail.inbox", "mail.inbox"),
            (straight, "delays", "delays → orders.out", "orders.inbox"),
        )[turn % 3]
        said: dict[str, object] = {"x-delay": round(seconds * 1000)}
        if turn % 2:
            said = {"x-deliver-at": due.isoformat(timespec="milliseconds")}
        message = aio_pika.Message(
            f"demo body {number} – {'·' * number}".encode(),
            headers={**said, "demo": number, "nested": {"list": [1, "zwei", 3.5], "flag": True}},
            message_id=f"demo-{number}",
            correlation_id=f"thread-{number % 4}",
            content_type="text/plain",
            type="demo.message",
            priority=number % 3,
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        )
        ledger.sent(Expected(number, mode, route, queue, seconds, due.timestamp() * 1000, key, message))
        await exchange.publish(message, routing_key=key)


SPREAD, AT_NEW_YEAR = 240, 60
LEFT = SPREAD + AT_NEW_YEAR
FAR = {"demo": "left parked"}
PARKING_SECONDS = 30.0


async def park_far_ahead(stack: Stack, channel: AbstractChannel) -> None:
    """Renewals on a day of each week of the next quarter, and greetings that are all due in the first second of a year.

    Returns when all of them are parked, so that the first messages to be seen do not wait behind them."""
    now = datetime.now(UTC)
    orders = await channel.get_exchange("orders.in", ensure=False)
    mail = await channel.get_exchange("mail.in", ensure=False)
    publishes = []
    for n in range(SPREAD):
        seconds = (2 + 7 * (n * n % 13)) * 86_400 + n * 613 % 36_000
        headers = {**FAR, "x-delay": seconds * 1000}
        message = aio_pika.Message(f"renew contract {n}".encode(), headers=headers, message_id=f"renewal-{n}")
        publishes.append(orders.publish(message, routing_key="contract.renewal"))
    new_year = datetime((now + timedelta(days=2)).year + 1, 1, 1, tzinfo=UTC)
    for n in range(AT_NEW_YEAR):
        headers = {**FAR, "x-deliver-at": new_year.isoformat()}
        message = aio_pika.Message(f"happy new year, {n}".encode(), headers=headers, message_id=f"greeting-{n}")
        publishes.append(mail.publish(message, routing_key="greeting"))
    await asyncio.gather(*publishes)
    async with asyncio.timeout(PARKING_SECONDS):
        while json.loads(await stack.delayer("status", "--json"))["store"]["waiting"] < LEFT:
            pass  # the command itself takes its time


SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For a JVM that ends before its better compiler would have paid: 22 s instead of 26 for three hundred messages."""


class Audit(NamedTuple):
    """What `delayer audit` printed, and its exit code."""

    code: int
    text: str


async def audit(config: Path) -> Audit:
    """`delayer audit`. Raises RuntimeError if it does not end with 0 or 1, with what it said."""
    process = await asyncio.create_subprocess_exec(
        str(EXECUTABLE), "--config", str(config), "audit",
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "JDK_JAVA_OPTIONS": SHORT_LIVED},
    )  # fmt: skip
    told, said = await process.communicate()
    if process.returncode not in (0, 1):
        raise RuntimeError(f"delayer audit: exit {process.returncode}\n{said.decode(errors='replace')}")
    return Audit(process.returncode, told.decode())


def show_audit(found: Audit, console: Console) -> int:
    """Print what the command printed, and whether all that was parked is still here; the exit code."""
    console.print("\n[bold]delayer audit[/] [dim](--html FILE draws it as a page)[/]\n")
    console.print(found.text, markup=False)
    if found.code or f"  {LEFT} wait" not in found.text:
        console.print(f"[bold red]✗ {LEFT} messages were left parked, and the audit does not find them all[/]")
        return 1
    console.print(f"[bold green]✓ the {LEFT} messages that are due in days, weeks and months are all there[/]")
    return 0


async def watch(stack: Stack, ledger: Ledger, view: View) -> Audit:
    """Everything that happens, and the audit of what is left."""
    connection = await aio_pika.connect(stack.broker_url)
    async with connection:
        channel = await connection.channel(on_return_raises=True)
        await declare_destinations(await connection.channel(), ledger)
        view.phase(f"store mode: {LEFT} messages that are due in weeks and months are parked first")
        await park_far_ahead(stack, channel)
        view.phase("store mode: delays wait in Postgres")
        await send(channel, ledger, "store")
        await ledger.until(lambda: ledger.count() >= len(DELAYS["store"]) // 2)

        view.phase("switching to native mode, while half of them still wait")
        stack.configure("native")
        stack.daemon.reload()
        await stack.daemon.event("mode switched")

        view.phase("native mode: new delays wait in the broker's cascade; Postgres gives back what it holds")
        await send(channel, ledger, "native")
        longest = max(*DELAYS["store"], *DELAYS["native"]) + SLACK
        await ledger.until(lambda: ledger.count() >= len(ledger.expected), timeout=longest)
        view.phase("auditing what is left parked: a Spark job beside the daemon")
        found = await audit(stack.config)
        view.phase("stopping")
        await stack.daemon.stop()
        # The daemon is gone: what it repeated, if anything, is in the queues by now, and a round trip brings it here.
        await channel.declare_queue("mail.inbox", passive=True)
    return found


async def main() -> int:
    console = Console(highlight=False)
    started = time.monotonic()
    console.print("[bold]delayer demo[/]: starting a private RabbitMQ and Postgres …")
    ledger = Ledger()
    async with running_stack("store") as stack:
        far = f"and {LEFT} that are due in weeks and months"
        console.print(
            f"up after {time.monotonic() - started:.1f} s; sending {sum(map(len, DELAYS.values()))} messages, {far}\n"
        )
        with View(console, ledger) as view:
            found = await watch(stack, ledger, view)
    seconds = time.monotonic() - started
    code = max(ledger.report(console, seconds), show_audit(found, console))
    console.print("\nNext: `make run` starts servers and a daemon to try; docs/index.md lists the pages by task.")
    return code


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main()))
    except KeyboardInterrupt:
        print("\ninterrupted; everything that was started is stopped", file=sys.stderr)
        sys.exit(130)
    except (StartFailed, RuntimeError, AssertionError) as failed:
        print(f"\nthe demo failed: {failed}", file=sys.stderr)
        sys.exit(1)
