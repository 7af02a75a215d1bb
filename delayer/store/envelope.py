"""A message as the store keeps it: the row's columns, their checksum, and the version of their meaning. Pure.

The rule for changing what stands in a row. A store outlives many versions of this program, and a row may wait ten
years, so:

1. Never change what a column's bytes mean under a format number that was ever released. Raise FORMAT by one.
2. Keep reading every number from 1 on: add a branch to :func:`read`, never remove one.
3. Add a fixture of stored bytes of the new format to tests/unit/store/test_envelope.py, and leave the old ones alone.
4. A format that an older daemon cannot read is held by it, not sent (``sound`` is false): upgrade every daemon before
   the first one writes the new number.
5. A new column, index or table is a schema upgrade (migrations/), and not a new format.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct
from zlib import crc32

from delayer.core.message import Due, Parcel, Target

FORMAT = 1
"""1: exchange, routing_key, properties and body verbatim as received; to_exchange and to_key are the target."""

# The order of a row in COPY. ``id`` and ``parked_at`` come from the table's defaults.
COLUMNS = (
    "due_at",
    "checksum",
    "lane",
    "format",
    "route",
    "exchange",
    "routing_key",
    "to_exchange",
    "to_key",
    "properties",
    "body",
    "key",
)
COLUMNS_WITH_ID = (*COLUMNS, "id")
HELD_COLUMNS = (*COLUMNS_WITH_ID, "retry_at", "attempts", "reason")

Row = tuple[int, int, int, int, bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes | None]

_LENGTHS = Struct(">IIII")


def checksum(exchange: bytes, routing_key: bytes, properties: bytes, body: bytes) -> int:
    """CRC-32 over the four lengths (4 bytes each, big endian) and then the four byte strings, in this order.

    The lengths are in it so that bytes cannot move from one column to the next unnoticed.
    """
    lengths = _LENGTHS.pack(len(exchange), len(routing_key), len(properties), len(body))
    return crc32(body, crc32(properties, crc32(routing_key, crc32(exchange, crc32(lengths)))))


def row(parcel: Parcel, lane: int) -> Row:
    """The values of :data:`COLUMNS` for ``parcel``."""
    due_ms, route, exchange, routing_key, target, properties, body, key = parcel
    return (
        due_ms,
        checksum(exchange, routing_key, properties, body),
        lane,
        FORMAT,
        route,
        exchange,
        routing_key,
        target.exchange,
        target.routing_key,
        properties,
        body,
        key,
    )


def row_again(due: Due, lane: int) -> Row:
    """The values of :data:`COLUMNS` for a row that is moved, with the checksum of its bytes as they are.

    A row that was not sound must not become so by being moved: its checksum is made wrong again.
    """
    values = row(due.parcel, lane)
    if due.sound:
        return values
    return (values[0], values[1] ^ 1, *values[2:])


def read(record: Mapping[str, object], attempts: int = 0) -> Due:
    """A message from its row, columns by name. ``sound`` says whether format and checksum fit."""
    parcel = Parcel(
        due_ms=record["due_at"],  # type: ignore[arg-type]
        route=record["route"],  # type: ignore[arg-type]
        exchange=record["exchange"],  # type: ignore[arg-type]
        routing_key=record["routing_key"],  # type: ignore[arg-type]
        target=Target(record["to_exchange"], record["to_key"]),  # type: ignore[arg-type]
        properties=record["properties"],  # type: ignore[arg-type]
        body=record["body"],  # type: ignore[arg-type]
        key=record["key"],  # type: ignore[arg-type]
    )
    expected = checksum(parcel.exchange, parcel.routing_key, parcel.properties, parcel.body)
    sound = record["format"] == FORMAT and record["checksum"] == expected
    return Due(record["id"], parcel.due_ms, attempts, parcel, sound)  # type: ignore[arg-type]


def reason_text(reason: str) -> str:
    """``reason`` as Postgres can keep it: a broker's reply text may hold NUL, or bytes that were not UTF-8."""
    return reason.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode("utf-8")
