"""The store as a Spark data source, "delayer": Arrow batches from Postgres, many tasks on one snapshot.

    spark.dataSource.register(StoreSource)
    spark.read.format("delayer").option("url_file", PATH).option("relation", "message").load()

=============  =========================================================================================================
relation       message, held, segment, segment_message, segment_cancelled, message_key, lane, counter (relations.KINDS)
columns        which ones, with commas between them; all but ``body``, if nothing is said. Only what these need is read
snapshot       an exported snapshot (delayer/audit/snapshot.py). Without one each task sees the store of its own moment
url_file       a file with the store's URL, at the same path on every machine
url            the URL, if it has no password in it
sample         the share of the pages to read, 0 to 1; ``seed`` chooses other ones
split_bytes    what one task reads; ``batch_bytes`` what it has in memory at a time
=============  =========================================================================================================

Spark shows options in plans, pages and logs, so no password may stand in one: such a URL is refused. The job itself
uses :func:`bound`, whose class carries the URL inside; Spark keeps that as a pickle, and shows it nowhere.

Memory is bounded by a batch, or by one row where that is larger: libpq streams, nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from delayer.audit import libpq, relations, snapshot, splits
from delayer.audit.relations import KINDS, Kind, Origin
from delayer.audit.splits import Piece, Relation, Split
from delayer.core.errors import StoreLost
from delayer.settings.secret import SecretUrl, mask

if TYPE_CHECKING:
    from adbc_driver_postgresql.dbapi import Connection
    from pyspark.sql.types import StructType

NAME: Final = "delayer"
BATCH_BYTES: Final = 8 << 20
SEGMENT_ROWS: Final = 10_000
"""Rows of an unpacked segment that travel together."""
_BATCH_HINT: Final = "adbc.postgresql.batch_size_hint_bytes"

# Sizes with what lies out of line, the tables that rows lie in only: a partitioned one has none of its own.
_RELATIONS: Final = """
SELECT c.relname::text AS name, pg_relation_size(c.oid) / current_setting('block_size')::bigint AS pages,
       pg_table_size(c.oid) AS size
FROM pg_class AS c
WHERE c.relkind = 'r'
  AND (c.oid = '{table}'::regclass OR c.oid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = '{table}'::regclass))
ORDER BY c.relname
"""
_PACKED: Final = "SELECT id, lane::int, format::int, messages, digest, packed FROM ONLY segment WHERE {}"
_TOMBSTONES: Final = (
    "SELECT c.segment, c.id FROM segment_cancelled AS c"
    " WHERE c.segment IN (SELECT s.id FROM ONLY segment AS s WHERE {}) ORDER BY c.segment"
)
# Each task's transaction: of the snapshot, and not to be ended by a limit that was made for others.
_SESSION: Final = (
    "SET LOCAL statement_timeout = 0",
    "SET LOCAL idle_in_transaction_session_timeout = 0",
    "SET LOCAL jit = off",
    "SET LOCAL timezone = 'UTC'",
    "SET LOCAL max_parallel_workers_per_gather = 0",
    snapshot.NO_TIMEOUT.format("true"),
)


class StoreSource(DataSource):
    """The data source; see the module."""

    url: ClassVar[SecretUrl | None] = None

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        return _Asked.of(self.options, self.url).ddl

    def reader(self, schema: StructType) -> StoreReader:
        return StoreReader(_Asked.of(self.options, self.url))


def bound(url: SecretUrl) -> type[StoreSource]:
    """The data source with the URL inside, for ``spark.dataSource.register``."""

    class Bound(StoreSource):
        pass

    Bound.url = url  # not in the class's body, where a traceback could show it
    return Bound


@dataclass(frozen=True, slots=True)
class _Asked:
    """The options, read once. Raises ValueError for what does not fit."""

    url: SecretUrl
    kind: Kind
    columns: tuple[str, ...]
    snapshot: str
    sample: float
    seed: int
    split_bytes: int
    batch_bytes: int

    @classmethod
    def of(cls, options: Any, url: SecretUrl | None) -> _Asked:
        relation = options.get("relation", "message")
        if relation not in KINDS:
            raise ValueError(f"no relation {relation!r}; there are {', '.join(KINDS)}")
        kind = KINDS[relation]
        named = [name.strip() for name in options.get("columns", "").split(",") if name.strip()]
        columns = tuple(named or (name for name in kind.columns if name != "body"))
        kind.chosen(columns)
        return cls(
            url=url or _url_of(options),
            kind=kind,
            columns=columns,
            snapshot=options.get("snapshot", ""),
            sample=float(options.get("sample", "1")),
            seed=int(options.get("seed", "0")),
            split_bytes=int(options.get("split_bytes", splits.SPLIT_BYTES)),
            batch_bytes=int(options.get("batch_bytes", BATCH_BYTES)),
        )

    @property
    def ddl(self) -> str:
        types = dict(field.split() for field in self.kind.ddl.split(","))
        return ", ".join(f"{name} {types[name]}" for name in self.columns)


def _url_of(options: Any) -> SecretUrl:
    if path := options.get("url_file"):
        return SecretUrl(Path(path).read_text(encoding="utf-8").strip())
    if url := options.get("url"):
        if mask(url) != url:
            raise ValueError("the option url has a password in it, which Spark would show: use url_file")
        return SecretUrl(url)
    raise ValueError("where is the store? Expected the option url_file, or url without a password")


@dataclass
class Task(InputPartition):
    """What one task reads, and on which snapshot."""

    split: Split

    def __init__(self, split: Split) -> None:
        super().__init__(split)
        self.split = split


class StoreReader(DataSourceReader):
    """Plans on the driver, reads on the executors."""

    def __init__(self, asked: _Asked) -> None:
        self._asked = asked

    def partitions(self) -> list[InputPartition]:
        """At least one, for Spark wants that; without a piece in it where the relation is empty. Raises StoreLost."""
        asked = self._asked
        with (
            connected(asked.url, asked.snapshot) as connection,
            _translated(asked.kind.table),
            connection.cursor() as cursor,
        ):
            cursor.execute(_RELATIONS.format(table=asked.kind.table))
            found = [Relation(*row) for row in cursor.fetchall()]
        planned = splits.plan(found, split_bytes=asked.split_bytes, sample=asked.sample, seed=asked.seed)
        return [Task(split) for split in planned or [()]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Raises StoreLost."""
        assert isinstance(partition, Task)
        if not partition.split:
            return
        asked = self._asked
        with connected(asked.url, asked.snapshot) as connection:
            for piece in partition.split:
                with _translated(piece.relation):
                    if asked.kind.name == "segment_message":
                        yield from _unpacked(connection, piece, asked)
                    else:
                        yield from _rows(connection, piece, asked)


