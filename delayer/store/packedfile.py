"""The file that a segment is: Parquet behind two checksums, what stands in it, how it is written and read. Pure; needs
pyarrow.

The rule for changing the packing is that of envelope.py: never change what the bytes mean under a number that was ever
released, keep reading every number from 1 on, leave the stored bytes in the tests alone.

Packing 1 (core.segment.FORMAT is the newest): CRC-32 of all that follows it and CRC-32 of the Parquet file's metadata
and its length (big endian, 4 bytes each), then a Parquet file: the columns of :data:`SCHEMA`, sorted by (due_at, id),
in one row group, compressed by zstd, with checksums of its pages. The checks come before the decoding: a decoder never
sees bytes that are not what was written.

In the file's column ``body`` every decimal digit is ``0``. What they were stands in one more column, ``digits``, in its
first row: of all bodies, one after the other, two a byte (4 bits each, the last byte filled with a 0). Messages of one
kind differ in their numbers, dates and identifiers: without them they are so much alike that it takes a third less.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, Final
from zlib import crc32

import pyarrow as pa
import pyarrow.parquet as pq

from delayer.core.segment import FORMAT
from delayer.store.arrays import DigitsMissing, whole, with_digits, without_digits

NUMBERS: Final = ("id", "due_at", "parked_at", "checksum", "format")
BYTES: Final = ("route", "exchange", "routing_key", "to_exchange", "to_key", "properties", "body")
COLUMNS: Final = (*NUMBERS, *BYTES)
"""The columns of a message but its lane, which is the segment's, and its key: rows with a key are never compacted."""

SCHEMA: Final = pa.schema(
    [
        ("id", pa.int64()),
        ("due_at", pa.timestamp("us", "UTC")),
        ("parked_at", pa.timestamp("us", "UTC")),
        ("checksum", pa.int64()),
        ("format", pa.int16()),
        *((name, pa.binary()) for name in BYTES),
    ]
)

_FILE_SCHEMA: Final = SCHEMA.append(pa.field("digits", pa.binary()))

LEVEL: Final = 7
"""zstd's. 10,000 of bench/orders.py (bodies of 594 bytes, properties of 131, a UUID in each), all columns: bytes a
message, and CPU to pack one: level 1 118.8 in 4.8 us, 3 118.5 in 5.4, 5 114.4 in 7.9, 6 111.6 in 8.5, 7 109.3 in 9.1,
9 108.7 in 11.9, 12 105.3 in 19.7. Unpacking takes 4.7 us at any level. With the digits left in the bodies it was 129.3
at level 1, 126.5 at 6, 121.3 at 9 and 117.1 at 12, by twice the CPU at 6; brotli 124.3 and 118.1 at 5 and 9, by more.
"""
ENCODINGS: Final = {
    "id": "DELTA_BINARY_PACKED",
    "due_at": "DELTA_BINARY_PACKED",
    "parked_at": "DELTA_BINARY_PACKED",
    "checksum": "PLAIN",
    "format": "DELTA_BINARY_PACKED",
    "properties": "DELTA_BYTE_ARRAY",
    "body": "DELTA_LENGTH_BYTE_ARRAY",
}
"""What is the same in most messages goes by dictionary: 0.01 bytes a message each. Measured, in bytes a message, before
digits were taken out of bodies: properties 17.3, with DELTA_LENGTH_BYTE_ARRAY 18.9; bodies 71.4, with DELTA_BYTE_ARRAY
71.2 but a third longer to read, as PLAIN 73.1; ids 3.0, due instants 2.8, instants of parking 4.5 (sorted by id: 1.4,
4.6 and 0.4, and 1 byte less in all); checksums 4.1. Pages of 1 MB take 0.4 % more than one a column, of 128 KB 2 %.
"""
_CHECKS = Struct(">II")
_TAIL: Final = 8  # of a Parquet file: the length of its metadata (little endian, 4 bytes), then its name
_LENGTH = Struct("<I4s")
_MAGIC: Final = b"PAR1"


HEAD: Final = 1 << 16
TAIL: Final = 1 << 12
"""See :func:`ids_of`: 10,000 ids take 30 KB; the metadata 1.1 KB."""
DECODING_ERRORS: Final = (pa.ArrowException, OSError, ValueError)
"""The last for names of columns that are not UTF-8."""


