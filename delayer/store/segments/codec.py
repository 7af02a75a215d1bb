"""The codec of segments: a run of messages as one compressed file, as Arrow tables, and as rows of Postgres. Pure.

Its users import it only when there is a segment, because pyarrow costs a daemon memory that it rarely needs.

The rule for changes of the packing is that of envelope.py: never change the meaning of bytes under a released number,
keep reading every number from 1 on, and leave the stored bytes in the tests alone.

Packing 1 (core.segment.FORMAT is the newest) begins with three numbers, big endian, 4 bytes each: the CRC-32 of all
that follows it, the CRC-32 of the Parquet file's metadata, and the length of that metadata. A Parquet file follows: the
columns of :data:`SCHEMA`, sorted by (due_at, id), in one row group, compressed by zstd, with checksums of its pages.
The checks come first, so the decoder never sees changed bytes.

Between Postgres and Arrow no Python object is made for a message. A run of rows comes out of Postgres as one row, each
column as one byte string (sql/lock_run.sql). Numbers and instants are Postgres's own 8 bytes, big endian. Of byte
strings come first all lengths in 4 bytes each, then all bytes. The way back is the stream of a binary COPY, which is
built here: 10,000 rows in 0.15 s with 35 ms of CPU, against 0.36 s and 107 ms by copy_records_to_table.
"""

from __future__ import annotations

import hashlib
import hmac
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from struct import Struct
from typing import Any, Final, NamedTuple
from zlib import crc32

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from delayer.core.segment import FORMAT
from delayer.store.pool import POSTGRES_EPOCH_US

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
Ids 3.0, due instants 2.8, instants of parking 4.5, checksums 4.1. Pages of 1 MB take 0.4 % more than one for each
column, pages of 128 KB 2 %."""
_CHECKS = Struct(">II")
_TAIL: Final = 8  # The end of a Parquet file: the length of its metadata (little endian, 4 bytes), then its name.
_LENGTH = Struct("<I4s")
_MAGIC: Final = b"PAR1"


HEAD: Final = 1 << 16
TAIL: Final = 1 << 12
"""See :func:`ids_of`: 10,000 ids take 30 KB; the metadata 1.1 KB."""
DECODING_ERRORS: Final = (pa.ArrowException, OSError, ValueError)
"""The last for names of columns that are not UTF-8."""


COPIED: Final = ("id", "due_at", "parked_at", "checksum", "lane", "format", *BYTES)
"""The columns of :func:`copy_stream`, in its order. ``key`` is not among them: it is null."""
_INSTANTS: Final = ("due_at", "parked_at")
_COPY_HEADER: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_COPY_END: Final = b"\xff\xff"
# The bytes before the first byte string in every row: the number of fields, and each number behind its length.
_FIXED: Final = (
    len(COPIED).to_bytes(2, "big")
    + (b"\0\0\0\x08" + bytes(8)) * 4
    + (b"\0\0\0\x02" + bytes(2)) * 2
)  # fmt: skip
_PLACES: Final = {"id": 6, "due_at": 18, "parked_at": 30, "checksum": 42, "lane": 54, "format": 60}


class SegmentBroken(Exception):
    """A segment does not read back. ``reason`` has the expected and the found; it quotes no message."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


_ORDER: Final = [("due_at", "ascending"), ("id", "ascending")]


class Packed(NamedTuple):
    """A segment's bytes, and what its row says of them. Instants are epoch microseconds."""

    packed: bytes
    messages: int
    raw_bytes: int
    """Bytes of bodies and properties."""
    first_due_us: int
    last_due_us: int
    first_id: int
    last_id: int
    digest: bytes
    """See :func:`digest_of`."""


def pack(table: Any) -> Packed:
    """Pack a table of :data:`SCHEMA` with one row or more, in any order. Raises ValueError for another one."""
    if table.schema != SCHEMA or not len(table) or any(column.null_count for column in table.columns):
        raise ValueError(f"expected rows of {', '.join(COLUMNS)} without nulls, found {len(table)} of {table.schema}")
    table = ordered(table)
    due, ids = integers(table["due_at"]), table["id"]
    sizes = [pc.sum(pc.binary_length(table[name])).as_py() for name in ("properties", "body")]
    return Packed(
        packed=framed(_parquet(table)),
        messages=len(table),
        raw_bytes=sum(sizes),
        first_due_us=due[0].as_py(),
        last_due_us=due[-1].as_py(),
        first_id=pc.min(ids).as_py(),
        last_id=pc.max(ids).as_py(),
        digest=digest_of(table),
    )


