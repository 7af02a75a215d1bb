"""The encoder of segments: messages as one Parquet file. Pure. codec.py describes and reads it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from delayer.store.segments.codec import BYTES, INSTANT, SCHEMA, is_complete, microseconds

LEVEL: Final = 6
"""zstd level. With 10,000 messages of bench/ (bodies of 594 bytes, properties of 131, a UUID in each), bytes per
message measured: level 1 129.3, 6 126.5, 9 121.3, 12 117.1."""
ENCODINGS: Final = {
    "id": "DELTA_BINARY_PACKED",
    "due_at": "DELTA_BINARY_PACKED",
    "parked_at": "DELTA_BINARY_PACKED",
    "checksum": "PLAIN",
    "format": "DELTA_BINARY_PACKED",
    "properties": "DELTA_BYTE_ARRAY",
    "body": "DELTA_LENGTH_BYTE_ARRAY",
    "key": "DELTA_BYTE_ARRAY",
}
"""Columns with few values use a dictionary: 0.01 bytes per message each. Measured bytes per message: properties 17.3,
with DELTA_LENGTH_BYTE_ARRAY 18.9. Bodies 71.4, with DELTA_BYTE_ARRAY 71.2 but a third longer to read, as PLAIN 73.1.
Pages of 1 MB take 0.4 % more than one per column, pages of 128 KB 2 %."""


class PackedSegment(NamedTuple):
    """A segment's bytes, and what its row says about them. Instants are epoch milliseconds, rounded down.
    ``raw_bytes``: of bodies and properties. ``ids``: in the order of the messages. ``digest``: see codec.py."""

    packed: bytes
    messages: int
    raw_bytes: int
    first_due_ms: int
    last_due_ms: int
    ids: Sequence[int]
    digest: bytes


def pack(table: Any) -> PackedSegment:
    """Pack a table of :data:`SCHEMA` with at least one row, in any order. Raises ValueError for any other table."""
    if table.schema != SCHEMA or not len(table) or not is_complete(table):
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
    return PackedSegment(
        packed=packed,
        messages=len(table),
        raw_bytes=sum(pc.sum(pc.binary_length(table[name])).as_py() for name in ("properties", "body")),
        first_due_ms=due_us[0] // 1000,
        last_due_ms=due_us[-1] // 1000,
        ids=table["id"].to_pylist(),
        digest=hashlib.sha256(packed).digest(),
    )


def table_of(rows: Sequence[Sequence[Any]]) -> Any:
    """Build a table of :data:`SCHEMA` from at least one row. Instants are epoch microseconds."""
    columns = list(zip(*rows, strict=True))
    arrays = [
        pa.array(column, pa.int64()).cast(field.type) if field.type == INSTANT else pa.array(column, field.type)
        for field, column in zip(SCHEMA, columns, strict=False)
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)
