"""Segments on an executor: their live messages, and of each segment what came out of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from delayer.audit import relations, salvage
from delayer.audit.connection import Reading, Unreadable
from delayer.audit.rules.damage import TOMBSTONES_LOST, Damage
from delayer.audit.splits import Piece
from delayer.audit.values import Column, Origin, epoch_ms

ROWS: Final = 10_000
"""Rows of an unpacked segment that travel together."""
_PACKED: Final = "SELECT id, lane::int, format::int, messages, digest, packed FROM ONLY segment WHERE {}"
_SOME_CANCELLED: Final = "SELECT id FROM ONLY segment WHERE {} AND cancelled > 0"
_WHICH: Final = "SELECT id, lane::int FROM ONLY segment WHERE {}"
_TOMBSTONES: Final = (
    "SELECT c.segment, c.id FROM segment_cancelled AS c"
    " WHERE c.segment IN (SELECT s.id FROM ONLY segment AS s WHERE {})"
)
# From the first page to the last, a damaged one would keep those beside it.
_BY_INDEX: Final = "SELECT set_config('enable_seqscan', 'off', true)"
_OF_ONE: Final = "SELECT id FROM segment_cancelled WHERE segment = {}"


class _Packed(NamedTuple):
    """What :data:`_PACKED` gives."""

    id: int
    lane: int
    format: int
    messages: int
    digest: bytes
    packed: bytes


def unpacked(reading: Reading, piece: Piece, columns: dict[str, Column]) -> Iterator[pa.RecordBatch | Damage]:
    """The live messages of each segment of ``piece``, and after them a row that says what came out of it, or why
    nothing did. Raises the driver's errors."""
    schema = relations.schema_of(columns)
    tombstones: _Tombstones = {}

    def read(condition: str) -> Iterator[pa.RecordBatch]:
        nonlocal tombstones
        # First these, for a connection gives one answer at a time; and of some megabytes of segments, not of the table.
        tombstones = _tombstones(reading, condition)
        yield from reading.batches(_PACKED.format(condition))

    for found in salvage.readable(reading, piece, read):
        if isinstance(found, Damage):
            yield from _lost(reading, found, schema)
            continue
        for row in range(found.num_rows):
            packed = _Packed(*(column[row].as_py() for column in found.columns))
            yield from _segment(packed, tombstones.get(packed.id, []), columns, schema)


_Tombstones = dict[int, list[int] | str]
"""The cancelled messages of each segment that has any; why they cannot be read where that is so."""


def _tombstones(reading: Reading, condition: str) -> _Tombstones:
    """Those of the segments for which ``condition`` holds. Raises Unreadable where these cannot be read."""
    found: _Tombstones = {}
    try:
        for segment, message in reading.rows(_TOMBSTONES.format(condition)):
            ids = found.setdefault(segment, [])
            assert isinstance(ids, list)
            ids.append(message)
    except Unreadable:
        # Whoever reads their table tells of the damage. Here it costs those segments alone that it is about: what each
        # counts as cancelled is written with them, in one transaction.
        return {segment: _of_one(reading, segment) for (segment,) in reading.rows(_SOME_CANCELLED.format(condition))}
    return found


def _of_one(reading: Reading, segment: int) -> list[int] | str:
    try:
        reading.rows(_BY_INDEX)
        return [message for (message,) in reading.rows(_OF_ONE.format(segment))]
    except Unreadable as error:
        return f"{TOMBSTONES_LOST}: {error.reason}"


def _lost(reading: Reading, damage: Damage, schema: pa.Schema) -> Iterator[pa.RecordBatch | Damage]:
    """A segment whose bytes cannot be read. Where nothing of its row can be, whoever reads the others of its columns
    meets the same damage, and tells about it."""
    if damage.place.startswith("index"):
        yield damage
        return
    if not damage.place.startswith("("):
        return
    try:
        [(id_, lane)] = reading.rows(_WHICH.format(f"ctid = '{damage.place}'::tid"))
    except Unreadable:
        return
    yield damage
    yield _summary(schema, segment=id_, lane=lane, fault=f"the store cannot read its bytes: {damage.reason}")


def _segment(
    one: _Packed, tombstones: list[int] | str, columns: dict[str, Column], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    from delayer.store import packing  # noqa: PLC0415

    try:
        table = packing.unpack(one.packed, one.format, one.messages, one.digest)
    except packing.SegmentBroken as broken:
        yield _summary(schema, segment=one.id, lane=one.lane, unpacked=_count(one), fault=broken.reason)
        return
    if isinstance(tombstones, str):  # nobody may say of any of its messages that it waits
        yield _summary(schema, segment=one.id, lane=one.lane, unpacked=table.num_rows, fault=tombstones)
        return
    live = packing.without(table, tombstones)
    origin = Origin("segment", segment=one.id, lane=one.lane)
    for part in live.to_batches(max_chunksize=ROWS):
        yield relations.made(part, columns, schema, origin)
    due_ms = epoch_ms(table["due_at"].combine_chunks())
    yield _summary(
        schema,
        segment=one.id,
        lane=one.lane,
        unpacked=table.num_rows,
        live=live.num_rows,
        found_first_due_ms=pc.min(due_ms).as_py(),
        found_last_due_ms=pc.max(due_ms).as_py(),
        found_first_id=pc.min(table["id"]).as_py(),
        found_last_id=pc.max(table["id"]).as_py(),
        found_raw_bytes=sum(pc.sum(pc.binary_length(table[name])).as_py() for name in ("properties", "body")),
    )


def _count(one: _Packed) -> int | None:
    """How many messages a segment that does not read back has; None where not even that can be read."""
    from delayer.store import packing  # noqa: PLC0415

    try:
        ids = packing.ids_of(one.packed, b"", len(one.packed), one.format)
    except packing.SegmentBroken:
        return None
    return None if ids is None else len(ids)


def _summary(schema: pa.Schema, **known: object) -> pa.RecordBatch:
    values = {"origin": "segment", **known}
    return pa.RecordBatch.from_arrays(
        [pa.array([values.get(field.name)], field.type) for field in schema], schema=schema
    )
