"""Packing: rows come out unchanged, to the byte, and every change is detected."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delayer.core.segment import FORMAT, SegmentBroken
from delayer.store.segments import catalog, codec, packing
from delayer.store.segments.codec import unpack
from delayer.store.segments.packing import PackedSegment, pack

Row = tuple[Any, ...]
"""Values of codec.SCHEMA; instants are epoch microseconds."""

NUMBER = st.integers(-(1 << 63), (1 << 63) - 1)
ROWS = st.lists(
    st.tuples(
        NUMBER,
        NUMBER,
        NUMBER,
        NUMBER,
        st.integers(-(1 << 15), (1 << 15) - 1),
        *[st.binary(max_size=40)] * 7,
        st.none() | st.binary(max_size=40),
    ),
    min_size=1,
    max_size=30,
)


def row(number: int, due_us: int = 0, body: bytes = b"body", key: bytes | None = None) -> Row:
    name, routing_key = b"delayer.in", b"orders.eu"
    to = b"delayer.out", routing_key
    return (number, due_us, 5, 1 << 31, 1, name, name, routing_key, *to, b"\x10\x00\x02", body, key)


def table(rows: Sequence[Row]) -> Any:
    return packing.table_of(rows) if rows else codec.SCHEMA.empty_table()


def rows_of(found: Any) -> list[Row]:
    """The rows in the form for a restore, without their lane."""
    return [as_packed(one) for portion in codec.records(found, 7, 1) for one in portion]


def as_packed(record: Row) -> Row:
    number, due_ms, parked_ms, *others, _ = record
    return (number, int(due_ms * 1000), int(parked_ms * 1000), *others)


def read_back(packed: PackedSegment) -> Any:
    return unpack(packed.packed, FORMAT, packed.messages, packed.digest)


@settings(deadline=None)
@given(ROWS)
def test_round_trip(rows: list[Row]) -> None:
    expected = sorted(rows, key=lambda values: (values[1], values[0]))
    packed = pack(table(rows))
    found = rows_of(read_back(packed))
    assert [(values[1], values[0]) for values in found] == [(values[1], values[0]) for values in expected]
    assert sorted(found, key=repr) == sorted(rows, key=repr)
    assert packed.digest == hashlib.sha256(packed.packed).digest()
    assert packed.messages == len(rows)
    assert packed.raw_bytes == sum(len(values[10]) + len(values[11]) for values in rows)
    assert (packed.first_due_ms, packed.last_due_ms) == (expected[0][1] // 1000, expected[-1][1] // 1000)
    assert packed.ids == [values[0] for values in found]


def test_bodies_of_any_size() -> None:
    chance = random.Random(1)
    rows = [row(n, n, chance.randbytes(size)) for n, size in enumerate((0, 1, 70_000, 3_000_000, 0))]
    assert rows_of(read_back(pack(table(rows)))) == rows


def test_any_reader_of_parquet_reads_a_segment() -> None:
    rows = [row(n, n) for n in range(10)]
    assert rows_of(pq.read_table(pa.BufferReader(pack(table(rows)).packed))) == rows


@pytest.mark.parametrize("portion_bytes", [1, 50, 1 << 20])
def test_portions_are_cut_by_their_bytes(portion_bytes: int) -> None:
    rows = [row(n, n, b"x" * n) for n in range(30)]
    portions = list(codec.records(table(rows), 3, portion_bytes))
    assert [as_packed(one) for portion in portions for one in portion] == rows
    assert {one[-1] for portion in portions for one in portion} == {3}
    assert all(sum(len(one[10]) + len(one[11]) for one in portion[:-1]) < portion_bytes for portion in portions)


def small() -> PackedSegment:
    return pack(table([row(n, n, b'{"order": %d}' % n) for n in range(20)]))


def digested(packed: PackedSegment, parquet: bytes) -> PackedSegment:
    """The segment with other bytes and their right digest."""
    return packed._replace(packed=parquet, digest=hashlib.sha256(parquet).digest())


def test_the_documents_name_every_column() -> None:
    text = (Path(__file__).parents[3] / "docs" / "backlog.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in codec.SCHEMA.names)


def test_cancelled_messages_are_left_out() -> None:
    rows = [row(n, n, key=b"%d" % n) for n in range(10)]
    packed = pack(table(rows))
    gone = catalog.with_bits(b"", [0, 3, 9])
    live = unpack(packed.packed, FORMAT, 7, packed.digest, gone)
    assert rows_of(live) == [rows[n] for n in (1, 2, 4, 5, 6, 7, 8)]
    for other in (b"\x09", gone + b"\xff\xff"):
        with pytest.raises(SegmentBroken, match="expected 6 messages, found "):
            unpack(packed.packed, FORMAT, 6, packed.digest, other)


def test_every_flipped_bit_and_every_cut_is_found() -> None:
    """All of them in a small segment; each raises SegmentBroken."""
    packed = small()
    changed = [packed.packed[:length] for length in range(len(packed.packed))] + [packed.packed + b"\0"]
    for place in range(len(packed.packed) * 8):
        broken = bytearray(packed.packed)
        broken[place // 8] ^= 1 << place % 8
        changed.append(bytes(broken))
    for parquet in changed:
        with pytest.raises(SegmentBroken, match="the bytes changed"):
            read_back(packed._replace(packed=parquet))


def test_broken_bytes_with_a_matching_digest_raise_segment_broken() -> None:
    """Our own bug could write such bytes: every error of the decoder becomes SegmentBroken."""
    packed = small()
    chance = random.Random(7)
    for _ in range(3_000):
        parquet = bytearray(packed.packed)
        for _ in range(chance.randint(1, 3)):
            parquet[chance.randrange(4, len(parquet) - 8)] = chance.randrange(256)
        try:
            table = read_back(digested(packed, bytes(parquet)))
        except SegmentBroken:
            continue
        assert table.schema == codec.SCHEMA
        assert len(table) == packed.messages


def test_a_lack_of_memory_does_not_mark_the_segment_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*_: object, **__: object) -> None:
        raise pa.ArrowMemoryError("malloc of size 1 failed")

    monkeypatch.setattr(pq, "ParquetFile", lacks)
    with pytest.raises(MemoryError):
        read_back(small())


def test_a_foreign_parquet_file_is_broken() -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(table([row(1)]).drop_columns(["body"]), sink)
    with pytest.raises(SegmentBroken, match="expected the columns"):
        read_back(digested(small(), bytes(sink.getvalue())))


@pytest.mark.parametrize("rows", [0, 3])
def test_rows_that_cannot_be_packed(rows: int) -> None:
    whole = table([row(n) for n in range(rows)])
    with pytest.raises(ValueError, match=f"found {rows} of"):
        pack(whole if not rows else whole.drop_columns(["format"]))


# A segment of format 1. After its release, every later version must read these bytes.
STORED = Path(__file__).with_name("segment_format_1.bin").read_bytes()
STORED_DIGEST = bytes.fromhex("a8660a1e27b7275d143ec1fb33d6e2659b0239646cbcf6224bec1082aef2f161")
STORED_ROWS = [
    (7, 1_790_000_000_123_000, 1_780_000_000_123_456, 4_294_967_295, 1, b"delayer.in", b"delayer.in", b"orders.eu",
     b"", b"queue", b"\x10\x00\x02", b"\x00\xff body 4711", None),
    (9, 1_790_000_000_124_000, 1_780_000_000_123_456, 0, 1, b"", b"ex\x00change", b"", b"delayer.out", b"", b"", b"",
     b"key\xff"),
]  # fmt: skip


def test_stored_bytes_of_format_1_are_read() -> None:
    assert rows_of(unpack(STORED, 1, 2, STORED_DIGEST)) == STORED_ROWS
