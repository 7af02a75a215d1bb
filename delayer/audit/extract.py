"""The extract: the whole store, or a sample of it, as files of one instant; and the frames over these files.

It is written first and worked on later, so that the snapshot is held for the reading alone. It holds no bodies (see
delayer/audit/frames.py), but keys, headers and destinations: its directory is for this user only, and goes at the end.
"""

from __future__ import annotations

import asyncio
import functools
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

import asyncpg

from delayer.audit import spark as sessions
from delayer.audit.frames import CAME_OUT, DAMAGE, OF_SEGMENTS, SCHEMAS, Facts, Frames
from delayer.core.secret import SecretUrl
from delayer.store import pool, schema
from delayer.store.errors import translated
from delayer.store.rows import partitions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_MORE: Final = {
    "statement_timeout": "0",
    "idle_session_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "lock_timeout": "30s",
}
_NO_TIMEOUT: Final = "SELECT set_config(name, '0', false) FROM pg_settings WHERE name = 'transaction_timeout'"
_LOCK: Final = "LOCK TABLE message, held, message_key, lane, counter, segment, segment_cancelled IN ACCESS SHARE MODE"
_EXPORT: Final = """
SELECT pg_export_snapshot() AS id, clock_timestamp() AS now_ms, pg_is_in_recovery() AS replica,
       current_setting('server_version') AS server
"""
# While a replica streams, and has replayed all that it received, it is up to date. Otherwise it has come as far as the
# last commit that it replayed, or the checkpoint that it started from.
_COME_TO: Final = """
SELECT CASE
    WHEN pg_last_wal_receive_lsn() <= pg_last_wal_replay_lsn()
        AND (SELECT coalesce(status, 'streaming') = 'streaming' FROM pg_stat_wal_receiver)
    THEN clock_timestamp()
    ELSE coalesce(pg_last_xact_replay_timestamp(), (SELECT checkpoint_time FROM pg_control_checkpoint()))
END
"""
_LANES: Final = """
SELECT l.number, l.epoch, l.owner, l.watermark,
       CASE WHEN pg_is_in_recovery() THEN NULL ELSE EXISTS (
           SELECT FROM pg_locks AS k
           WHERE k.locktype = 'advisory' AND k.granted AND k.objsubid = 2
             AND k.database = (SELECT oid FROM pg_database WHERE datname = current_database())
             AND k.classid = 'lane'::regclass AND k.objid = l.number::int::oid
       ) END AS alive
FROM lane AS l
ORDER BY l.number
"""
_COUNTERS: Final = "SELECT lane, kind, n FROM counter ORDER BY lane, kind"
_PARTITIONS: Final = """
SELECT c.relname::text, pg_table_size(c.oid)
FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
WHERE i.inhparent = 'message'::regclass
ORDER BY c.relname
"""

Rows = list[tuple[Any, ...]]


class Snapshot:
    """An exported snapshot, and what the driver itself reads on it: tables of a few rows. Made by :func:`hold`."""

    def __init__(
        self, url: SecretUrl, connection: asyncpg.Connection, runner: asyncio.Runner, id_: str, facts: Facts
    ) -> None:
        self._url = url
        self._connection = connection
        self._runner = runner
        self.id = id_
        self.facts = facts

    def lanes(self) -> Rows:
        """The rows of frames.SCHEMAS["lanes"]. Raises StoreLost, as the others do."""
        return self._fetch("read the lanes", _LANES)

    def counters(self) -> Rows:
        """The rows of frames.SCHEMAS["counters"]."""
        return self._fetch("read the counters", _COUNTERS)

    def partitions(self) -> Rows:
        """The rows of frames.SCHEMAS["partitions"]."""
        return [(name, *_day(name), size) for name, size in self._fetch("list the partitions", _PARTITIONS)]

    def sizes(self, tables: Sequence[str]) -> dict[str, int]:
        """Bytes of these tables that rows may lie in; 0 is empty for certain."""
        sql = "SELECT name, pg_relation_size(name::regclass) FROM unnest($1::text[]) AS name"
        return dict(self._fetch("look at the tables' sizes", sql, list(tables)))

    def _fetch(self, doing: str, sql: str, *arguments: object) -> Rows:
        async def fetch() -> Rows:
            with translated(doing):
                return [tuple(row) for row in await self._connection.fetch(sql, *arguments, timeout=None)]

        return self._runner.run(fetch())


