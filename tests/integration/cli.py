"""The command line, called in this process, and helpers that read the broker for its tests."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
from click.testing import CliRunner, Result

from delayer.cli.main import cli
from delayer.format.headers import COUNTED
from tests.support.logged import logging_as_it_was

Run = Callable[..., Result]


@pytest.fixture
def delayer(vhost: str, database: str) -> Iterator[Run]:
    """Call `delayer …` with its own vhost and store, in this process: new interpreters for about eighty calls would
    take a minute."""
    nothing = {name: None for name in os.environ if name.startswith("DELAYER_")}
    ours = nothing | {"DELAYER_CONFIG": os.devnull, "DELAYER_BROKER__URL": vhost, "DELAYER_STORE__URL": database}

    def run(*arguments: str, expect: int = 0, stdin: bytes = b"", **more: str | None) -> Result:
        # In a thread, because the command has its own event loop, and so may the test.
        call = partial(CliRunner().invoke, cli, arguments, env=ours | more, input=stdin, prog_name="delayer")
        with ThreadPoolExecutor(1) as thread:
            result = thread.submit(call).result(60)
        assert result.exit_code == expect, f"{result.output}\n{result.exception!r}"
        assert "Traceback" not in result.stderr
        return result

    with logging_as_it_was():
        yield run


@asynccontextmanager
async def channel_to(url: str) -> AsyncIterator[AbstractChannel]:
    async with await aio_pika.connect(url) as connection:
        yield await connection.channel()


def said(message: AbstractIncomingMessage) -> dict[str, object]:
    """The publisher's headers, without the counts that a quorum queue adds on redelivery."""
    return {name: value for name, value in message.headers.items() if name.encode() not in COUNTED}


async def take(url: str, queue: str) -> list[AbstractIncomingMessage]:
    """Take all ready messages of ``queue``."""
    async with channel_to(url) as channel:
        source = await channel.get_queue(queue)
        # A queue with a single active consumer does not know basic.get.
        async with source.iterator(no_ack=True) as messages:
            return [await anext(messages) for _ in range(source.declaration_result.message_count or 0)]


def ids(run: Run, *arguments: str, **environ: str | None) -> list[str]:
    """The ids of the messages that this command lists."""
    return [one["id"] for one in json.loads(run(*arguments, "--json", **environ).stdout)["messages"]]


def rows(run: Run, *what: str, expect: int = 0, options: Sequence[str] = (), **more: str) -> list[dict[str, str]]:
    """The rows of `delayer check` for these things."""
    told = json.loads(run(*options, "check", "--json", expect=expect, **more).stdout)
    assert told["ok"] == (expect == 0)
    return [row for row in told["checks"] if row["what"] in what]


async def destination(vhost: str) -> None:
    """Declare the exchange of due messages."""
    async with channel_to(vhost) as channel:
        await channel.declare_exchange("delayer.out", aio_pika.ExchangeType.TOPIC, durable=True)
