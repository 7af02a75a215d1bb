"""A column of a relation: what of SQL it is made of, and how its values are made, a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from delayer.store.envelope import checksum

DIGEST_BYTES: Final = 16

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


def lane(given: Given, origin: Origin, rows: int) -> pa.Array:
    """The rows' own, or that of all of them."""
    return given["lane"] if origin.lane is None else pa.repeat(pa.scalar(origin.lane, pa.int32()), rows)


def crc(given: Given, _origin: Origin, _rows: int) -> pa.Array:
    """The checksum of each message."""
    parts = (given[name].to_pylist() for name in ("exchange", "routing_key", "properties", "body"))
    return pa.array([checksum(*row) for row in zip(*parts, strict=True)], pa.int64())


def digest(given: Given, _origin: Origin, _rows: int) -> pa.Array:
    """Of each body."""
    bodies = given["body"].to_pylist()
    return pa.array([blake2b(body, digest_size=DIGEST_BYTES).digest() for body in bodies], pa.binary())


def key(given: Given, _origin: Origin, rows: int) -> pa.Array:
    """What a message can be cancelled by."""
    return given["key"] if "key" in given else pa.nulls(rows, pa.binary())  # what is in a segment has none
