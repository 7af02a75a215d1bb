"""Messages between Postgres and Arrow, column by column: no Python object is made for a message on the way.

Out of Postgres a run of rows comes as one row, each column as one byte string (sql/lock_run.sql): numbers and instants
in Postgres's own 8 bytes, big endian; of byte strings all the lengths in 4 bytes each, and all the bytes. Into Postgres
it goes as the stream of a binary COPY, which is put together here. Pure; needs pyarrow.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from delayer.store.packing import BYTES, SCHEMA

COLUMNS: Final = ("id", "due_at", "parked_at", "checksum", "lane", "format", *BYTES)
"""The columns of :func:`copy_stream`, in its order. ``key`` is not among them: it is null."""
_POSTGRES_EPOCH_US: Final = 946_684_800_000_000  # 2000-01-01
_INSTANTS: Final = ("due_at", "parked_at")
_COPY_HEADER: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_COPY_END: Final = b"\xff\xff"
# What stands before the first byte string in every row: the number of fields, and each number behind its length.
_FIXED: Final = (
    len(COLUMNS).to_bytes(2, "big")
    + (b"\0\0\0\x08" + bytes(8)) * 4
    + (b"\0\0\0\x02" + bytes(2)) * 2
)  # fmt: skip
_PLACES: Final = {"id": 6, "due_at": 18, "parked_at": 30, "checksum": 42, "lane": 54, "format": 60}


def table_of(columns: Mapping[str, bytes]) -> Any:
    """The table (packing.SCHEMA) of one row of lock_run.sql: ``columns[name]`` and, of byte strings, their lengths in
    ``columns[name + "_lengths"]``."""
    arrays = [
        _strings(columns[name], columns[f"{name}_lengths"]) if name in BYTES else _numbers(columns[name], name)
        for name in SCHEMA.names
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def content_bytes(table: Any) -> int:
    """The bytes of bodies and properties of a table (packing.SCHEMA)."""
    return sum(pc.sum(pc.binary_length(table[name])).as_py() or 0 for name in ("properties", "body"))


def place_behind(table: Any) -> tuple[int, int]:
    """Due instant (epoch microseconds) and id behind the last row of a table that is sorted by them."""
    last = table.slice(len(table) - 1)
    return pc.cast(last["due_at"], pa.int64())[0].as_py(), last["id"][0].as_py() + 1


def copy_stream(table: Any, lane: int, portion_bytes: int) -> Iterator[bytes]:
    """``table`` (packing.SCHEMA) as rows of ``lane`` for a binary COPY of :data:`COLUMNS`, in portions of about
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
            values = bytes(_big_endian("q", pc.subtract(integers, _POSTGRES_EPOCH_US if name in _INSTANTS else 0)))
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
        values = pc.add(values, _POSTGRES_EPOCH_US)
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
