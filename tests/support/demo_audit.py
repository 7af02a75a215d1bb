"""The end of the demo: messages parked far ahead at its beginning, and an audit of the store that they are left in."""

from __future__ import annotations

import asyncio
import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import aio_pika
from aio_pika.abc import AbstractChannel
from rich.console import Console

from tests.support import daemon
from tests.support.stack import Stack

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
        str(daemon.EXECUTABLE), "--config", str(config), "audit",
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "JDK_JAVA_OPTIONS": SHORT_LIVED},
    )  # fmt: skip
    told, said = await process.communicate()
    if process.returncode not in (0, 1):
        raise RuntimeError(f"delayer audit: exit {process.returncode}\n{said.decode(errors='replace')}")
    return Audit(process.returncode, told.decode())


def show(audit: Audit, console: Console) -> int:
    """Print what the command printed, and whether all that was parked is still here; the exit code."""
    console.print("\n[bold]delayer audit[/] [dim](--html FILE draws it as a page)[/]\n")
    console.print(audit.text, markup=False)
    if audit.code or f"  {LEFT} wait" not in audit.text:
        console.print(f"[bold red]✗ {LEFT} messages were left parked, and the audit does not find them all[/]")
        return 1
    console.print(f"[bold green]✓ the {LEFT} messages that are due in days, weeks and months are all there[/]")
    return 0
