"""What is imported beside a running daemon comes out of it: everything once, nothing early, bytes equal. Every source.

A stock for each source of `delayer import` is what another system holds, as it holds it, and what is owed for it. A
daemon and a store for each would take minutes; so all of them are brought into one, in turn, while it releases, and
each test looks at its own.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
import pytest
from sqlalchemy import text as statement

from delayer.broker.admin import Admin
from delayer.core import lines
from delayer.core.cascade import Cascade, Kind, routing_key
from delayer.core.lines import Line
from delayer.core.message import Parcel, Target
from delayer.core.nservicebus import wire_instant
from delayer.core.topology import Binding, Exchange, Queue, Topology, arguments
from tests.integration.test_import_sql import NHIBERNATE, Source
from tests.support.daemon import EXECUTABLE, DaemonProcess
from tests.support.mariadb import MariaDB
from tests.support.raw import Header, Inbox, Message, Props, Raw, now_ms, number, text
from tests.support.rows import conserved
from tests.support.servers import Postgres, RabbitMQ

COUNT = 100
EXPIRE, MESSAGE_ID, RELATED = "NServiceBus.Timeout.Expire", "NServiceBus.MessageId", "NServiceBus.RelatedToTimeoutId"
EASYNETQ = "Shop.Remind, Shop"
DAY = 86_400


class Owed(NamedTuple):
    """One message: when it is due and what it is to look like then, but for the two headers of ours."""

    body: bytes
    due_ms: int
    props: Props


def body_of(name: str, n: int) -> bytes:
    return b"%s %d \xff\0" % (name.encode(), n)


@dataclass
class Field:
    """Where the stocks are put: a vhost with a connection, an empty directory, a database of each kind."""

    vhost: str
    raw: Raw
    directory: Path
    databases: dict[str, Source]
    chance: random.Random = field(default_factory=lambda: random.Random(6))

    @property
    def vhost_name(self) -> str:
        return self.vhost.rpartition("/")[2]

    def dues(self, name: str) -> Dues:
        """Instants around now, some of them over, and bodies that are no text."""
        now = now_ms()
        return [(now + self.chance.randrange(-1_000, 5_000), body_of(name, n)) for n in range(COUNT)]

    async def declare(self, topology: Topology) -> None:
        async with await Admin.connect(self.vhost) as admin:
            await admin.declare(topology)


Dues = list[tuple[int, bytes]]
Fill = Callable[[Field, str, str], Awaitable[list[Owed]]]
"""Puts the messages of the source of that name there, for that queue."""


@dataclass(frozen=True)
class Stock:
    """``words``: behind `delayer import`, without the verb; ``{}`` is the file. ``slack_ms``: by how much the due
    instant may be later than it would have been, where the source does not tell it exactly."""

    words: Sequence[str]
    fill: Fill
    options: Sequence[str] = ()
    database: str = ""
    slack_ms: int = 0


# ---- files


def lines_of(write: Callable[[Field, str, Dues], bytes], props: Callable[[int, bytes], Props]) -> Fill:
    async def fill(place: Field, name: str, queue: str) -> list[Owed]:
        dues = place.dues(name)
        (place.directory / name).write_bytes(write(place, queue, dues))
        return [Owed(body, due_ms, props(due_ms, body)) for due_ms, body in dues]

    return fill


PLUGIN = Props(headers=((b"x-delay", number("I", 5_000)), (b"tenant", text("acme"))), delivery_mode=2)


def as_plugin(_due_ms: int, _body: bytes) -> Props:
    """As the plugin would have left it: the sign turned."""
    return replace(PLUGIN, headers=((b"x-delay", number("I", -5_000)), (b"tenant", text("acme"))))


def dump(place: Field, queue: str, dues: Dues) -> bytes:
    said = []
    for due_ms, body in dues:
        fields = (place.vhost_name.encode(), b"held", queue.encode(), PLUGIN.encode(), body)
        said.append(b" ".join([b"%d" % due_ms, *map(base64.b64encode, fields)]))
    return b"\n".join([*said, b"%d" % len(dues), b""])


def jsonl(_place: Field, queue: str, dues: Dues) -> bytes:
    written = [
        lines.write(Line(Parcel(due_ms, b"r", b"", b"", Target(b"", queue.encode()), PLUGIN.encode(), body)))
        for due_ms, body in dues
    ]
    return b"".join(written) + lines.write_end(len(dues))


def raven(_place: Field, queue: str, dues: Dues) -> bytes:
    def document(due_ms: int, body: bytes) -> str:
        return json.dumps(
            {
                "Id": f"TimeoutDatas/{due_ms}",
                "Destination": {"Queue": queue, "Machine": "SERVER7"},
                "State": base64.b64encode(body).decode(),
                "Time": f"{moment(due_ms):%Y-%m-%dT%H:%M:%S}.{due_ms % 1000:03d}0000Z",
                "OwningTimeoutManager": "Sales",
                "Headers": {"tenant": "acme"},
            }
        )

    return "\n".join(document(*one) for one in dues).encode()


def as_raven(due_ms: int, _body: bytes) -> Props:
    return as_timeout(f"TimeoutDatas/{due_ms}", {"tenant": "acme"})


# ---- tables


def moment(due_ms: int) -> datetime:
    return datetime.fromtimestamp(due_ms / 1000, UTC).replace(tzinfo=None, microsecond=due_ms % 1000 * 1000)


def as_timeout(id_: str, headers: dict[str, str]) -> Props:
    """A stored timeout as the transport publishes it."""
    said = headers | {RELATED: id_}
    table: tuple[Header, ...] = tuple((name.encode(), text(value)) for name, value in said.items())
    return Props(
        content_type=b"application/octet-stream", headers=table, delivery_mode=2,
        message_id=headers.get(MESSAGE_ID, id_).encode(),
    )  # fmt: skip


def rows_of(place: Field, source: Source, name: str, destination: str) -> tuple[list[dict[str, Any]], list[Owed]]:
    """Timeouts as rows. The header knows the instant better than the column: MariaDB's has whole seconds."""
    rows, owed = [], []
    for n, (due_ms, body) in enumerate(place.dues(name)):
        headers = {EXPIRE: wire_instant(due_ms), MESSAGE_ID: f"{name}-{n}"}
        row = source.timeout(n, moment(due_ms), destination, State=body, Headers=json.dumps(headers, indent=2))
        rows.append(row)
        owed.append(Owed(body, due_ms, as_timeout(str(uuid.UUID(int=n)), headers)))
    return rows, owed