@contextmanager
def hold_snapshot(url: SecretUrl) -> Iterator[Snapshot]:
    """Take the snapshot and keep it until the end of the block. Blocks; not for a thread with a running loop.

    Raises StoreLost, BadStoreUrl, SchemaOutdated.
    """
    with asyncio.Runner() as runner:
        connection = runner.run(_open(url))
        try:
            yield Snapshot(url, connection, runner, *runner.run(_begin(connection)))
        finally:
            runner.run(pool.close(connection))


async def _open(url: SecretUrl) -> asyncpg.Connection:
    return await pool.connect(url.reveal(), "delayer audit snapshot", _MORE)


async def _begin(connection: asyncpg.Connection) -> tuple[str, Facts]:
    with translated("take a snapshot"):
        await schema.check(connection)
        await connection.execute(_NO_TIMEOUT)
        await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        await connection.execute(_LOCK)  # before the snapshot, so that no partition goes in between
        id_, now_ms, replica, server = await connection.fetchrow(_EXPORT)
        at_ms = min(now_ms, await connection.fetchval(_COME_TO)) if replica else now_ms
    return id_, Facts(at_ms, replica=replica, server=server, behind_ms=now_ms - at_ms)


def _day(partition: str) -> tuple[int | None, int | None]:
    """The interval of due instants of a partition, epoch ms."""
    day = partitions.day_of(partition)
    return (None, None) if day is None else (day * partitions.DAY_MS, (day + 1) * partitions.DAY_MS)


Watch = Callable[[str], AbstractContextManager[None]]
"""Shows the progress of what runs inside, under a name."""


class _Part(NamedTuple):
    """One set of files: what the data source reads for it, from which table, and what the progress calls it."""

    relation: str
    table: str
    ddl: str
    said: str
    sampled: bool = False
    """Whether a share of it is enough for a sample."""


_PARTS: Final = {
    "messages": _Part("message", "message", SCHEMAS["messages"], "reading messages", sampled=True),
    "unpacked": _Part(
        "segment_message", "segment", f"{SCHEMAS['messages']}, {CAME_OUT}", "unpacking segments", sampled=True
    ),
    "held": _Part("held", "held", SCHEMAS["held"], "reading held messages"),
    "segments": _Part("segment", "segment", OF_SEGMENTS, "reading segments"),
    "tombstones": _Part("segment_cancelled", "segment_cancelled", SCHEMAS["tombstones"], "reading cancelled messages"),
    "keys": _Part("message_key", "message_key", SCHEMAS["keys"], "reading keys"),
}


@contextmanager
def workplace(work: str | None, spark: SparkSession | None = None) -> Iterator[str]:
    """A fresh directory below ``work`` (a path, or a URL of what the cluster shares), removed at the end; on this
    machine also what killed runs left there.

    None: below the system's directory for temporary files. ``spark`` is needed for a URL.
    """
    if work is None or not urlsplit(work).scheme:
        if work is not None:
            Path(work).mkdir(parents=True, exist_ok=True)
        with sessions.scratch_directory(Path(work or tempfile.gettempdir()), sessions.EXTRACT) as made:
            try:
                yield made.as_uri()
            except (SystemExit, KeyboardInterrupt):
                # Tasks in the middle of their work would make it again, behind the back of who removes it.
                if spark is not None:
                    sessions.end_machine(spark)
                raise
        return
    assert spark is not None
    url = f"{work.rstrip('/')}/{sessions.EXTRACT}{uuid.uuid4().hex}"
    try:
        _make(spark, url)
        yield url
    finally:
        _remove(spark, url)


