"""Segments on an executor: their live messages, and of each segment what came out of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from delayer.audit import relations
from delayer.audit.connection import Reading, Unreadable
from delayer.audit.rules.damage import Damage
from delayer.audit.splits import Piece
from delayer.audit.values import Column, Origin, epoch_ms

ROWS: Final = 10_000
"""Rows of an unpacked segment that travel together."""
_PACKED: Final = "SELECT id, lane::int, format::int, messages, digest, packed FROM ONLY segment WHERE {}"
_TOMBSTONES: Final = (
    "SELECT c.segment, c.id FROM segment_cancelled AS c"
    " WHERE c.segment IN (SELECT s.id FROM ONLY segment AS s WHERE {})"
)


class _Packed(NamedTuple):
    """What :data:`_PACKED` gives."""

    id: int
    lane: int
    format: int
    messages: int
    digest: bytes
    packed: bytes


def unpacked(reading: Reading, piece: Piece, columns: dict[str, Column]) -> Iterator[pa.RecordBatch | Damage]:
    """The live messages of each segment of ``piece``; after those of each, a row that says what came out of it, or why
    nothing did. Raises the driver's errors."""
    schema = relations.schema_of(columns)
    condition = piece.condition()
    tombstones: dict[int, list[int]] = {}
    try:
        # First these, for a connection gives one answer at a time.
        for segment, message in reading.rows(_TOMBSTONES.format(condition)):
            tombstones.setdefault(segment, []).append(message)
    except Unreadable as error:  # nobody may say of any of their messages that it waits
        yield Damage("segment_cancelled", f"what was cancelled in the segments of {piece}", error.reason)
        return
    try:
        for found in reading.batches(_PACKED.format(condition)):
            for row in range(found.num_rows):
                packed = _Packed(*(column[row].as_py() for column in found.columns))
                yield from _segment(packed, tombstones.get(packed.id, []), columns, schema)
    except Unreadable as error:
        yield Damage(piece.relation, str(piece), error.reason)


def _segment(
    one: _Packed, tombstones: list[int], columns: dict[str, Column], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    from delayer.store import packing  # noqa: PLC0415

    try:
        table = packing.unpack(one.packed, one.format, one.messages, one.digest)
    except packing.SegmentBroken as broken:
        yield _summary(schema, segment=one.id, lane=one.lane, fault=broken.reason)
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


def _summary(schema: pa.Schema, **known: object) -> pa.RecordBatch:
    values = {"origin": "segment", **known}
    return pa.RecordBatch.from_arrays(
        [pa.array([values.get(field.name)], field.type) for field in schema], schema=schema
    )
