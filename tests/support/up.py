"""`make run`: private servers and the daemon, up until Ctrl-C, with a queue to watch and the commands to try.

The terminal shows the daemon's log live. A daemon that exits is restarted, as by systemd. The servers stay,
so you can try a crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aio_pika
from aio_pika.abc import AbstractIncomingMessage
from rich.console import Console
from rich.markup import escape

from delayer.core.readable import instant
from tests.support.daemon import EXECUTABLE
from tests.support.servers import StartFailed
from tests.support.stack import TOKEN, Stack, running_stack

ROUTES: tuple[dict[str, object], ...] = ({"from": "delayer.in", "to": "delayer.out"},)
QUIET = frozenset({"partition made", "partition dropped", "broker connected"})
"""Events of no interest on this screen. Warnings are always shown."""
COLOURS = {"warning": "yellow", "error": "bold red", "critical": "bold red"}
PAUSE = 2.0
"""Seconds that a daemon stays dead: long enough to see that no message is lost."""
console = Console(highlight=False, soft_wrap=True)


def write_pid(stack: Stack) -> Path:
    """Write the daemon's process id to a file; returns its path."""
    path = stack.config.with_name("daemon.pid")
    path.write_text(f"{stack.daemon.pid}\n")
    return path


def explain(stack: Stack) -> None:
    pid = write_pid(stack)
    console.print(f"""
[bold]broker[/]   {stack.broker_url}   (management: {stack.management_url})
[bold]store[/]    {stack.store_url}
[bold]config[/]   {stack.config}   (edit it, then: kill -HUP $(cat {pid}))
[bold]page[/]     http://{stack.page}   (token for its actions and the API: {TOKEN})
[bold]daemon[/]   kill -9 $(cat {pid}): it is started again, and nothing is lost

In another terminal:

  [bold green]export DELAYER_CONFIG={stack.config} PATH={EXECUTABLE.parent}:$PATH[/]
  [bold green]export DELAYER_STORE__URL={stack.store_url}[/]

Send a message that comes back in ten seconds, and watch it arrive here:

  [bold green]delayer send --route delayer.in --routing-key hello --delay 10s --body 'hello again'[/]

The same over HTTP, and by SQL:

  [bold green]curl -H 'Authorization: Bearer {TOKEN}' http://{stack.page}/api/messages \\
       --json '{{"routing_key": "hello", "delay": "10s", "body": "by HTTP"}}'[/]
  [bold green]psql {stack.store_url} -c "SELECT delayer_send('hello', 'by SQL', delay => '10 seconds')"[/]

Look around:

  delayer status
  delayer topology show
  delayer check

Ctrl-C stops everything and deletes its data. From here on: arriving messages, and the daemon's log.
""")


def show(told: dict[str, Any] | str) -> None:
    """A line of the daemon's log, for people."""
    if isinstance(told, str):  # a line outside the log: a configuration error, a traceback
        console.print(f"daemon:  {told}", markup=False)
        return
    told = dict(told)
    level, name, _ = told.pop("level", ""), told.pop("event", ""), told.pop("logger", None)
    clock = str(told.pop("timestamp", ""))[11:19]
    if level in COLOURS or name not in QUIET:
        values = " ".join(f"{key}={value}" for key, value in told.items())
        line = escape(f"daemon:  {clock} {level:<7} {name}   {values}")
        colour = COLOURS.get(level, "dim")
        console.print(f"[{colour}]{line}[/]")


@contextlib.asynccontextmanager
async def arrivals_shown(stack: Stack) -> AsyncIterator[None]:
    """Bind a queue to delayer.out, and print a line for each message in it. The connection is closed before the broker:
    the driver would print a traceback if it lost it."""
    async with await aio_pika.connect(stack.broker_url) as connection:
        channel = await connection.channel()
        exchange = await channel.declare_exchange("delayer.out", aio_pika.ExchangeType.TOPIC, durable=True)
        inbox = await channel.declare_queue("inbox", durable=True)
        await inbox.bind(exchange, "#")
        await inbox.consume(arrived, no_ack=True)
        yield


async def arrived(message: AbstractIncomingMessage) -> None:
    due_ms = int(str(message.headers.get("x-delayer-due", 0)))
    late_ms = time.time() * 1000 - due_ms
    # The publisher may have named an instant long past.
    when = f"{late_ms:.0f} ms after it was due" if late_ms < 60_000 else f"due {instant(due_ms)}"
    body = message.body[:60].decode("utf-8", "backslashreplace")
    console.print(f"arrived: key {message.routing_key}, {when}: {body}", markup=False)


def how_it_ended(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


async def keep_alive(stack: Stack) -> None:
    """Restart the daemon whenever it exits."""
    while True:
        ended = how_it_ended(await stack.daemon.wait(timeout=float("inf")))
        console.print(f"[bold yellow]the daemon {ended}; broker and store stay. Started again in {PAUSE:g} s.[/]")
        await asyncio.sleep(PAUSE)
        await stack.daemon.start()
        write_pid(stack)
        console.print(f"the daemon is started again: process {stack.daemon.pid}")


async def main() -> int:
    console.print("starting a private RabbitMQ and Postgres …")
    async with running_stack("store", ROUTES, page=True) as stack, arrivals_shown(stack):
        told = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, told.set)
        explain(stack)
        stack.daemon.told = show
        keeping = asyncio.create_task(keep_alive(stack))
        await told.wait()
        console.print("stopping …")
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
    console.print("stopped; the broker, the database and their data are gone.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main()))
    except KeyboardInterrupt:
        sys.exit(130)
    except (StartFailed, RuntimeError, AssertionError) as failed:
        print(f"\nit did not start: {failed}", file=sys.stderr)
        sys.exit(1)
