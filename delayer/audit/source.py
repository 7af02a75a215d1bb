"""The store as a Spark data source, "delayer": Arrow batches from Postgres, many tasks on one snapshot.

    spark.dataSource.register(bound(url))
    spark.read.format("delayer").option("relation", "message").load()

=============  =========================================================================================================
relation       one of RELATIONS: a table and its columns
snapshot       an exported snapshot (delayer/audit/extract.py). Without it, each task reads the store as of its start
sample         the share of the pages to read, 0 to 1
split_bytes    bytes that one task reads; ``batch_bytes``: bytes that it keeps in memory at a time
=============  =========================================================================================================

Bodies and headers never leave the executor that reads them; :func:`check_message` turns them into the facts the rules
need.

Spark shows options in plans, pages and logs, so the password must not be in them. Instead, :func:`data_source_for`
creates a class that contains the URL. Spark stores it as a pickle and never shows it.

libpq streams, so a task needs memory for one batch, or for one row if that is larger.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b, sha256
from struct import Struct
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema

from delayer.amqp.errors import MalformedProperties, MalformedTable
from delayer.amqp.properties import Properties
from delayer.audit import connection
from delayer.audit.connection import Reading
from delayer.audit.faults import CHANGED, CHECKSUM, NEWER, PARTITION, PROPERTIES, UNKNOWN_FORMAT, UNREADABLE
from delayer.audit.findings import HELD, PACKED, WAITING
from delayer.core.secret import SecretUrl
from delayer.core.segment import FORMAT as SEGMENT_FORMAT
from delayer.core.segment import SegmentBroken
from delayer.core.units import DAY_MS
from delayer.format.rows import FORMAT, checksum
from delayer.store.rows.partitions import day_of

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_FINGERPRINT = Struct(">qIII")


class MessageFacts(NamedTuple):
    """The facts of a message that the rules need. ``size``: bytes of body and properties. ``faults``: usually empty.
    ``fingerprint``: 16 bytes shared by equal messages; None if a key identifies the message, or equality is unknown."""

    size: int
    faults: list[str]
    fingerprint: bytes | None


class StoredMessage(NamedTuple):
    """The input of :func:`check_message`; ``checksum`` as stored."""

    format: int
    checksum: int
    due_ms: int
    exchange: bytes
    routing_key: bytes
    to_exchange: bytes
    to_key: bytes
    key: bytes | None
    properties: bytes
    body: bytes


def check_message(message: StoredMessage) -> MessageFacts:
    """Check a message and gather its facts."""
    format_, stored, due_ms, exchange, routing_key, to_exchange, to_key, key, properties, body = message
    size = len(properties) + len(body)
    if not 1 <= format_ <= FORMAT:  # The meaning of its columns is unknown too.
        return MessageFacts(size, [UNKNOWN_FORMAT], None)
    faults = [] if checksum(exchange, routing_key, properties, body) == stored else [CHECKSUM]
    try:
        parsed = Properties.parse(properties)
        parsed.entries()
    except (MalformedProperties, MalformedTable):
        return MessageFacts(size, [*faults, PROPERTIES], None)
    if key is not None or not (message_id := parsed.short("message_id")):
        return MessageFacts(size, faults, None)
    lengths = _FINGERPRINT.pack(due_ms, len(message_id), len(to_exchange), len(to_key))
    told = lengths + message_id + to_exchange + to_key
    return MessageFacts(size, faults, blake2b(told + blake2b(body).digest(), digest_size=16).digest())


_INT, _LONG, _TEXT, _BYTES = pa.int32(), pa.int64(), pa.string(), pa.binary()
MESSAGES: Final = pa.schema({
    "id": _LONG, "lane": _INT, "due_ms": _LONG, "kind": _TEXT, "segment": _LONG, "route": _BYTES, "to_exchange": _BYTES,
    "to_key": _BYTES, "key": _BYTES, "size": _LONG, "faults": pa.list_(_TEXT), "fingerprint": _BYTES, "retry_ms": _LONG,
})  # fmt: skip
"""Messages of every kind. ``segment``: the id of its segment. ``retry_ms``: the next attempt of a held message. A row
with a segment but without an id means an unreadable segment."""
SEGMENTS: Final = pa.schema({
    "id": _LONG, "lane": _INT, "first_due_ms": _LONG, "last_due_ms": _LONG, "ids": pa.list_(_LONG), "messages": _LONG,
    "cancelled": _LONG, "raw_bytes": _LONG, "packed_bytes": _LONG, "broken_ms": _LONG,
})  # fmt: skip
"""The headers of segments. ``cancelled``: messages cancelled since packing, which no other column counts.
``broken_ms``: when a daemon marked it broken."""
KEYS: Final = pa.schema({"key": _BYTES, "lane": _INT, "due_ms": _LONG, "id": _LONG, "segment": _LONG})

HISTORY: Final = pa.schema({
    "at_ms": _LONG, "what": _TEXT, "route": _BYTES, "to_exchange": _BYTES, "to_key": _BYTES, "late_ms": _LONG,
    "delay_ms": _LONG, "size": _LONG, "kind": _TEXT,
})  # fmt: skip


def _ms(column: str) -> str:
    """SQL for epoch milliseconds. Infinity becomes the end of the calendar; NULL stays NULL."""
    clamped = f"greatest(least({column}, '9999-12-31 00:00+00'), '0001-01-01 00:00+00')"
    return f"CASE WHEN {column} IS NOT NULL THEN floor(extract(epoch FROM {clamped}) * 1000)::bigint END"


_CONTENT: Final = (
    f"id, lane, format, checksum, {_ms('due_at')} AS due_ms, route, exchange, routing_key, to_exchange, to_key, key,"
    " properties, body"
)


_LIVE: Final = (
    "CASE WHEN gone = '' THEN ids ELSE array(SELECT number FROM unnest(ids) WITH ORDINALITY AS one (number, nth)"
    " WHERE CASE WHEN (nth - 1) / 8 < length(gone) THEN get_bit(gone, nth - 1) = 0 ELSE true END) END"
)


class Relation(NamedTuple):
    """How to read ``table``: its ``columns`` in SQL, and the ``schema`` of the resulting rows."""

    table: str
    columns: str
    schema: pa.Schema


RELATIONS: Final[Mapping[str, Relation]] = {
    "message": Relation("message", _CONTENT, MESSAGES),
    "held": Relation("held", f"{_CONTENT}, {_ms('retry_at')} AS retry_ms", MESSAGES),
    "segment_message": Relation("segment", "id, lane, packed, format::int, messages, digest, gone", MESSAGES),
    "segment": Relation(
        "segment",
        f"id, lane, {_ms('first_due')} AS first_due_ms, {_ms('last_due')} AS last_due_ms,"
        f" {_LIVE} AS ids, messages, bit_count(gone) AS cancelled,"
        f" raw_bytes, octet_length(packed) AS packed_bytes, {_ms('broken_at')} AS broken_ms",
        SEGMENTS,
    ),
    "message_key": Relation("message_key", f"key, lane, {_ms('due_at')} AS due_ms, id, segment", KEYS),
    "history": Relation(
        "history", f"{_ms('at')} AS at_ms, what, route, to_exchange, to_key, late_ms, delay_ms, size, kind", HISTORY
    ),
}


def made(schema: pa.Schema, rows: int, columns: Mapping[str, Any]) -> pa.RecordBatch:
    """Build a batch of ``schema``. Missing columns become null; a single value fills all rows."""
    arrays = []
    for field in schema:
        value = columns.get(field.name)
        if not isinstance(value, pa.Array | list):
            value = pa.repeat(pa.scalar(value, field.type), rows)
        arrays.append(pa.array(value, field.type) if isinstance(value, list) else value.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def misplaced(due_ms: int, home: str, days: Collection[int]) -> bool:
    """Whether a row is in the wrong partition, where no claim finds it. The default has every day without its own."""
    day, due_day = day_of(home), due_ms // DAY_MS
    return due_day in days if day is None else due_day != day


def _messages(columns: Mapping[str, Any], rows: int, home: str = "", days: Collection[int] = ()) -> pa.RecordBatch:
    """Check messages. ``home``: their partition, if any. ``days``: the days that have a partition."""
    values = (columns[name].to_pylist() if name in columns else [None] * rows for name in StoredMessage._fields)
    looked = [check_message(StoredMessage(*row)) for row in zip(*values, strict=True)]
    for one, due_ms in zip(looked, columns["due_ms"].to_pylist(), strict=True):
        if home and misplaced(due_ms, home, days):
            one.faults.append(PARTITION)
    told = {name: [getattr(one, name) for one in looked] for name in MessageFacts._fields}
    return made(MESSAGES, rows, {"kind": WAITING if home else HELD, **columns, **told})


def _unpacked(found: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Unpack each segment; an unreadable segment becomes a row without an id, with the reason."""
    from delayer.store.segments import codec  # noqa: PLC0415

    for id_, lane, *about in zip(*(one.to_pylist() for one in found.columns), strict=True):
        packed, format_, _, digest, _ = about
        place = {"kind": PACKED, "segment": id_, "lane": lane}
        try:
            table = codec.unpack(*about)
        except SegmentBroken:
            changed = sha256(packed).digest() != digest
            reason = NEWER if format_ > SEGMENT_FORMAT else CHANGED if changed else UNREADABLE
            yield made(MESSAGES, 1, {**place, "faults": [[reason]]})
            continue
        for part in table.to_batches(max_chunksize=10_000):
            columns = dict(zip(part.schema.names, part.columns, strict=True))
            due_ms = pc.floor_temporal(columns.pop("due_at"), unit="millisecond").cast(pa.timestamp("ms", "UTC"))
            yield _messages({**columns, "due_ms": due_ms.cast(_LONG), **place}, part.num_rows)


