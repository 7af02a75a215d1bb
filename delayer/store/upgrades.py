"""The store's tables, as SQLAlchemy sees them, and their upgrades by Alembic (`delayer db upgrade`). The scripts in
migrations/ add up to exactly these tables; a test compares both catalogs. The wheel has them in
delayer/store/migrations. schema.py says which schema a store has.

- message: a waiting message, partitioned by its due day; ``id`` is the order of arrival.
- held: a message that its destination did not take. ``kind``, ``reason``, ``may_be_delivered`` and ``isolated`` are
  those of a Hold (core/hold.py). ``retry_at`` is the daemon's next attempt (null: a person decides). ``token`` is the
  x-delayer-id of a message that was published before it was held.
- message_key: the message that a key (header ``x-delay-key``) stands for at present.
- lane: one row for each lane. ``epoch`` grows with every change of owner and fences off the parks of the last one.
  ``watermark`` is the instant where the next owner begins. ``route`` is the limited route that the lane belongs to.
- counter: a number of messages for each lane and kind of event.
- segment: a run of far-future messages of one lane, compacted (segments/codec.py). ``broken`` is the reason why it did
  not read back.
- audit_log: actions of people by hand: who, when, what, on how many messages, and the request (as JSON).
- import_run: an import: its source, its parameters (JSON, without passwords), its progress. ``progress`` is the note by
  which its source goes on behind the last commit. One at a time is open (``ended_at`` is null).
- import_item: the places of records in a file that is being imported, in the order of their due instants.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import asyncpg
from alembic import command
from alembic.config import Config
from sqlalchemy import (
    DDL,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Connection,
    DateTime,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Sequence,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    event,
    func,
    text,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from delayer.core.hold import HoldKind
from delayer.store import pool
from delayer.store.errors import lost, translated
from delayer.store.lanes.locks import LANES, raise_lanes
from delayer.store.schema import CHURN_OPTIONS


def _config() -> Config:
    here = Path(__file__).resolve().parent
    shipped, checkout = here / "migrations", here.parents[1] / "migrations"
    config = Config()
    config.set_main_option("script_location", str(shipped if shipped.is_dir() else checkout).replace("%", "%%"))
    return config


async def upgrade(url: str, lanes: int = LANES) -> None:
    """Bring the schema up to schema.HEAD, in one transaction; then make ``lanes`` lanes, if there are less. Raises
    StoreLost, BadStoreUrl."""

    async def connect() -> asyncpg.Connection:
        # An upgrade of a large store takes as long as it takes.
        return await pool.connect_plain(url, "delayer schema", {"statement_timeout": "0"}, command_seconds=None)

    def run(connection: Connection) -> None:
        config = _config()
        config.attributes["connection"] = connection
        config.attributes["target_metadata"] = metadata
        command.upgrade(config, "head")

    engine = create_async_engine("postgresql+asyncpg://", async_creator=connect, poolclass=NullPool)
    try:
        with translated("schema upgrade"):
            async with engine.begin() as connection:
                await connection.run_sync(run)
    except DBAPIError as error:
        raise lost("schema upgrade", error.orig or error) from error
    finally:
        await engine.dispose()
    await raise_lanes(url, lanes)


COUNT_OPTIONS = {
    "fillfactor": 10,
    "autovacuum_vacuum_scale_factor": 0,
    "autovacuum_vacuum_threshold": 1000,
}

metadata = MetaData()
message_id = Sequence("message_id", data_type=BigInteger(), metadata=metadata)
segment_id = Sequence("segment_id", data_type=BigInteger(), metadata=metadata)
audit_log_id = Sequence("audit_log_id", data_type=BigInteger(), metadata=metadata)
import_run_id = Sequence("import_run_id", data_type=BigInteger(), metadata=metadata)

Instant = DateTime(timezone=True)


def _column(name: str, kind: Any, **more: Any) -> Column[Any]:
    return Column(name, kind, nullable=False, **more)


def _content() -> list[Column[Any]]:
    """The message itself. Byte strings that are only carried are ``bytea``: AMQP's need not be text."""
    return [
        _column("checksum", BigInteger),
        _column("lane", SmallInteger),
        _column("format", SmallInteger),
        _column("route", LargeBinary),
        _column("exchange", LargeBinary),
        _column("routing_key", LargeBinary),
        _column("to_exchange", LargeBinary),
        _column("to_key", LargeBinary),
        _column("properties", LargeBinary),
        _column("body", LargeBinary),
        Column("key", LargeBinary),
    ]


message = Table(
    "message",
    metadata,
    _column("id", BigInteger, server_default=message_id.next_value()),
    _column("due_at", Instant),
    _column("parked_at", Instant, server_default=func.now()),
    *_content(),
    PrimaryKeyConstraint("lane", "due_at", "id", name="message_pkey"),
    postgresql_partition_by="RANGE (due_at)",
)

