"""Packing: a run of messages as one compressed file, and what it must come out as again. Pure; needs pyarrow.

Imported by its users only when there is a segment: pyarrow costs a daemon 30 MB that it rarely needs.

The rule for changing the packing is that of envelope.py: never change what the bytes mean under a number that was ever
released, keep reading every number from 1 on, leave the fixtures of stored bytes in the tests alone.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import pyarrow as pa

FORMAT: Final = 1
"""1: CRC-32 of all that follows and CRC-32 of the Parquet footer (big endian, 4 bytes each), then a Parquet file of the
columns of :data:`SCHEMA`, sorted by (due_at, id), as one row group compressed by zstd. The checks come before anything
is decoded, so that bytes which are not what was written never reach a decoder."""

SCHEMA: Final = pa.schema(
    [
        ("id", pa.int64()),
        ("due_at", pa.timestamp("us", "UTC")),
        ("parked_at", pa.timestamp("us", "UTC")),
        ("checksum", pa.int64()),
        ("format", pa.int16()),
        *((name, pa.binary()) for name in ("route", "exchange", "routing_key", "to_exchange", "to_key")),
        ("properties", pa.binary()),
        ("body", pa.binary()),
    ]
)
"""The columns of a message but its lane, which is the segment's, and its key: rows with a key are never compacted."""


class SegmentBroken(Exception):
    """A segment does not read back. ``reason`` says what was expected and found; it quotes no message."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


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
    """SHA-256 over the canonical form (:func:`digest`), 32 bytes."""


def pack(table: Any) -> Packed:
    """Pack a table of :data:`SCHEMA` with one row or more, in any order."""
    raise NotImplementedError


def unpack(packed: bytes, format: int, messages: int, digest: bytes) -> Any:
    """The table that was packed, sorted by (due_at, id), once count and digest fit. Raises SegmentBroken."""
    raise NotImplementedError


def digest(table: Any) -> bytes:
    """SHA-256 over the canonical form of ``table``, which knows nothing of how it is packed."""
    raise NotImplementedError
