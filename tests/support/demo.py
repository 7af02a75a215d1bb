"""`make demo`: the main job, before your eyes.

Starts private servers and the daemon, and sends messages with delays of 0 to 12 seconds in store mode. Switches the
daemon to native mode while they wait, sends the same number again, and watches all of them return. Messages due in days
and months stay parked, and an audit counts them. Exit code 0 only if every message came back exactly once, intact and
not early, and the audit finds the parked ones and no violation.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from datetime import UTC, datetime, timedelta

import aio_pika
from aio_pika.abc import AbstractChannel
from rich.console import Console
from rich.markup import escape

from delayer.amqp.values import Delivery
from tests.support.ledger import Ledger, Verdict
from tests.support.servers import StartFailed
from tests.support.stack import Stack, running_stack

COUNT = {"store": 32, "native": 32}
LONGEST_MS = {"store": 12_000, "native": 8_000}
"""The last messages of both modes are due at about the same time."""
SLACK = 15.0
"""Seconds to wait for stragglers after the last one is due."""


class Shown(Ledger):
    """The ledger of the fault tests, with a line for each message that returns."""

    console: Console

    def judge(self, number: int, delivery: Delivery, at_ms: float) -> bool:
        owed = self.account.owed(number)
        asked = f"asked {owed.delay_ms / 1000:5.1f} s"
        self.console.print(f"message {number:3}  {asked}  late {at_ms - owed.due_ms:6.0f} ms", markup=False)
        return super().judge(number, delivery, at_ms)


SPREAD, AT_NEW_YEAR = 240, 60
LEFT = SPREAD + AT_NEW_YEAR
FAR = {"demo": "left parked"}
PARKING_SECONDS = 30.0


async def park_far_ahead(stack: Stack, channel: AbstractChannel) -> None:
    """Renewals on a day of each week of the next quarter, and greetings that are all due in the first second of a year.

    Returns when all of them are parked, so that the messages to watch do not queue behind them."""
    now = datetime.now(UTC)
    await channel.declare_queue("mail.inbox", durable=True)
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
            pass  # the command itself is slow


def show_audit(found: str, console: Console) -> int:
    """Print the audit, and whether it finds every parked message; return the exit code."""
    console.print("\n[bold]delayer audit[/] [dim](--html FILE draws it as a page)[/]\n")
    console.print(found, markup=False)
    if f"  {LEFT} wait" not in found:
        console.print(f"[bold red]✗ {LEFT} messages were left parked, and the audit does not find them all[/]")
        return 1
    console.print(f"[bold green]✓ the {LEFT} messages that are due in days, weeks and months are all there[/]")
    return 0


async def watch(stack: Stack, ledger: Shown) -> str:
    """Run the demo; return the audit of the messages left parked."""

    def phase(text: str) -> None:
        ledger.console.print(f"[cyan]— {text}[/]")

    phase(f"store mode: {LEFT} messages that are due in days, weeks and months are parked first")
    async with await aio_pika.connect(stack.broker_url) as connection:
        await park_far_ahead(stack, await connection.channel())
    phase("store mode: delays wait in Postgres")
    await ledger.publish(COUNT["store"], longest_ms=LONGEST_MS["store"])
    await ledger.until(lambda: ledger.account.back >= COUNT["store"] // 2)

    phase("switching to native mode, while half of them still wait")
    stack.configure("native")
    stack.daemon.reload()
    await stack.daemon.event("mode switched")

    phase("native mode: new delays wait in the broker's cascade; Postgres releases its messages")
    await ledger.publish(COUNT["native"], longest_ms=LONGEST_MS["native"])
    await ledger.all_back(timeout=max(LONGEST_MS.values()) / 1000 + SLACK)
    phase("auditing the parked messages, beside the daemon")
    found = await stack.delayer("audit")
    phase("stopping")
    await stack.daemon.stop()
    await ledger.drained()  # the daemon's repeats, if any, are in the queue by now
    return found


def show_verdict(verdict: Verdict, console: Console, seconds: float) -> int:
    """Print the verdict; return the exit code."""
    lost, early, changed, repeats = map(len, (verdict.missing, verdict.early, verdict.changed, verdict.repeats))
    console.print(f"\n{verdict.sent} sent: {lost} lost, {early} early, {changed} changed, {repeats} more than once.")
    try:
        verdict.assert_kept()
    except AssertionError as broken:
        console.print(f"[bold red]✗ a broken promise:[/] {escape(str(broken))}")
        return 1
    kept = "every message came back exactly once, none early, all of them intact"
    console.print(f"[bold green]✓ {kept}[/] [dim]({seconds:.0f} s)[/]")
    return 0


async def main() -> int:
    console = Shown.console = Console(highlight=False)
    started = time.monotonic()
    console.print("[bold]delayer demo[/]: starting a private RabbitMQ and Postgres …")
    async with (
        running_stack("store") as stack,
        Shown.open(stack.broker_url, random.Random(), into=b"orders.in", exchange="orders.out") as ledger,
    ):
        sent = f"sending {sum(COUNT.values())} messages, and {LEFT} that are due in days, weeks and months"
        console.print(f"up after {time.monotonic() - started:.1f} s; {sent}\n")
        found = await watch(stack, ledger)
        code = max(show_verdict(ledger.verdict(), console, time.monotonic() - started), show_audit(found, console))
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