@contextmanager
def connected(url: SecretUrl, on: str) -> Iterator[Connection]:
    """A connection in a transaction that only reads, on that snapshot if there is one. Raises StoreLost."""
    from adbc_driver_postgresql import dbapi  # noqa: PLC0415  (the driver's process need not load it to plan)

    with _translated("connect"):
        connection = dbapi.connect(libpq.url(url.reveal(), "delayer audit"), autocommit=False)
    with closing(connection):
        with _translated("take the snapshot"), connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            if on:
                cursor.execute(f"SET TRANSACTION SNAPSHOT '{_quoted(on)}'")
            for statement in _SESSION:
                cursor.execute(statement)
        yield connection


def _quoted(text: str) -> str:
    return text.replace("'", "''")


@contextmanager
def _translated(doing: str) -> Iterator[None]:
    """The driver's errors as StoreLost. Without their cause: Spark prints causes, and a driver may quote the URL."""
    from adbc_driver_postgresql import dbapi  # noqa: PLC0415

    try:
        yield
    except dbapi.Error as error:
        first, *_ = str(error).strip().splitlines() or [""]
        raise StoreLost(f"{doing}: {mask(first)}", advice_for(first)) from None


def advice_for(text: str) -> str:
    """What a person can do about a driver's error, or nothing."""
    if "conflict with recovery" in text:
        return (
            "the replica gave up our snapshot to catch up with its primary: set hot_standby_feedback = on there, or "
            "raise max_standby_streaming_delay"
        )
    if "invalid snapshot identifier" in text:
        return "the connection that held the snapshot is gone: run the job again"
    return ""


def _batches(connection: Connection, sql: str, batch_bytes: int) -> Iterator[pa.RecordBatch]:
    with connection.cursor() as cursor:
        cursor.adbc_statement.set_options(**{_BATCH_HINT: str(batch_bytes)})
        cursor.execute(sql)
        with cursor.fetch_record_batch() as reader:
            for batch in reader:
                if batch.num_rows:
                    yield batch


def _rows(connection: Connection, piece: Piece, asked: _Asked) -> Iterator[pa.RecordBatch]:
    columns = relations.without_body(asked.kind.chosen(asked.columns))
    schema = relations.schema_of(columns)
    origin = Origin("row", partition=piece.relation)
    sql = f"SELECT {relations.select_list(columns.values())} FROM ONLY {piece.relation} WHERE {piece.condition()}"
    for batch in _batches(connection, sql, asked.batch_bytes):
        yield relations.made(batch, columns, schema, origin)


def _unpacked(connection: Connection, piece: Piece, asked: _Asked) -> Iterator[pa.RecordBatch]:
    """The live messages of each segment, and then a row that says how many came out, or why none did."""
    from delayer.store import packing  # noqa: PLC0415

    columns = asked.kind.chosen(asked.columns)
    schema = relations.schema_of(columns)
    tombstones: dict[int, list[int]] = {}
    for batch in _batches(connection, _TOMBSTONES.format(piece.condition()), asked.batch_bytes):
        for segment, message in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            tombstones.setdefault(segment, []).append(message)
    for batch in _batches(connection, _PACKED.format(piece.condition()), asked.batch_bytes):
        for row in range(batch.num_rows):
            id_, lane, format_, messages, digest, packed = (column[row].as_py() for column in batch.columns)
            try:
                table = packing.unpack(packed, format_, messages, digest)
            except packing.SegmentBroken as broken:
                yield _summary(schema, id_, lane, None, broken.reason)
                continue
            live = packing.without(table, tombstones.get(id_, []))
            origin = Origin("segment", segment=id_, lane=lane)
            for part in live.to_batches(max_chunksize=SEGMENT_ROWS):
                yield relations.made(part, columns, schema, origin)
            yield _summary(schema, id_, lane, table.num_rows, None)


def _summary(schema: pa.Schema, segment: int, lane: int, unpacked: int | None, fault: str | None) -> pa.RecordBatch:
    known = {"origin": "segment", "segment": segment, "lane": lane, "unpacked": unpacked, "fault": fault}
    return pa.RecordBatch.from_arrays(
        [pa.array([known.get(field.name)], field.type) for field in schema], schema=schema
    )