def sql_persistence(kind: str) -> Fill:
    async def fill(place: Field, name: str, queue: str) -> list[Owed]:
        source = place.databases[kind]
        rows, owed = rows_of(place, source, name, queue)
        for table, some in (("Sales_TimeoutData", rows[::3]), ("Mail_TimeoutData", rows[1::3] + rows[2::3])):
            await source.create(table)
            await source.put(table, some)
        return owed

    return fill


def nhibernate(kind: str) -> Fill:
    async def fill(place: Field, name: str, queue: str) -> list[Owed]:
        source = place.databases[kind]
        async with source.connected() as connection:
            await connection.execute(statement(NHIBERNATE[kind]))
        rows, owed = rows_of(place, source, name, f"{queue}@SERVER7")
        for row in rows:
            del row["PersistenceVersion"]
            row["Endpoint"] = "Sales"
        if kind == "postgresql":
            rows = [{key.lower(): value for key, value in row.items()} for row in rows]
        await source.put("timeoutentity" if kind == "postgresql" else "TimeoutEntity", rows)
        return owed

    return fill


# ---- queues


def cascade(kind: Kind) -> Fill:
    async def fill(place: Field, name: str, queue: str) -> list[Owed]:
        shared = Cascade(kind)
        bound = (Binding(shared.delivery, queue, "queue", f"#.{queue}"),) if kind == "celery" else ()
        await place.declare(shared.topology() + Topology(bindings=bound))
        messages, owed = [], []
        for n in range(COUNT):
            seconds, body, began = 10 + n % 10, body_of(name, n), now_ms()
            headers: tuple[Header, ...] = ((b"id", text(f"task-{n}")),)
            if kind != "celery":
                headers = (
                    (b"NServiceBus.TimeSent", text(wire_instant(began))),
                    (b"NServiceBus.Transport.RabbitMQ.DelayInSeconds", number("I", seconds)),
                )
            props = Props(headers=headers, delivery_mode=2, message_id=b"%s-%d" % (name.encode(), n))
            entry = shared.level(27) if kind == "celery" else shared.entry(seconds)
            messages.append(Message(entry, routing_key(seconds, queue.encode()), props, body))
            owed.append(Owed(body, began + seconds * 1000, props))
        await place.raw.publish(*messages)
        return owed

    return fill


