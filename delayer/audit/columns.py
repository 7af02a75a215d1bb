"""A column of a relation: what of SQL it is made of, and how its values are made, a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from delayer.audit import frames
from delayer.store.rows.envelope import checksum

_TYPES: Final[Mapping[str, pa.DataType]] = {
    "bigint": pa.int64(),
    "int": pa.int32(),
    "string": pa.string(),
    "binary": pa.binary(),
    "boolean": pa.bool_(),
}
# An instant of infinity, or of a year that Arrow has no number for, is as good as one at the end of the calendar. These
# two functions pass over NULL, so not for columns that can be NULL.
CLAMPED: Final = "greatest(least({}, '9999-12-31 00:00+00'), '0001-01-01 00:00+00')"


class Origin(NamedTuple):
    """Where the rows of a batch were read."""

    origin: str
    partition: str | None = None
    segment: int | None = None
    lane: int | None = None


Given = Mapping[str, pa.Array]
"""A batch's columns, by the names they have in SQL."""


class Column(NamedTuple):
    """``needs``: the columns of SQL it is made of, as name -> expression; ``make`` gives the array, of any type that
    can be cast to the column's."""

    type: pa.DataType
    needs: Mapping[str, str]
    make: Callable[[Given, Origin, int], pa.Array]


def plain(kind: str, name: str, sql: str | None = None) -> Column:
    """As it stands there."""
    return Column(_TYPES[kind], {name: sql or name}, lambda given, _origin, _rows: given[name])


def instant(name: str) -> Column:
    """Epoch milliseconds; not for what can be NULL."""
    return Column(pa.int64(), {name: CLAMPED.format(name)}, lambda given, _origin, _rows: epoch_ms(given[name]))


def epoch_ms(instants: pa.Array) -> pa.Array:
    """Milliseconds, rounded down, of timestamps in microseconds."""
    us = instants.cast(pa.timestamp("us", "UTC")).cast(pa.int64())
    ms = pc.divide(us, 1000)
    return pc.subtract(ms, pc.less(us, pc.multiply(ms, 1000)).cast(pa.int64()))


def same(kind: str, value: Callable[[Origin], object]) -> Column:
    """A column with one value for the whole batch."""
    type_ = _TYPES[kind]
    return Column(type_, {}, lambda _given, origin, rows: pa.repeat(pa.scalar(value(origin), type_), rows))


def lane_of(given: Given, origin: Origin, rows: int) -> pa.Array:
    """The rows' own, or that of all of them."""
    return given["lane"] if origin.lane is None else pa.repeat(pa.scalar(origin.lane, pa.int32()), rows)


def crc(given: Given, _origin: Origin, _rows: int) -> pa.Array:
    """The checksum of each message."""
    parts = (given[name].to_pylist() for name in ("exchange", "routing_key", "properties", "body"))
    return pa.array([checksum(*row) for row in zip(*parts, strict=True)], pa.int64())


def digest(given: Given, _origin: Origin, _rows: int) -> pa.Array:
    """Of each body."""
    bodies = given["body"].to_pylist()
    return pa.array([blake2b(body, digest_size=16).digest() for body in bodies], pa.binary())


def key_of(given: Given, _origin: Origin, rows: int) -> pa.Array:
    """What a message can be cancelled by."""
    return given["key"] if "key" in given else pa.nulls(rows, pa.binary())  # what is in a segment has none


@dataclass(frozen=True, slots=True)
class Kind:
    """A relation: the table (``message`` has partitions) and its columns by name, in order."""

    name: str
    table: str
    columns: Mapping[str, Column]
    ddl: str

    def chosen(self, names: Sequence[str]) -> dict[str, Column]:
        """These columns. Raises ValueError for one that is not there."""
        if unknown := [name for name in names if name not in self.columns]:
            there = ", ".join(self.columns)
            raise ValueError(f"{self.name} has no column {', '.join(unknown)}; there are {there}")
        return {name: self.columns[name] for name in names}


def select_list(columns: Iterable[Column]) -> str:
    """What to ask Postgres for, each expression once."""
    needs: dict[str, str] = {}
    for column in columns:
        needs |= column.needs
    return ", ".join(f"{sql} AS {name}" for name, sql in needs.items()) or "true AS nothing"


def schema_of(columns: Mapping[str, Column]) -> pa.Schema:
    """As Spark expects it: everything can be null."""
    return pa.schema([(name, column.type) for name, column in columns.items()])


