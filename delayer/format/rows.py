"""The stored form of a message: the row's columns, their checksum, and the version of their meaning. Pure.

An older daemon holds messages in formats that it cannot read (``sound`` is false). A new column, index or table is a
schema upgrade (migrations/), not a new format.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import Any
from zlib import crc32

from delayer.core.hold import Hold, HoldKind
from delayer.core.message import Due, Parcel, Target

FORMAT = 1
"""1: exchange, routing_key, properties and body verbatim as received; to_exchange and to_key are the target."""

_CARRIED = ("route", "exchange", "routing_key", "to_exchange", "to_key", "properties", "body", "key")
# The order of a row in COPY. The table's defaults supply ``id`` and ``parked_at``.
COLUMNS = ("due_at", "checksum", "lane", "format", *_CARRIED)
COLUMNS_WITH_ID = (*COLUMNS, "id")
COLUMNS_WITH_KEY = (*COLUMNS_WITH_ID, "parked_at")
"""``parked_at`` of a message that debounces is that of the first message of its burst."""
# The order of a row from a claim. Read by position, because a name costs a look-up per value.
READ = ("id", "due_at", "checksum", "format", *_CARRIED)
HELD_COLUMNS = (*COLUMNS_WITH_ID, "retry_at", "attempts", "kind", "reason", "may_be_delivered", "isolated", "token")

StoredRow = tuple[int, int, int, int, bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes | None]

_LENGTHS = Struct(">IIII")


def checksum(exchange: bytes, routing_key: bytes, properties: bytes, body: bytes) -> int:
    """CRC-32 over the four lengths (4 bytes each, big endian), then the four byte strings in this order. The lengths
    reveal bytes moved between columns."""
    lengths = _LENGTHS.pack(len(exchange), len(routing_key), len(properties), len(body))
    return crc32(body, crc32(properties, crc32(routing_key, crc32(exchange, crc32(lengths)))))


def stored_row(parcel: Parcel, lane: int) -> StoredRow:
    """The values of :data:`COLUMNS` for ``parcel``."""
    due_ms, route, exchange, routing_key, target, properties, body, key, *_ = parcel
    crc = checksum(exchange, routing_key, properties, body)
    return due_ms, crc, lane, FORMAT, route, exchange, routing_key, *target, properties, body, key


def moved_row(due: Due, lane: int) -> StoredRow:
    """The values of :data:`COLUMNS` for a row that is moved. An unsound row gets a wrong checksum, so that it stays
    unsound."""
    values = stored_row(due.parcel, lane)
    if due.sound:
        return values
    return (values[0], values[1] ^ 1, *values[2:])


def read_row(
    record: Iterable[Any],
    attempts: int = 0,
    hold: Hold | None = None,
    token: bytes | None = None,
    parked_ms: int | None = None,
) -> Due:
    """Parse a row: columns in the order of :data:`READ`, then others. ``sound``: whether format and checksum match."""
    (id_, due_ms, found, version, route, exchange, routing_key, to_exchange, to_key, properties, body, key, *_) = record
    parcel = Parcel(
        due_ms, route, exchange, routing_key, Target(to_exchange, to_key), properties, body, key, token or b""
    )
    sound = version == FORMAT and found == checksum(exchange, routing_key, properties, body)
    return Due(id_, due_ms, attempts, parcel, sound, hold, parked_ms)


def hold_columns(hold: Hold) -> tuple[str, str, bool, bool]:
    """The values of the columns kind, reason, may_be_delivered and isolated."""
    return hold.kind, reason_text(hold.text), hold.may_be_delivered, hold.isolated


def read_hold(kind: str, reason: str, may_be_delivered: bool, isolated: bool) -> Hold:
    return Hold(HoldKind(kind), reason, may_be_delivered, isolated)


def read_held_row(record: Any) -> Due:
    """Parse a row of claim_held.sql into a held message."""
    hold = read_hold(record["kind"], record["reason"], record["may_be_delivered"], record["isolated"])
    return read_row(record, record["attempts"], hold, record["token"])


def reason_text(reason: str) -> str:
    """``reason`` as Postgres can store it. A broker's reply text may contain NUL, or bytes that were not UTF-8."""
    return reason.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode("utf-8")