def _make(spark: SparkSession, url: str) -> None:
    """A directory for this user only, by whatever file system Spark has for it; those without rights have none."""
    jvm, (files, path) = spark._jvm, _found(spark, url)
    assert jvm is not None
    files.mkdirs(path, jvm.org.apache.hadoop.fs.permission.FsPermission("700"))


def _remove(spark: SparkSession, url: str) -> None:
    files, path = _found(spark, url)
    files.delete(path, True)


def _found(spark: SparkSession, url: str) -> tuple[Any, Any]:
    """Hadoop's file system of a URL, and its path there."""
    jvm = spark._jvm
    assert jvm is not None
    path = jvm.org.apache.hadoop.fs.Path(url)
    return path.getFileSystem(spark._jsc.hadoopConfiguration()), path


def take(
    spark: SparkSession, url: SecretUrl, place: str, watch: Watch, *, sample: float = 1.0, seed: int = 0
) -> Frames:
    """Write the extract into ``place`` (a URL of a directory) and give the frames over it.

    Raises StoreLost, BadStoreUrl, SchemaOutdated; Spark's errors, see tasks.translated.
    """
    from delayer.audit import source  # noqa: PLC0415  (needs the extra)

    spark.dataSource.register(source.bound(url))
    with hold_snapshot(url) as held:
        sizes = held.sizes([part.table for part in _PARTS.values() if part.table != "message"])
        parts = {name: part for name, part in _PARTS.items() if sizes.get(part.table, 1)}
        small = {"lanes": held.lanes(), "counters": held.counters(), "partitions": held.partitions()}
        for name, part in parts.items():
            share = sample if part.sampled else 1.0
            options = {"snapshot": held.id, "relation": part.relation, "sample": str(share), "seed": str(seed)}
            read = spark.read.format(source.NAME).options(**options, columns=",".join(_names(_told(part))))
            with watch(part.said):
                read.load().write.parquet(f"{place}/{name}")
        facts = replace(held.facts, sample=sample)
    files = {
        name: spark.read.schema(_told(part)).parquet(f"{place}/{name}")
        if name in parts
        else _made(spark, (), _told(part))
        for name, part in _PARTS.items()
    }
    return _frames(facts, files, {name: _made(spark, rows, SCHEMAS[name]) for name, rows in small.items()})


def _told(part: _Part) -> str:
    """The columns of its files."""
    return f"{part.ddl}, {DAMAGE}"


def _frames(facts: Facts, told: Mapping[str, DataFrame], small: Mapping[str, DataFrame]) -> Frames:
    files = {name: frame.where("damage IS NULL").drop("damage") for name, frame in told.items()}
    first, *others = (frame.select("damage") for frame in told.values())
    damage = functools.reduce(lambda one, other: one.unionByName(other), others, first)
    unpacked = files["unpacked"]
    messages = _names(SCHEMAS["messages"])
    came_out = unpacked.where("id IS NULL").selectExpr("segment AS id", *_names(CAME_OUT))
    return Frames(
        facts=facts,
        messages=files["messages"].unionByName(unpacked.where("id IS NOT NULL").select(*messages)),
        held=files["held"],
        segments=files["segments"].join(came_out, "id", "left").select(*_names(SCHEMAS["segments"])),
        tombstones=files["tombstones"],
        keys=files["keys"],
        damage=damage.where("damage IS NOT NULL")
        .selectExpr(f"from_json(damage, '{SCHEMAS['damage']}') AS told")
        .select("told.*"),
        **small,
    )


def _made(spark: SparkSession, rows: Rows | tuple[()], ddl: str) -> DataFrame:
    return spark.createDataFrame(list(rows), ddl)


def _names(ddl: str) -> list[str]:
    return [field.split()[0] for field in ddl.split(",")]
