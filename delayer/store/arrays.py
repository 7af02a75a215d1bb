"""The bytes of Arrow's arrays, and bodies without their digits (see packedfile.py). Pure; needs pyarrow."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

_ZERO: Final = ord("0")
_DIGITS: Final = b"0123456789"
_TO_ZERO: Final = bytes.maketrans(_DIGITS, b"0" * 10)
_AT_ONCE: Final = 1 << 18
"""Bytes whose digits are put back at once: of 6 MB, with one digit in two, all at once took 64 MB."""
_NO_DIGITS: Final = bytes(set(range(256)) - set(_DIGITS))


class DigitsMissing(ValueError):
    """There are more or fewer digits than places for them."""


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
    if data is None:  # nothing but empty strings
        return memoryview(b"")
    return memoryview(data)[bounds[array.offset] : bounds[array.offset + len(array)]]


def without_digits(column: Any) -> tuple[Any, bytes]:
    """A binary array with every digit made 0, and what the digits were, two a byte."""
    content = bytes(content_of(column))
    digits = content.translate(None, _NO_DIGITS)
    return _like(column, content.translate(_TO_ZERO)), bytes.fromhex((digits + b"0" * (len(digits) % 2)).decode())


def with_digits(column: Any, packed_digits: bytes) -> Any:
    """The reverse. Raises DigitsMissing if there are more or fewer digits than places for them."""
    content, digits = content_of(column), memoryview(packed_digits.hex().encode())
    filled, used = [], 0
    for start in range(0, len(content), _AT_ONCE):
        part = content[start : start + _AT_ONCE]
        values = pa.Array.from_buffers(pa.uint8(), len(part), [None, pa.py_buffer(part)])
        places = pc.equal(values, _ZERO)
        end = used + places.true_count
        if end > len(digits):
            raise _missing(content, packed_digits)
        theirs = pa.Array.from_buffers(pa.uint8(), end - used, [None, pa.py_buffer(digits[used:end])])
        filled.append(memoryview(pc.replace_with_mask(values, places, theirs).buffers()[1])[: len(part)])
        used = end
    if len(packed_digits) != (used + 1) // 2:
        raise _missing(content, packed_digits)
    return _like(column, b"".join(filled))


def _missing(content: memoryview, packed_digits: bytes) -> DigitsMissing:
    count = bytes(content).count(_ZERO)
    return DigitsMissing(f"expected {count} digits, found {len(packed_digits)} bytes of two")


def _like(column: Any, content: Any) -> Any:
    """A binary array of the lengths of ``column`` and other content."""
    _, offsets, _ = column.buffers()
    places = pa.Array.from_buffers(pa.int32(), len(column) + 1, [None, offsets], offset=column.offset)
    places = pc.subtract(places, places[0]).buffers()[1]
    return pa.Array.from_buffers(pa.binary(), len(column), [None, places, pa.py_buffer(content)])