SPLIT_BYTES: Final = 64 << 20
"""Bytes that one task reads: seconds of work, and thousands of tasks per terabyte."""
CHUNK_BYTES: Final = 1 << 20
"""Bytes that a sample reads at one place. Neighbours were parked together, so a sample needs many places."""


class HeapTable(NamedTuple):
    """A table with rows: one of RELATIONS, or a partition. ``size``: bytes, including values stored out of line."""

    name: str
    pages: int
    size: int

    @property
    def page_size(self) -> float:
        return self.size / self.pages


class PageRange(NamedTuple):
    """The pages of a table from ``first`` up to, not including, ``after``; None means its end."""

    heap: str
    first: int
    after: int | None

    def condition(self) -> str:
        low = f"ctid >= '({self.first},0)'::tid"
        return low if self.after is None else f"{low} AND ctid < '({self.after},0)'::tid"


Split = tuple[PageRange, ...]
"""The page ranges that one task reads, on one connection."""


def plan_splits(heaps: Iterable[HeapTable], *, split_bytes: int = SPLIT_BYTES, sample: float = 1.0) -> list[Split]:
    """Plan tasks of about ``split_bytes`` over all pages, or a share ``sample``; small tables share a task."""
    splits: list[Split] = []
    gathered: list[PageRange] = []
    filled = 0.0
    for heap in heaps:
        for piece, size in _pieces(heap, split_bytes, sample):
            if gathered and filled + size > split_bytes:
                splits.append(tuple(gathered))
                gathered, filled = [], 0.0
            gathered.append(piece)
            filled += size
    if gathered:
        splits.append(tuple(gathered))
    return splits