def made(given: pa.RecordBatch, columns: Mapping[str, Column], schema: pa.Schema, origin: Origin) -> pa.RecordBatch:
    """The batch of ``columns`` from what Postgres (or a segment) gave."""
    named = dict(zip(given.schema.names, given.columns, strict=True))
    arrays = []
    for column in columns.values():
        array = column.make(named, origin, given.num_rows)
        arrays.append(array if array.type == column.type else array.cast(column.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


_SIGNED: Final = {name: name for name in ("exchange", "routing_key", "properties", "body")}
_SPECIAL: Final[Mapping[str, Column]] = {
    "origin": same("string", lambda origin: origin.origin),
    "partition": same("string", lambda origin: origin.partition),
    "segment": same("bigint", lambda origin: origin.segment),
    "lane": Column(pa.int32(), {"lane": "lane"}, lane_of),
    "due_ms": instant("due_at"),
    "parked_ms": instant("parked_at"),
    "held_ms": instant("held_at"),
    "retry_ms": Column(
        pa.int64(),
        {"retry_at": f"CASE WHEN retry_at IS NOT NULL THEN {CLAMPED.format('retry_at')} END"},
        lambda given, _origin, _rows: epoch_ms(given["retry_at"]),
    ),
    "first_due_ms": instant("first_due"),
    "last_due_ms": instant("last_due"),
    "made_ms": instant("made_at"),
    "broken_ms": Column(
        pa.int64(), {"broken_at": "broken_at"}, lambda given, _origin, _rows: epoch_ms(given["broken_at"])
    ),
    "key": Column(pa.binary(), {"key": "key"}, key_of),
    "body": plain("binary", "body"),
    "body_bytes": Column(pa.int64(), {"body": "body"}, lambda given, _o, _r: pc.binary_length(given["body"])),
    "crc": Column(pa.int64(), _SIGNED, crc),
    "body_digest": Column(pa.binary(), {"body": "body"}, digest),
    "packed_bytes": plain("bigint", "packed_bytes", "octet_length(packed)"),
}
_OTHER_LENGTH: Final[Mapping[str, Mapping[str, Column]]] = {
    # Nothing of the body is wanted but its length: Postgres knows it without fetching what lies out of line.
    "body": {"body_bytes": plain("bigint", "body_bytes", "octet_length(body)")},
    # In message_key the key is the point.
    "message_key": {"key": plain("binary", "key")},
    "segment_cancelled": {"segment": plain("bigint", "segment")},
}


def _kind(name: str, table: str, ddl: str) -> Kind:
    special = {**_SPECIAL, **_NULLS, **_OTHER_LENGTH.get(name, {})}
    columns = {}
    for field in ddl.split(","):
        column, kind = field.split()
        columns[column] = special[column] if column in special else plain(kind, column)
    return Kind(name, table, columns, ddl)


def without_body(columns: Mapping[str, Column]) -> dict[str, Column]:
    """The same columns, asked for more cheaply where nothing but the body's length is wanted."""
    others = [name for name, column in columns.items() if "body" in column.needs and name != "body_bytes"]
    return dict(columns) if others else {name: _OTHER_LENGTH["body"].get(name, one) for name, one in columns.items()}


# What only rows of their own have.
_NULLS: Final[Mapping[str, Column]] = {
    field.split()[0]: same(field.split()[1], lambda _origin: None)
    for field in f"{frames.CAME_OUT}, {frames.DAMAGE}".split(",")
}

_MORE: Final = f"body binary, {frames.DAMAGE}"

KINDS: Final[Mapping[str, Kind]] = {
    kind.name: kind
    for kind in (
        _kind("message", "message", f"{frames.SCHEMAS['messages']}, {_MORE}"),
        _kind("held", "held", f"{frames.SCHEMAS['held']}, {_MORE}"),
        # What stands in segments, as messages; and one row a segment, without an id, with what became of it.
        _kind("segment_message", "segment", f"{frames.SCHEMAS['messages']}, {frames.CAME_OUT}, {_MORE}"),
        _kind("segment", "segment", f"{frames.OF_SEGMENTS}, {frames.DAMAGE}"),
        _kind("segment_cancelled", "segment_cancelled", f"{frames.SCHEMAS['tombstones']}, {frames.DAMAGE}"),
        _kind("message_key", "message_key", f"{frames.SCHEMAS['keys']}, {frames.DAMAGE}"),
        _kind("lane", "lane", "number int, epoch bigint, owner string"),
        _kind("counter", "counter", frames.SCHEMAS["counters"]),
    )
}