held = Table(
    "held",
    metadata,
    _column("id", BigInteger, autoincrement=False),
    _column("due_at", Instant),
    _column("parked_at", Instant, server_default=func.now()),
    _column("held_at", Instant, server_default=func.now()),
    Column("retry_at", Instant),
    _column("attempts", Integer),
    *_content(),
    _column("kind", Text),
    _column("reason", Text),
    _column("may_be_delivered", Boolean),
    _column("isolated", Boolean),
    Column("token", LargeBinary),
    PrimaryKeyConstraint("id", name="held_pkey"),
    CheckConstraint(f"kind IN ({', '.join(f'{kind.value!r}' for kind in HoldKind)})", name="held_kind"),
    Index("held_lane_retry_at", "lane", "retry_at", "id"),
)

message_key = Table(
    "message_key",
    metadata,
    _column("key", LargeBinary),
    _column("lane", SmallInteger),
    _column("due_at", Instant),
    _column("id", BigInteger),
    PrimaryKeyConstraint("key", name="message_key_pkey"),
)

lane = Table(
    "lane",
    metadata,
    _column("number", SmallInteger, autoincrement=False),
    _column("epoch", BigInteger),
    _column("owner", Text),
    _column("broker", Text, server_default=""),
    _column("watermark", Instant, server_default=text("'-infinity'")),
    Column("route", LargeBinary),
    PrimaryKeyConstraint("number", name="lane_pkey"),
    UniqueConstraint("route", name="lane_route_key"),
)

counter = Table(
    "counter",
    metadata,
    _column("lane", SmallInteger),
    _column("kind", Text),
    _column("n", BigInteger),
    PrimaryKeyConstraint("lane", "kind", name="counter_pkey"),
    postgresql_with=COUNT_OPTIONS,
)

segment = Table(
    "segment",
    metadata,
    _column("id", BigInteger, server_default=segment_id.next_value()),
    _column("lane", SmallInteger),
    _column("first_due", Instant),
    _column("last_due", Instant),
    _column("first_id", BigInteger),
    _column("last_id", BigInteger),
    _column("messages", Integer),
    _column("raw_bytes", BigInteger),
    _column("format", SmallInteger),
    _column("digest", LargeBinary),
    _column("packed", LargeBinary),
    _column("made_at", Instant, server_default=func.now()),
    Column("broken_at", Instant),
    Column("broken", Text),
    PrimaryKeyConstraint("id", name="segment_pkey"),
    Index("segment_first_due", "first_due"),
)

audit_log = Table(
    "audit_log",
    metadata,
    _column("id", BigInteger, server_default=audit_log_id.next_value()),
    _column("at", Instant, server_default=func.now()),
    _column("who", Text),
    _column("verb", Text),
    _column("messages", BigInteger),
    _column("asked", Text),
    PrimaryKeyConstraint("id", name="audit_log_pkey"),
)

import_run = Table(
    "import_run",
    metadata,
    _column("id", BigInteger, server_default=import_run_id.next_value()),
    _column("began_at", Instant, server_default=func.now()),
    Column("ended_at", Instant),
    _column("who", Text),
    _column("source", Text),
    _column("parameters", Text),
    _column("phase", Text),
    Column("staged", BigInteger),
    _column("parked", BigInteger, server_default=text("0")),
    _column("held", BigInteger, server_default=text("0")),
    _column("superseded", BigInteger, server_default=text("0")),
    Column("progress", Text),
    PrimaryKeyConstraint("id", name="import_run_pkey"),
    Index(
        "import_run_open",
        text("(ended_at IS NULL)"),
        unique=True,
        postgresql_where=text("ended_at IS NULL"),
    ),
)

import_item = Table(
    "import_item",
    metadata,
    _column("run", BigInteger, autoincrement=False),
    _column("due_ms", BigInteger),
    _column("position", BigInteger),
    _column("size", Integer),
    PrimaryKeyConstraint("run", "due_ms", "position", name="import_item_pkey"),
)

# Bodies are stored uncompressed. Postgres's default, pglz, costs more parking time than the disk is worth: 4 KB of JSON
# were parked at 13 k rows/s with it (3.1 KB a row on disk), and at 26 to 35 k/s without (5.8 KB). lz4 is as fast as
# none and as small as pglz, but not every server has it. Bodies under 2 KB stay in their row. Partitions copy this
# setting.
_AS_IS = "ALTER TABLE {} ALTER COLUMN body SET STORAGE EXTERNAL, ALTER COLUMN properties SET STORAGE EXTERNAL"


def _after(table: Table, statement: str) -> None:
    event.listen(table, "after_create", DDL(statement))  # type: ignore[no-untyped-call]


_after(message, _AS_IS.format("message"))
_after(held, _AS_IS.format("held"))
# It is compressed already; and as it is, a piece of it can be read without the rest.
_after(segment, "ALTER TABLE segment ALTER COLUMN packed SET STORAGE EXTERNAL")
_after(message, f"CREATE TABLE message_default PARTITION OF message DEFAULT WITH ({CHURN_OPTIONS})")
