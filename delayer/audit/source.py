"""The store as a Spark data source, "delayer": Arrow batches from Postgres, many tasks on one snapshot.

    spark.dataSource.register(bound(url))
    spark.read.format("delayer").option("relation", "message").load()

=============  =========================================================================================================
relation       message, held, segment, segment_message, segment_cancelled, message_key, lane, counter (columns.KINDS)
columns        which ones, with commas; all but ``body`` and ``damage`` if nothing is said. Only what these need is read
snapshot       an exported snapshot (delayer/audit/extract.py). Without one each task sees the store of its own moment
sample         the share of the pages to read, 0 to 1; ``seed`` chooses other ones
split_bytes    what one task reads; ``batch_bytes`` what it has in memory at a time
=============  =========================================================================================================

Spark shows options in plans, pages and logs, so no password may stand in one: :func:`bound` makes a class that carries
the URL inside. Spark keeps it as a pickle, and shows it nowhere.

A page or a value that Postgres cannot read ends the reading. With the column ``damage`` it ends the reading of its
piece (some megabytes) alone: a row that has nothing but this column names the piece and the reason.

Memory is bounded by a batch, or by one row where that is larger: libpq streams, nothing is gathered.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from delayer.audit import connection
from delayer.audit.columns import KINDS, Column, Kind, Origin, epoch_ms, made, schema_of, select_list, without_body
from delayer.audit.connection import Reading, Unreadable
from delayer.audit.rules.checks import Damage
from delayer.core.errors import StoreLost
from delayer.core.secret import SecretUrl

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

SPLIT_BYTES: Final = 64 << 20
"""What one task reads: seconds of work, and thousands of tasks for a terabyte."""
CHUNK_BYTES: Final = 1 << 20
"""What a sample takes at a time: neighbours were parked together, so a sample needs many places."""


class Relation(NamedTuple):
    """A table that holds rows. ``size`` is in bytes, with what lies out of line."""

    name: str
    pages: int
    size: int

    @property
    def page_size(self) -> float:
        return self.size / self.pages


class Piece(NamedTuple):
    """The pages ``first`` to ``after`` (not included) of a table; to its end where ``after`` is None."""

    relation: str
    first: int
    after: int | None

    def __str__(self) -> str:
        if self.after is None:
            return f"page {self.first} and all behind it"
        return f"pages {self.first} to {self.after - 1}"

    def condition(self) -> str:
        """For WHERE."""
        low = f"ctid >= '({self.first},0)'::tid"
        return low if self.after is None else f"{low} AND ctid < '({self.after},0)'::tid"


Split = tuple[Piece, ...]
"""What one task reads, on one connection."""


def plan_splits(
    relations: Iterable[Relation], *, split_bytes: int = SPLIT_BYTES, sample: float = 1.0, seed: int = 0
) -> list[Split]:
    """Everything, or a share ``sample`` of the pages, as tasks of about ``split_bytes``; small tables share one."""
    splits: list[Split] = []
    gathered: list[Piece] = []
    filled = 0.0
    for relation in relations:
        for piece, size in _pieces(relation, split_bytes, sample, seed):
            if gathered and filled + size > split_bytes:
                splits.append(tuple(gathered))
                gathered, filled = [], 0.0
            gathered.append(piece)
            filled += size
    if gathered:
        splits.append(tuple(gathered))
    return splits


def _pieces(relation: Relation, split_bytes: int, sample: float, seed: int) -> Iterator[tuple[Piece, float]]:
    """The relation's pieces, each with its bytes."""
    if relation.pages == 0:
        return
    if sample < 1.0:
        yield from _sampled(relation, sample, seed)
        return
    step = max(1, int(split_bytes / relation.page_size))
    for first in range(0, relation.pages, step):
        after = first + step
        # The last one has no end: the table may have grown between the snapshot and the look at its size.
        yield (
            Piece(relation.name, first, after if after < relation.pages else None),
            min(step, relation.pages - first) * relation.page_size,
        )


def _sampled(relation: Relation, sample: float, seed: int) -> Iterator[tuple[Piece, float]]:
    """Each chunk with the same chance: an estimate from them, divided by ``sample``, is a fair one.

    The seed is the caller's, so that a task that is repeated reads the same pages.
    """
    chance = random.Random(f"{seed} {relation.name}")
    step = max(1, int(CHUNK_BYTES / relation.page_size))
    for first in range(0, relation.pages, step):
        if chance.random() < sample:
            after = min(first + step, relation.pages)
            yield Piece(relation.name, first, after), (after - first) * relation.page_size


_PACKED: Final = "SELECT id, lane::int, format::int, messages, digest, packed FROM ONLY segment WHERE {}"
_TOMBSTONES: Final = (
    "SELECT c.segment, c.id FROM segment_cancelled AS c"
    " WHERE c.segment IN (SELECT s.id FROM ONLY segment AS s WHERE {})"
)


class _Packed(NamedTuple):
    """What :data:`_PACKED` gives."""

    id: int
    lane: int
    format: int
    messages: int
    digest: bytes
    packed: bytes