def unpack(packed: bytes, format: int, messages: int, digest: bytes) -> Any:
    """The table that was packed, sorted by (due_at, id), once count and digest fit. Raises SegmentBroken."""
    table = _read(_unframed(packed, format))
    if len(table) != messages:
        raise SegmentBroken(f"expected {messages} messages, found {len(table)}")
    found = digest_of(table)
    if not hmac.compare_digest(found, digest):
        raise SegmentBroken(f"expected the digest {digest.hex()}, found {found.hex()}")
    return table


def digest_of(table: Any) -> bytes:
    """SHA-256 over the canonical form of ``table``, which does not depend on the packing; 32 bytes.

    The form begins with the number of rows. Then come the columns in the order of :data:`COLUMNS`: numbers and instants
    (microseconds since 1970) value by value, byte strings with first all lengths and then all bytes. Every number takes
    8 bytes, little endian.
    """
    sha = hashlib.sha256(len(table).to_bytes(8, "little"))
    for name in NUMBERS:
        sha.update(values_of(integers(whole(table[name]))))
    for name in BYTES:
        column = whole(table[name])
        sha.update(values_of(pc.cast(pc.binary_length(column), pa.int64())))
        sha.update(content_of(column))
    return sha.digest()


def ordered(table: Any) -> Any:
    """``table`` sorted by (due_at, id), which it mostly is."""
    indices = pc.sort_indices(table, sort_keys=_ORDER)
    return table if indices.equals(pa.array(range(len(table)), pa.uint64())) else table.take(indices).combine_chunks()


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
        raise  # This tells nothing about the segment.
    except DECODING_ERRORS as error:
        raise _undecoded(error) from error


def _read(parquet: Any, columns: list[str] | None = None) -> Any:
    """Decode a Parquet file. Raises SegmentBroken, also for a well-formed file of another schema."""
    try:
        table = _file(parquet).read(columns, use_threads=False).combine_chunks()
    except pa.ArrowMemoryError:
        raise  # This tells nothing about the segment.
    except DECODING_ERRORS as error:
        raise _undecoded(error) from error
    expected = SCHEMA if columns is None else pa.schema([SCHEMA.field(name) for name in columns])
    if table.schema.remove_metadata() != expected or any(column.null_count for column in table.columns):
        raise SegmentBroken(f"expected the columns {', '.join(expected.names)}, found {', '.join(table.column_names)}")
    return table


def _undecoded(error: BaseException) -> SegmentBroken:
    return SegmentBroken(f"it does not decode: {type(error).__name__}: {str(error).splitlines()[0]}")