def _pieces(heap: HeapTable, split_bytes: int, sample: float) -> Iterator[tuple[PageRange, float]]:
    """Cut a table into page ranges with their bytes. A sample gives each chunk the same chance, and is repeatable."""
    if heap.pages == 0:
        return
    chance = random.Random(heap.name)
    step = max(1, int((split_bytes if sample >= 1.0 else CHUNK_BYTES) / heap.page_size))
    for first in range(0, heap.pages, step):
        after = min(first + step, heap.pages)
        if sample >= 1.0:
            # The last range is open, because the table may have grown between the snapshot and the query of its size.
            yield PageRange(heap.name, first, after if after < heap.pages else None), (after - first) * heap.page_size
        elif chance.random() < sample:
            yield PageRange(heap.name, first, after), (after - first) * heap.page_size


NAME: Final = "delayer"
# A partitioned table has no rows itself, so it is left out. Sizes include values out of line.
_HEAPS: Final = """
SELECT c.relname::text AS name, pg_relation_size(c.oid) / current_setting('block_size')::bigint AS pages,
       pg_table_size(c.oid) AS size
FROM pg_class AS c
WHERE c.relkind = 'r'
  AND (c.oid = '{table}'::regclass OR c.oid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = '{table}'::regclass))
ORDER BY c.relname
"""