def unpacked(reading: Reading, piece: Piece, columns: dict[str, Column]) -> Iterator[pa.RecordBatch | Damage]:
    """The live messages of each segment of ``piece``; after those of each, a row that says what came out of it, or why
    nothing did. Raises the driver's errors."""
    schema = schema_of(columns)
    condition = piece.condition()
    tombstones: dict[int, list[int]] = {}
    try:
        # First these, for a connection gives one answer at a time.
        for segment, message in reading.rows(_TOMBSTONES.format(condition)):
            tombstones.setdefault(segment, []).append(message)
    except Unreadable as error:  # nobody may say of any of their messages that it waits
        yield Damage("segment_cancelled", f"what was cancelled in the segments of {piece}", error.reason)
        return
    try:
        for found in reading.batches(_PACKED.format(condition)):
            for row in range(found.num_rows):
                packed = _Packed(*(column[row].as_py() for column in found.columns))
                yield from _segment(packed, tombstones.get(packed.id, []), columns, schema)
    except Unreadable as error:
        yield Damage(piece.relation, str(piece), error.reason)


def _segment(
    one: _Packed, tombstones: list[int], columns: dict[str, Column], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    from delayer.store.segments import codec  # noqa: PLC0415

    try:
        table = codec.unpack(one.packed, one.format, one.messages, one.digest)
    except codec.SegmentBroken as broken:
        yield _summary(schema, segment=one.id, lane=one.lane, fault=broken.reason)
        return
    live = codec.without(table, tombstones)
    origin = Origin("segment", segment=one.id, lane=one.lane)
    # Rows of an unpacked segment that travel together.
    for part in live.to_batches(max_chunksize=10_000):
        yield made(part, columns, schema, origin)
    due_ms = epoch_ms(table["due_at"].combine_chunks())
    yield _summary(
        schema,
        segment=one.id,
        lane=one.lane,
        unpacked=table.num_rows,
        live=live.num_rows,
        found_first_due_ms=pc.min(due_ms).as_py(),
        found_last_due_ms=pc.max(due_ms).as_py(),
        found_first_id=pc.min(table["id"]).as_py(),
        found_last_id=pc.max(table["id"]).as_py(),
        found_raw_bytes=sum(pc.sum(pc.binary_length(table[name])).as_py() for name in ("properties", "body")),
    )


def _summary(schema: pa.Schema, **known: object) -> pa.RecordBatch:
    values = {"origin": "segment", **known}
    return pa.RecordBatch.from_arrays(
        [pa.array([values.get(field.name)], field.type) for field in schema], schema=schema
    )


NAME: Final = "delayer"
# Sizes with what lies out of line, the tables that rows lie in only: a partitioned one has none of its own.
_RELATIONS: Final = """
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
    def of(cls, options: Any, url: SecretUrl) -> _Asked:
        relation = options.get("relation", "message")
        if relation not in KINDS:
            raise ValueError(f"no relation {relation!r}; there are {', '.join(KINDS)}")
        kind = KINDS[relation]
        named = [name.strip() for name in options.get("columns", "").split(",") if name.strip()]
        columns = tuple(named or (name for name in kind.columns if name not in ("body", "damage")))
        kind.chosen(columns)
        return cls(
            url=url,
            kind=kind,
            columns=columns,
            snapshot=options.get("snapshot", ""),
            sample=float(options.get("sample", "1")),
            seed=int(options.get("seed", "0")),
            split_bytes=int(options.get("split_bytes", SPLIT_BYTES)),
            batch_bytes=int(options.get("batch_bytes", (8 << 20))),
        )

    @property
    def ddl(self) -> str:
        types = dict(field.split() for field in self.kind.ddl.split(","))
        return ", ".join(f"{name} {types[name]}" for name in self.columns)


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
        at_work = connection.reading(asked.url, asked.snapshot, asked.batch_bytes)
        with at_work as reading, connection.translated(asked.kind.table):
            found = [Relation(*row) for row in reading.rows(_RELATIONS.format(table=asked.kind.table))]
        planned = plan_splits(found, split_bytes=asked.split_bytes, sample=asked.sample, seed=asked.seed)
        return [Task(split) for split in planned or [()]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Raises StoreLost."""
        assert isinstance(partition, Task)
        if not partition.split:
            return
        asked = self._asked
        with connection.reading(asked.url, asked.snapshot, asked.batch_bytes) as reading:
            for piece in partition.split:
                with connection.translated(piece.relation):
                    for found in _read(reading, piece, asked):
                        yield _told(found, asked) if isinstance(found, Damage) else found


def _read(reading: Reading, piece: Piece, asked: _Asked) -> Iterator[pa.RecordBatch | Damage]:
    if asked.kind.name == "segment_message":
        return unpacked(reading, piece, asked.kind.chosen(asked.columns))
    return _rows(reading, piece, asked)


def _rows(reading: Reading, piece: Piece, asked: _Asked) -> Iterator[pa.RecordBatch | Damage]:
    columns = without_body(asked.kind.chosen(asked.columns))
    schema = schema_of(columns)
    origin = Origin("row", partition=piece.relation)
    sql = f"SELECT {select_list(columns.values())} FROM ONLY {piece.relation} WHERE {{}}"

    try:
        for found in reading.batches(sql.format(piece.condition())):
            yield made(found, columns, schema, origin)
    except Unreadable as error:
        yield Damage(piece.relation, str(piece), error.reason)


def _told(damage: Damage, asked: _Asked) -> pa.RecordBatch:
    """A row with nothing in it but what is damaged. Raises StoreLost where nobody asked for that."""
    if "damage" not in asked.columns:
        where = f"{damage.relation}, {damage.place}"
        raise StoreLost(f"{where}: {damage.reason}", "read the column damage too, to read all the others")
    schema = schema_of(asked.kind.chosen(asked.columns))
    values = {"damage": json.dumps(damage._asdict())}
    return pa.RecordBatch.from_arrays(
        [pa.array([values.get(field.name)], field.type) for field in schema], schema=schema
    )
