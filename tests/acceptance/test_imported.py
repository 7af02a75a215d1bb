"""What is imported beside a running daemon comes out of it: everything once, nothing early, bytes equal. Every source.

A daemon and a store for each would take minutes; so all of them are brought into one, in turn, while it releases, and
each test looks at its own.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from delayer.core.topology import Binding, Exchange, Queue, Topology, arguments
from tests.acceptance.imported import COUNT, STOCKS, Field, Owed, Stock
from tests.integration.test_import_sql import Source
from tests.support.daemon import EXECUTABLE, DaemonProcess
from tests.support.mariadb import MariaDB
from tests.support.raw import Inbox, Raw
from tests.support.rows import conserved
from tests.support.servers import Postgres, RabbitMQ

WAIT_SECONDS = 40.0


@dataclass
class Brought:
    """What became of one source: what is owed for it, what `delayer import` said, and what came of it."""

    owed: list[Owed]
    told: dict[str, Any]
    said: str
    inbox: Inbox

    def complete(self) -> bool:
        return len(self.inbox.counts) >= len(self.owed)


@dataclass
class All:
    """``store``: the account of the store when everything was over."""

    brought: dict[str, Brought]
    store: dict[str, int]
    sorts: bool


async def bring(stock: Stock, place: Field, name: str, queue: str, environ: dict[str, str]) -> Brought:
    inbox = await place.raw.inbox(queue)
    owed = await stock.fill(place, name, queue)
    words = [word.format(place.directory / name) for word in stock.words]
    process = await asyncio.create_subprocess_exec(
        EXECUTABLE, "import", words[0], "run", *words[1:], *stock.options, "--yes", "--json",
        env={"PATH": os.environ["PATH"], "DELAYER_CONFIG": os.devnull}
        | {f"DELAYER_{name}": value for name, value in environ.items()}
        | ({"DELAYER_IMPORT_URL": place.databases[stock.database].url} if stock.database else {}),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    told, said = await process.communicate()
    return Brought(owed, json.loads(told or "{}"), said.decode(), inbox)


async def bring_all(
    vhost: str, rabbitmq: RabbitMQ, database: str, databases: dict[str, Source], directory: Path
) -> All:
    environ = {"MODE": "store", "BROKER__URL": vhost, "STORE__URL": database}
    with_management = {**environ, "BROKER__MANAGEMENT_URL": rabbitmq.management_url}
    brought: dict[str, Brought] = {}
    async with DaemonProcess(environ) as daemon, await Raw.connect(vhost) as raw:
        await daemon.ready()
        place = Field(vhost, raw, directory, databases)
        for name, stock in STOCKS.items():
            if "v1" in name and rabbitmq.version >= (4, 3):
                continue
            queue = f"imported.{name.replace(' ', '.')}"
            inbox = Queue(queue, arguments({"x-queue-type": "quorum"}))
            out = (Exchange("held.out", "topic"),), (inbox,), (Binding("held.out", queue, "queue", queue),)
            await place.declare(Topology(*out))
            brought[name] = await bring(stock, place, name, queue, with_management)
        for one in brought.values():
            await one.inbox.until(one.complete, WAIT_SECONDS)
        await raw.round_trip()
        assert await daemon.stop() == 0, daemon.tail()
        assert not daemon.stray_lines
    connection = await asyncpg.connect(database)
    try:
        return All(brought, dict(await conserved(connection)), rabbitmq.sorts_headers)
    finally:
        await connection.close()


@pytest.fixture(scope="module")
def imported(
    rabbitmq: RabbitMQ, postgres: Postgres, template: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[All]:
    vhost, database = rabbitmq.add_vhost(), postgres.add_database(template=template)
    legacy = postgres.add_database()
    with MariaDB() as mariadb:
        databases = {
            "postgresql": Source("postgresql", postgres.url(legacy)),
            "mysql": Source("mysql", mariadb.url(mariadb.add_database())),
        }
        directory = tmp_path_factory.mktemp("imported")
        yield asyncio.run(bring_all(rabbitmq.url(vhost), rabbitmq, postgres.url(database), databases, directory))
    rabbitmq.drop_vhost(vhost)
    postgres.drop_database(database)
    postgres.drop_database(legacy)


@pytest.mark.parametrize("source", STOCKS)
def test_imported_beside_a_running_daemon(source: str, imported: All) -> None:
    if source not in imported.brought:
        pytest.skip("RabbitMQ 4.3 refuses x-queue-mode, and with it this cascade")
    stock, of = STOCKS[source], imported.brought[source]
    counted = {key: of.told.get(key) for key in ("parked", "held", "left")}
    assert counted == {"parked": COUNT, "held": 0, "left": {}}, of.said
    for owed in of.owed:
        arrival = of.inbox.only(owed.body)
        assert arrival.at_ms >= owed.due_ms, "early"
        assert owed.due_ms <= arrival.due_ms <= owed.due_ms + stock.slack_ms
        left = arrival.props.without(b"x-delayer-id", b"x-delayer-due")
        assert left.encode() == owed.props.sorted_if(imported.sorts).encode()
    assert of.inbox.counts.total() == COUNT


def test_the_store_agrees(imported: All) -> None:
    """Nothing waits any more, and as much came in as was told."""
    assert imported.store["parked"] == COUNT * len(imported.brought)