def table_of(columns: Mapping[str, bytes]) -> Any:
    """The table (:data:`SCHEMA`) of one row of lock_run.sql: ``columns[name]`` and, of byte strings, their lengths in
    ``columns[name + "_lengths"]``."""
    arrays = [
        _strings(columns[name], columns[f"{name}_lengths"]) if name in BYTES else _numbers(columns[name], name)
        for name in SCHEMA.names
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def content_bytes(table: Any) -> int:
    """The bytes of bodies and properties of a table (:data:`SCHEMA`)."""
    return sum(pc.sum(pc.binary_length(table[name])).as_py() or 0 for name in ("properties", "body"))


def place_behind(table: Any) -> tuple[int, int]:
    """Due instant (epoch microseconds) and id behind the last row of a table that is sorted by them."""
    last = table.slice(len(table) - 1)
    return pc.cast(last["due_at"], pa.int64())[0].as_py(), last["id"][0].as_py() + 1


def copy_stream(table: Any, lane: int, portion_bytes: int) -> Iterator[bytes]:
    """``table`` (:data:`SCHEMA`) as rows of ``lane`` for a binary COPY of :data:`COPIED`, in portions of about
    ``portion_bytes``. A portion may be cut inside a row. Rows are encoded as they are wanted."""
    yield _COPY_HEADER
    for rows in _runs(table, portion_bytes):
        content = memoryview(_rows(rows, lane))
        for start in range(0, len(content), portion_bytes):
            yield bytes(content[start : start + portion_bytes])
    yield _COPY_END


def _runs(table: Any, content_bytes: int) -> Iterator[Any]:
    """Slices of ``table`` with about so many bytes of bodies and properties, and one row at least."""
    sizes = pc.add(*(pc.cast(pc.binary_length(table[name]), pa.int64()) for name in ("properties", "body")))
    ends: list[int] = pc.cumulative_sum(sizes).to_pylist()
    start, before = 0, 0
    while start < len(ends):
        end = max(start + 1, bisect_right(ends, before + content_bytes))
        yield table.slice(start, end - start)
        start, before = end, ends[end - 1]


def _rows(table: Any, lane: int) -> Any:
    """The buffer of all rows, one after another."""
    pieces = [_fixed(table, lane)]
    for name in BYTES:
        column = table[name].combine_chunks()
        pieces += [_every(_big_endian("i", pc.binary_length(column)), 4), column]
    return pc.binary_join_element_wise(*pieces, b"").buffers()[2]


def _fixed(table: Any, lane: int) -> Any:
    """The beginning of every row."""
    width = len(_FIXED)
    rows = bytearray(_FIXED * len(table))
    for name, place in _PLACES.items():
        if name == "lane":
            values = lane.to_bytes(2, "big") * len(table)
        elif name == "format":
            values = bytes(_big_endian("h", table[name].combine_chunks()))
        else:
            integers = pc.cast(table[name].combine_chunks(), pa.int64())
            values = bytes(_big_endian("q", pc.subtract(integers, POSTGRES_EPOCH_US if name in _INSTANTS else 0)))
        size = len(values) // len(table)
        for byte in range(size):
            rows[place + byte :: width] = values[byte::size]
    return _every(rows, width)


def _every(content: Any, width: int) -> Any:
    """An array of byte strings, each of ``width`` bytes."""
    count = len(memoryview(content).cast("B")) // width
    offsets = array("i", range(0, (count + 1) * width, width))
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(content)])


def _strings(content: bytes, lengths: bytes) -> Any:
    count = len(lengths) // 4
    each = pa.Array.from_buffers(pa.int32(), count, [None, pa.py_buffer(_native("i", lengths))])
    ends = pc.cumulative_sum_checked(each)
    if (end := ends[-1].as_py() if count else 0) != len(content):
        raise ValueError(f"expected {end} bytes by the lengths, found {len(content)}")
    offsets = bytes(4) + bytes(memoryview(ends.buffers()[1])[: count * 4])
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(content)])


def _numbers(content: bytes, name: str) -> Any:
    values = pa.Array.from_buffers(pa.int64(), len(content) // 8, [None, pa.py_buffer(_native("q", content))])
    if name in _INSTANTS:
        values = pc.add(values, POSTGRES_EPOCH_US)
    return pc.cast(values, SCHEMA.field(name).type)


def _native(code: str, content: bytes) -> array[int]:
    """Big-endian numbers as this machine has them."""
    values = array(code)
    values.frombytes(content)
    if sys.byteorder == "little":
        values.byteswap()
    return values


def _big_endian(code: str, values: Any) -> array[int]:
    """An Arrow array of integers, big endian."""
    width = array(code).itemsize
    numbers = array(code)
    numbers.frombytes(memoryview(values.buffers()[1])[values.offset * width : (values.offset + len(values)) * width])
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers


def whole(column: Any) -> Any:
    """A column of a table as one array."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def integers(array: Any) -> Any:
    return pc.cast(array, pa.int64())


def values_of(array: Any) -> memoryview:
    """The bytes of an int64 array, 8 a value, as they lie in memory (little endian)."""
    return memoryview(array.buffers()[1])[array.offset * 8 : (array.offset + len(array)) * 8]


def content_of(array: Any) -> memoryview:
    """The bytes of a binary array, one after another."""
    if not len(array):
        return memoryview(b"")
    _, offsets, data = array.buffers()
    bounds = memoryview(offsets).cast("i")
    if data is None:  # All strings are empty.
        return memoryview(b"")
    return memoryview(data)[bounds[array.offset] : bounds[array.offset + len(array)]]