async def hold_queues(place: Field, name: str, queue: str) -> list[Owed]:
    """Symfony's, Laravel's, enqueue's, EasyNetQ's and MailerQ's, by the names and arguments that each declares."""
    to_queue = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": queue}
    future = f"{EASYNETQ}_00_00_00_14"
    holds: dict[str, dict[str, Any]] = {
        f"delay_messages_{queue}_10000_delay": {
            "x-dead-letter-exchange": "messages", "x-dead-letter-routing-key": queue,
            "x-message-ttl": 10_000, "x-expires": 20_000,
        },
        f"{queue}.delay.12000": {**to_queue, "x-message-ttl": 12_000, "x-expires": 24_000},
        f"enqueue.{queue}.11000.delayed": {**to_queue, "x-message-ttl": 11_000},
        future: {"x-message-ttl": 14_000, "x-dead-letter-exchange": EASYNETQ, "x-dead-letter-routing-key": "#"},
        "mailerq-16": {**to_queue, "x-message-ttl": 16_000},
    }  # fmt: skip
    await place.declare(
        Topology(
            (Exchange("messages", "direct"), Exchange(EASYNETQ, "topic"), Exchange(future, "topic")),
            tuple(Queue(one, arguments(of)) for one, of in holds.items()),
            (
                Binding("messages", queue, "queue", queue),
                Binding(EASYNETQ, queue, "queue", "#"),
                Binding(future, future, "queue", "#"),
            ),
        )
    )
    messages, owed = [], []
    for n in range(COUNT):
        hold = list(holds)[n % len(holds)]
        body, came = body_of(name, n), now_ms()
        props = Props(
            headers=((b"n", number("l", n)),), delivery_mode=2, message_id=b"%s-%d" % (name.encode(), n),
            timestamp=came // 1000,
        )  # fmt: skip
        through = (future, b"#") if hold == future else ("", hold.encode())
        messages.append(Message(*through, props, body))
        owed.append(Owed(body, came + holds[hold]["x-message-ttl"], props))
    await place.raw.publish(*messages)
    return owed


REWRITE = ("--rewrite-destination", "s/@.*//")
STOCKS: dict[str, Stock] = {
    "cascade of nservicebus-v2": Stock(("cascade",), cascade("nservicebus-v2"), ("--kind", "nservicebus-v2")),
    "cascade of nservicebus-v1": Stock(("cascade",), cascade("nservicebus-v1"), ("--kind", "nservicebus-v1")),
    "cascade of celery": Stock(("cascade",), cascade("celery"), ("--kind", "celery"), "", 8_000),
    "hold-queues": Stock(
        ("hold-queues",), hold_queues,
        ("--queue", "delay_*", "--queue", "*.delay.*", "--queue", "*.delayed", "--queue", "mailerq-*",
         "--queue", f"{EASYNETQ}_*", "--believe-timestamps"),
        "", 2_000,
    ),
    "nservicebus-sql of postgresql": Stock(
        ("nservicebus-sql",), sql_persistence("postgresql"), ("--overdue-too",), "postgresql"
    ),
    "nservicebus-sql of mariadb": Stock(("nservicebus-sql",), sql_persistence("mysql"), ("--overdue-too",), "mysql"),
    "nservicebus-nhibernate of postgresql": Stock(
        ("nservicebus-nhibernate",), nhibernate("postgresql"), ("--overdue-too", *REWRITE), "postgresql"
    ),
    "nservicebus-nhibernate of mariadb": Stock(
        ("nservicebus-nhibernate",), nhibernate("mysql"), ("--overdue-too", *REWRITE), "mysql"
    ),
    "nservicebus-raven": Stock(("nservicebus-raven", "{}"), lines_of(raven, as_raven), REWRITE),
    "delayed-exchange": Stock(("delayed-exchange", "{}"), lines_of(dump, as_plugin), ("--exchange", "held=held.out")),
    "jsonl": Stock(("jsonl", "{}"), lines_of(jsonl, as_plugin)),
}  # fmt: skip


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