class StoreSource(DataSource):
    """The data source; see the module."""

    url: ClassVar[SecretUrl]

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        name = self.options["relation"]
        if name not in RELATIONS:
            raise ValueError(f"no relation {name!r}; there are {', '.join(RELATIONS)}")
        return from_arrow_schema(RELATIONS[name].schema)

    def reader(self, schema: StructType) -> StoreReader:
        return StoreReader(self.options, self.url)


def data_source_for(url: SecretUrl) -> type[StoreSource]:
    """Create a data source that contains the URL, for ``spark.dataSource.register``."""

    class Bound(StoreSource):
        pass

    Bound.url = url  # Not in the class's body, where a traceback could show it.
    return Bound


class Task(InputPartition):
    """The input of one task. ``days``: the days that have a partition, for the reader of the default partition."""

    def __init__(self, split: Split, days: frozenset[int]) -> None:
        super().__init__(split)
        self.split = split
        self.days = days if any(piece.heap == "message_default" for piece in split) else frozenset()


class StoreReader(DataSourceReader):
    """Plans on the driver, reads on the executors. Options: relation, snapshot ("": its own), :func:`plan_splits`'."""

    def __init__(self, options: Mapping[str, str], url: SecretUrl) -> None:
        self._name = options["relation"]
        self._sample = float(options.get("sample", 1))
        self._split_bytes = int(options.get("split_bytes", SPLIT_BYTES))
        first = connection.on_snapshot(options.get("snapshot", ""))
        self._reading = partial(connection.reading, url, first, int(options.get("batch_bytes", 8 << 20)))

    def partitions(self) -> Sequence[InputPartition]:
        """Plan the tasks. Raises StoreLost. Spark requires a task even for an empty relation, which has no page
        ranges."""
        with self._reading() as reading:
            found = [HeapTable(*row) for row in reading.rows(_HEAPS.format(table=RELATIONS[self._name].table))]
        days = frozenset(day for heap in found if (day := day_of(heap.name)) is not None)
        planned = plan_splits(found, split_bytes=self._split_bytes, sample=self._sample)
        return [Task(split, days) for split in planned or [()]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the rows of one task. Raises StoreLost."""
        assert isinstance(partition, Task)
        if not partition.split:
            return
        with self._reading() as reading:
            for piece in partition.split:
                yield from self._piece(reading, piece, partition.days)

    def _piece(self, reading: Reading, piece: PageRange, days: frozenset[int]) -> Iterator[pa.RecordBatch]:
        """Read one page range. Raises StoreLost."""
        name, relation = self._name, RELATIONS[self._name]
        for found in reading.batches(f"SELECT {relation.columns} FROM ONLY {piece.heap} WHERE {piece.condition()}"):
            if name == "segment_message":
                yield from _unpacked(found)
                continue
            columns = dict(zip(found.schema.names, found.columns, strict=True))
            if relation.schema is MESSAGES:
                yield _messages(columns, found.num_rows, piece.heap if name == "message" else "", days)
            else:
                yield made(relation.schema, found.num_rows, columns)
