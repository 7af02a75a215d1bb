"""The store as a Spark data source, "delayer": Arrow batches from Postgres, many tasks on one snapshot.

    spark.dataSource.register(StoreSource)
    spark.read.format("delayer").option("url_file", PATH).option("relation", "message").load()

=============  =========================================================================================================
relation       message, held, segment, segment_message, segment_cancelled, message_key, lane, counter (relations.KINDS)
columns        which ones, with commas; all but ``body`` and ``damage`` if nothing is said. Only what these need is read
snapshot       an exported snapshot (delayer/audit/snapshot.py). Without one each task sees the store of its own moment
url_file       a file with the store's URL, at the same path on every machine
url            the URL, if it has no password in it
sample         the share of the pages to read, 0 to 1; ``seed`` chooses other ones
split_bytes    what one task reads; ``batch_bytes`` what it has in memory at a time
=============  =========================================================================================================

Spark shows options in plans, pages and logs, so no password may stand in one: such a URL is refused. The job itself
uses :func:`bound`, whose class carries the URL inside; Spark keeps that as a pickle, and shows it nowhere.

A page or a value that Postgres cannot read ends the reading. With the column ``damage`` it ends the reading of its
piece (some megabytes) alone: a row that has nothing but this column names the piece and the reason.

Memory is bounded by a batch, or by one row where that is larger: libpq streams, nothing is gathered.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from delayer.audit import connection, relations, splits, unpacking
from delayer.audit.connection import Reading, Unreadable
from delayer.audit.relations import KINDS, Kind
from delayer.audit.rules.damage import Damage
from delayer.audit.splits import Piece, Relation, Split
from delayer.audit.values import Origin
from delayer.core.errors import StoreLost
from delayer.core.secret import SecretUrl, mask

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

NAME: Final = "delayer"
BATCH_BYTES: Final = 8 << 20
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
        columns = tuple(named or (name for name in kind.columns if name not in ("body", "damage")))
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
        at_work = connection.reading(asked.url, asked.snapshot, asked.batch_bytes)
        with at_work as reading, connection.translated(asked.kind.table):
            found = [Relation(*row) for row in reading.rows(_RELATIONS.format(table=asked.kind.table))]
        planned = splits.plan(found, split_bytes=asked.split_bytes, sample=asked.sample, seed=asked.seed)
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
        return unpacking.unpacked(reading, piece, asked.kind.chosen(asked.columns))
    return _rows(reading, piece, asked)


def _rows(reading: Reading, piece: Piece, asked: _Asked) -> Iterator[pa.RecordBatch | Damage]:
    columns = relations.without_body(asked.kind.chosen(asked.columns))
    schema = relations.schema_of(columns)
    origin = Origin("row", partition=piece.relation)
    sql = f"SELECT {relations.select_list(columns.values())} FROM ONLY {piece.relation} WHERE {{}}"

    try:
        for found in reading.batches(sql.format(piece.condition())):
            yield relations.made(found, columns, schema, origin)
    except Unreadable as error:
        yield Damage(piece.relation, str(piece), error.reason)


def _told(damage: Damage, asked: _Asked) -> pa.RecordBatch:
    """A row with nothing in it but what is damaged. Raises StoreLost where nobody asked for that."""
    if "damage" not in asked.columns:
        where = f"{damage.relation}, {damage.place}"
        raise StoreLost(f"{where}: {damage.reason}", "read the column damage too, to read all the others")
    schema = relations.schema_of(asked.kind.chosen(asked.columns))
    values = {"damage": json.dumps(damage._asdict())}
    return pa.RecordBatch.from_arrays(
        [pa.array([values.get(field.name)], field.type) for field in schema], schema=schema
    )
