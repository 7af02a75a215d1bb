"""The decoder of segments: a run of messages from one Parquet file to an Arrow table, and to rows of Postgres. Pure.

Import it only once there is a segment, because pyarrow costs a daemon memory that it rarely needs. packing.py writes
the file. Changes follow the rule in format/__init__.py.

Packing 1 (core.segment.FORMAT is the newest) is a plain Parquet file: the columns of :data:`SCHEMA`, sorted by (due_at,
id), in one row group, compressed by zstd. The column ``digest`` of the table segment is the SHA-256 of the file. It is
compared first, so the decoder never sees changed bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from delayer.core.segment import FORMAT, SegmentBroken

INSTANT: Final = pa.timestamp("us", "UTC")
BYTES: Final = ("route", "exchange", "routing_key", "to_exchange", "to_key", "properties", "body")
SCHEMA: Final = pa.schema(
    [
        ("id", pa.int64()),
        ("due_at", INSTANT),
        ("parked_at", INSTANT),
        ("checksum", pa.int64()),
        ("format", pa.int16()),
        *((name, pa.binary()) for name in BYTES),
        ("key", pa.binary()),
    ]
)
"""The columns of a message except its lane, which is the segment's. Only ``key`` may be null."""

COPIED: Final = (*SCHEMA.names, "lane")
"""The columns of :func:`records`."""


def is_complete(table: Any) -> bool:
    """Whether no column except ``key`` has nulls."""
    return not any(table[name].null_count for name in SCHEMA.names if name != "key")


def unpack(packed: bytes, format: int, messages: int, digest: bytes, gone: bytes = b"") -> Any:
    """Decode a segment into a table sorted by (due_at, id), without messages whose bit in ``gone`` is 1 (lowest bit of
    a byte first). Raises SegmentBroken."""
    if format != FORMAT:
        raise SegmentBroken(f"expected a packing of format {FORMAT} or lower, found {format}")
    found = hashlib.sha256(packed).digest()
    if found != digest:
        raise SegmentBroken(f"expected the digest {digest.hex()}, found {found.hex()}: the bytes changed")
    try:
        table = pq.ParquetFile(pa.BufferReader(packed)).read(use_threads=False).combine_chunks()
    except pa.ArrowMemoryError:
        raise  # Says nothing about the segment.
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: column names that are not UTF-8.
        raise SegmentBroken(f"it does not decode: {type(error).__name__}: {str(error).splitlines()[0]}") from error
    if table.schema.remove_metadata() != SCHEMA or not is_complete(table):
        raise SegmentBroken(f"expected the columns {', '.join(SCHEMA.names)}, found {', '.join(table.column_names)}")
    if gone:
        bits = pa.py_buffer(gone.ljust(len(table) // 8 + 1, b"\0"))
        table = table.filter(pc.invert(pa.Array.from_buffers(pa.bool_(), len(table), [None, bits])))
    if len(table) != messages:
        raise SegmentBroken(f"expected {messages} messages, found {len(table)}")
    return table


def records(table: Any, lane: int, portion_bytes: int) -> Iterator[list[tuple[Any, ...]]]:
    """Yield ``table`` (:data:`SCHEMA`) as rows of :data:`COPIED`, in portions of about ``portion_bytes`` bytes of
    bodies and properties."""
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
    """Convert a column of instants to epoch milliseconds, without rounding."""
    return [us // 1000 if us % 1000 == 0 else Decimal(us).scaleb(-3) for us in microseconds(instants)]


def microseconds(instants: Any) -> list[int]:
    """Convert a column of instants to epoch microseconds."""
    found: list[int] = pc.cast(instants, pa.int64()).to_pylist()
    return found
