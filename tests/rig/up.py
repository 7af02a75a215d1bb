"""`make run`: private servers and the daemon, up until Ctrl-C, with a queue to watch and the commands to try."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time

import aio_pika
from aio_pika.abc import AbstractIncomingMessage
from rich.console import Console

from tests.rig.daemon import EXECUTABLE
from tests.rig.servers import StartFailed
from tests.rig.stack import Stack, running_stack

ROUTES: tuple[dict[str, object], ...] = ({"from": "delayer.in", "to": "delayer.out"},)
console = Console(highlight=False, soft_wrap=True)


def explain(stack: Stack) -> None:
    command = f"{EXECUTABLE} --config {stack.config}"
    console.print(f"""
[bold]broker[/]   {stack.broker_url}
[bold]store[/]    {stack.store_url}
[bold]config[/]   {stack.config}   (edit it, then: kill -HUP {stack.daemon.pid})

Send a message that comes back in ten seconds, and watch it arrive here:

  [bold green]{command} send --to delayer.in --key hello --delay 10s --body 'hello again'[/]

Look around:

  {command} status
  {command} topology show
  {command} check

Ctrl-C stops everything and deletes its data.
""")


async def show_arrivals(stack: Stack) -> None:
    """A queue behind delayer.out, and a line for each message in it."""
    connection = await aio_pika.connect(stack.broker_url)
    channel = await connection.channel()
    exchange = await channel.declare_exchange("delayer.out", aio_pika.ExchangeType.TOPIC, durable=True)
    inbox = await channel.declare_queue("inbox", durable=True)
    await inbox.bind(exchange, "#")

    async def arrived(message: AbstractIncomingMessage) -> None:
        late = time.time() * 1000 - int(str(message.headers.get("x-delayer-due", 0)))
        body = message.body[:60].decode("utf-8", "backslashreplace")
        console.print(f"arrived: key {message.routing_key}, {late:.0f} ms after it was due: {body}", markup=False)
        await message.ack()

    await inbox.consume(arrived)


async def main() -> int:
    console.print("starting a private RabbitMQ and Postgres …")
    async with running_stack("store", ROUTES) as stack:
        await show_arrivals(stack)
        explain(stack)
        ended = asyncio.create_task(stack.daemon.wait(timeout=float("inf")))
        told = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, told.set)
        waiting = asyncio.create_task(told.wait())
        await asyncio.wait([ended, waiting], return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            console.print(f"the daemon ended with exit code {ended.result()}; its log ends:\n{stack.daemon.tail()}")
            return 1
        ended.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ended
        console.print("stopping …")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main()))
    except KeyboardInterrupt:
        sys.exit(130)
    except (StartFailed, RuntimeError, AssertionError) as failed:
        print(f"\nit did not start: {failed}", file=sys.stderr)
        sys.exit(1)
