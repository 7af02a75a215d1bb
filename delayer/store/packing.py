"""Packing: a run of messages as one compressed file, and what it must come out as again. Pure; needs pyarrow.

The file itself: packedfile.py. Imported by its users only when there is a segment: pyarrow costs a daemon memory that
it rarely needs.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from delayer.core.segment import FORMAT
from delayer.store import packedfile
from delayer.store.arrays import content_of, integers, values_of, whole
from delayer.store.packedfile import BYTES, COLUMNS, HEAD, NUMBERS, SCHEMA, TAIL, SegmentBroken, ids_of

__all__ = [
    "BYTES", "COLUMNS", "FORMAT", "HEAD", "NUMBERS", "SCHEMA", "TAIL", "Packed", "SegmentBroken", "digest_of", "ids_of",
    "ordered", "pack", "unpack", "without",
]  # fmt: skip

_ORDER: Final = [("due_at", "ascending"), ("id", "ascending")]


class Packed(NamedTuple):
    """A segment's bytes, and what its row says of them. Instants are epoch microseconds."""

    packed: bytes
    messages: int
    raw_bytes: int
    """Of bodies and properties."""
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
        packed=packedfile.write(table),
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
    table = packedfile.read(packed, format)
    if len(table) != messages:
        raise SegmentBroken(f"expected {messages} messages, found {len(table)}")
    found = digest_of(table)
    if not hmac.compare_digest(found, digest):
        raise SegmentBroken(f"expected the digest {digest.hex()}, found {found.hex()}")
    return table


def digest_of(table: Any) -> bytes:
    """SHA-256 over the canonical form of ``table``, which knows nothing of how it is packed; 32 bytes.

    The form: the number of rows; then column by column in the order of :data:`COLUMNS`, numbers and instants
    (microseconds since 1970) value by value, byte strings first all their lengths and then all their bytes. Every
    number takes 8 bytes, little endian.
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


def without(table: Any, ids: Sequence[int]) -> Any:
    """``table`` without the rows of these ids."""
    return table.filter(pc.invert(pc.is_in(table["id"], value_set=pa.array(ids, pa.int64())))) if ids else table