class SegmentBroken(Exception):
    """A segment does not read back. ``reason`` says what was expected and found; it quotes no message."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


def write(table: Any) -> bytes:
    """``table`` of :data:`SCHEMA`, sorted, as a packed file."""
    return framed(_parquet(table))


def read(packed: bytes, format: int) -> Any:
    """The table of a packed file, its digits in their places. Raises SegmentBroken."""
    table = _read(_unframed(packed, format))
    try:
        body = with_digits(whole(table["body"]), b"".join(table["digits"].to_pylist()))
    except DigitsMissing as error:
        raise SegmentBroken(str(error)) from error
    return table.set_column(SCHEMA.get_field_index("body"), SCHEMA.field("body"), body).select(SCHEMA.names)


def ids_of(head: bytes, tail: bytes, size: int, format: int) -> list[int] | None:
    """The ids in a packed file of ``size`` bytes, by its first and last bytes only; None if these are too few.

    :data:`HEAD` and :data:`TAIL` bytes are enough for most. The checks of metadata and page are made, those of the rest
    cannot be. Raises SegmentBroken.
    """
    if len(head) >= size:
        return _ids(_unframed(head[:size], format))
    if format != FORMAT or len(head) < _CHECKS.size or len(tail) < _TAIL:
        raise SegmentBroken(f"expected a packed file of format {FORMAT}, found {size} bytes of format {format}")
    metadata = _TAIL + _metadata_length(tail)
    if metadata > len(tail):
        return None
    expected, found = _CHECKS.unpack_from(head)[1], crc32(memoryview(tail)[-metadata:])
    if found != expected:
        raise SegmentBroken(f"expected the metadata's checksum {expected:08x}, found {found:08x}: the bytes changed")
    sparse = bytearray(size - _CHECKS.size)
    sparse[: len(head) - _CHECKS.size] = memoryview(head)[_CHECKS.size :]
    sparse[len(sparse) - metadata :] = memoryview(tail)[-metadata:]
    buffer = pa.py_buffer(sparse)
    column = _file(buffer).metadata.row_group(0).column(0)
    if column.data_page_offset + column.total_compressed_size > len(head) - _CHECKS.size:
        return None
    return _ids(buffer)


def _parquet(table: Any) -> bytes:
    body, digits = without_digits(whole(table["body"]))
    table = table.set_column(SCHEMA.get_field_index("body"), SCHEMA.field("body"), body)
    table = table.append_column("digits", pa.array([digits] + [b""] * (len(table) - 1), pa.binary()))
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
        write_page_checksum=True,
        store_schema=False,
    )
    return bytes(sink.getvalue())


def framed(parquet: bytes) -> bytes:
    """A Parquet file behind its checksums."""
    metadata = crc32(memoryview(parquet)[-_TAIL - _metadata_length(parquet) :])
    checked = metadata.to_bytes(4, "big") + parquet
    return crc32(checked).to_bytes(4, "big") + checked


def _unframed(packed: bytes, format: int) -> Any:
    """The Parquet file, as a buffer. Raises SegmentBroken."""
    if format != FORMAT:
        raise SegmentBroken(f"expected a packing of format {FORMAT} at most, found {format}")
    if len(packed) < _CHECKS.size + _TAIL:
        raise SegmentBroken(f"expected a packed file, found {len(packed)} bytes")
    expected, _ = _CHECKS.unpack_from(packed)
    found = crc32(memoryview(packed)[4:])
    if found != expected:
        raise SegmentBroken(f"expected the checksum {expected:08x}, found {found:08x}: the bytes changed")
    return pa.py_buffer(packed).slice(_CHECKS.size)


def _metadata_length(parquet: bytes) -> int:
    length, magic = _LENGTH.unpack(parquet[-_TAIL:])
    if magic != _MAGIC:
        raise SegmentBroken("expected a Parquet file, found another end")
    return int(length)


def _ids(parquet: Any) -> list[int]:
    ids: list[int] = _read(parquet, ["id"])["id"].to_pylist()
    return ids


def _file(parquet: Any) -> Any:
    try:
        return pq.ParquetFile(pa.BufferReader(parquet), page_checksum_verification=True)
    except pa.ArrowMemoryError:
        raise  # says nothing about the segment
    except DECODING_ERRORS as error:
        raise _undecoded(error) from error


def _read(parquet: Any, columns: list[str] | None = None) -> Any:
    """Decode a Parquet file. Raises SegmentBroken, also for what is well-formed but not ours."""
    try:
        table = _file(parquet).read(columns, use_threads=False).combine_chunks()
    except pa.ArrowMemoryError:
        raise  # says nothing about the segment
    except DECODING_ERRORS as error:
        raise _undecoded(error) from error
    expected = _FILE_SCHEMA if columns is None else pa.schema([SCHEMA.field(name) for name in columns])
    if table.schema.remove_metadata() != expected or any(column.null_count for column in table.columns):
        raise SegmentBroken(f"expected the columns {', '.join(expected.names)}, found {', '.join(table.column_names)}")
    return table


def _undecoded(error: BaseException) -> SegmentBroken:
    return SegmentBroken(f"it does not decode: {type(error).__name__}: {str(error).splitlines()[0]}")
