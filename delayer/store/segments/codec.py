"""The codec of segments: a run of messages as one Parquet file, as an Arrow table, and as rows of Postgres. Pure.

Its users import it only when there is a segment, because pyarrow costs a daemon memory that it rarely needs.

The rule for changes of the packing is that of envelope.py: never change the meaning of bytes under a released number,
keep reading every number from 1 on, and leave the stored bytes in the tests alone.

Packing 1 (core.segment.FORMAT is the newest) is a plain Parquet file: the columns of :data:`SCHEMA`, sorted by (due_at,
id), in one row group, compressed by zstd. The column ``digest`` of the table segment is the SHA-256 of the file. It is
compared first, so the decoder never sees changed bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from delayer.core.segment import FORMAT

_INSTANT: Final = pa.timestamp("us", "UTC")
BYTES: Final = ("route", "exchange", "routing_key", "to_exchange", "to_key", "properties", "body")
SCHEMA: Final = pa.schema(
    [
        ("id", pa.int64()),
        ("due_at", _INSTANT),
        ("parked_at", _INSTANT),
        ("checksum", pa.int64()),
        ("format", pa.int16()),
        *((name, pa.binary()) for name in BYTES),
    ]
)
"""The columns of a message but its lane, which is the segment's, and its key: rows with a key are never compacted."""

LEVEL: Final = 6
"""The level of zstd. Measured with 10,000 messages of bench/ (bodies of 594 bytes, properties of 131, a UUID in each),
in bytes a message: level 1 129.3, 6 126.5, 9 121.3, 12 117.1."""
ENCODINGS: Final = {
    "id": "DELTA_BINARY_PACKED",
    "due_at": "DELTA_BINARY_PACKED",
    "parked_at": "DELTA_BINARY_PACKED",
    "checksum": "PLAIN",
    "format": "DELTA_BINARY_PACKED",
    "properties": "DELTA_BYTE_ARRAY",
    "body": "DELTA_LENGTH_BYTE_ARRAY",
}
"""Columns with few values use a dictionary: 0.01 bytes a message each. Measured, in bytes a message: properties 17.3,
with DELTA_LENGTH_BYTE_ARRAY 18.9. Bodies 71.4, with DELTA_BYTE_ARRAY 71.2 but a third longer to read, as PLAIN 73.1.
Pages of 1 MB take 0.4 % more than one for each column, pages of 128 KB 2 %."""
COPIED: Final = (*SCHEMA.names, "lane")
"""The columns of :func:`records`. ``key`` is not among them: it is null."""


class SegmentBroken(Exception):
    """A segment does not read back. ``reason`` has the expected and the found; it quotes no message."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class Packed(NamedTuple):
    """A segment's bytes, and what its row says of them. Instants are epoch milliseconds, rounded down. ``raw_bytes``:
    of bodies and properties. ``ids``: in the order of the messages. ``digest``: see the module."""

    packed: bytes
    messages: int
    raw_bytes: int
    first_due_ms: int
    last_due_ms: int
    ids: Sequence[int]
    digest: bytes


def pack(table: Any) -> Packed:
    """Pack a table of :data:`SCHEMA` with one row or more, in any order. Raises ValueError for another one."""
    if table.schema != SCHEMA or not len(table) or any(column.null_count for column in table.columns):
        raise ValueError(f"expected rows of {', '.join(SCHEMA.names)}, found {len(table)} of {table.schema}")
    table = table.sort_by([("due_at", "ascending"), ("id", "ascending")])
    due_us = microseconds(table["due_at"])
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        row_group_size=len(table),
        compression="zstd",
        compression_level=LEVEL,
        use_dictionary=[name for name in BYTES if name not in ENCODINGS],
        column_encoding=ENCODINGS,
        data_page_size=1 << 30,
        write_statistics=False,
        store_schema=False,
    )
    packed = bytes(sink.getvalue())
    return Packed(
        packed=packed,
        messages=len(table),
        raw_bytes=sum(pc.sum(pc.binary_length(table[name])).as_py() for name in ("properties", "body")),
        first_due_ms=due_us[0] // 1000,
        last_due_ms=due_us[-1] // 1000,
        ids=table["id"].to_pylist(),
        digest=hashlib.sha256(packed).digest(),
    )


def unpack(packed: bytes, format: int, messages: int, digest: bytes) -> Any:
    """The table that was packed, sorted by (due_at, id). Raises SegmentBroken."""
    if format != FORMAT:
        raise SegmentBroken(f"expected a packing of format {FORMAT} at most, found {format}")
    found = hashlib.sha256(packed).digest()
    if found != digest:
        raise SegmentBroken(f"expected the digest {digest.hex()}, found {found.hex()}: the bytes changed")
    try:
        table = pq.ParquetFile(pa.BufferReader(packed)).read(use_threads=False).combine_chunks()
    except pa.ArrowMemoryError:
        raise  # This tells nothing about the segment.
    except (pa.ArrowException, OSError, ValueError) as error:  # The last for names of columns that are not UTF-8.
        raise SegmentBroken(f"it does not decode: {type(error).__name__}: {str(error).splitlines()[0]}") from error
    if table.schema.remove_metadata() != SCHEMA or any(column.null_count for column in table.columns):
        raise SegmentBroken(f"expected the columns {', '.join(SCHEMA.names)}, found {', '.join(table.column_names)}")
    if len(table) != messages:
        raise SegmentBroken(f"expected {messages} messages, found {len(table)}")
    return table


def table_of(rows: Sequence[Sequence[Any]]) -> Any:
    """A table of :data:`SCHEMA` from rows with at least one. Instants are epoch microseconds."""
    columns = list(zip(*rows, strict=True))
    arrays = [
        pa.array(column, pa.int64()).cast(field.type) if field.type == _INSTANT else pa.array(column, field.type)
        for field, column in zip(SCHEMA, columns, strict=False)
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def records(table: Any, lane: int, portion_bytes: int) -> Iterator[list[tuple[Any, ...]]]:
    """``table`` (:data:`SCHEMA`) as rows of :data:`COPIED`, in portions of about ``portion_bytes`` bytes of bodies and
    properties. Rows are made as they are wanted."""
    start, size = 0, 0
    sizes = pc.add(*(pc.cast(pc.binary_length(table[name]), pa.int64()) for name in ("properties", "body")))
    for end, more in enumerate(sizes.to_pylist(), 1):
        size += more
        if size >= portion_bytes or end == len(table):
            part = table.slice(start, end - start)
            columns = [_exact(part[name]) if name.endswith("_at") else part[name].to_pylist() for name in SCHEMA.names]
            yield list(zip(*columns, [lane] * len(part), strict=True))
            start, size = end, 0


def _exact(instants: Any) -> list[int | Decimal]:
    """A column of instants as epoch milliseconds, not rounded."""
    return [us // 1000 if us % 1000 == 0 else Decimal(us).scaleb(-3) for us in microseconds(instants)]


def microseconds(instants: Any) -> list[int]:
    """A column of instants as epoch microseconds."""
    found: list[int] = pc.cast(instants, pa.int64()).to_pylist()
    return found
