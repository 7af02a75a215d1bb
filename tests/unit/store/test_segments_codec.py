"""Packing: what goes in comes out, to the byte; anything else is found; and the digest knows nothing of the packing."""

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

from delayer.store.segments import codec
from delayer.store.segments.codec import Packed, SegmentBroken, pack, unpack

Row = tuple[Any, ...]
"""Values of packing.COLUMNS; instants are epoch microseconds."""

NUMBER = st.integers(-(1 << 63), (1 << 63) - 1)
ROWS = st.lists(
    st.tuples(NUMBER, NUMBER, NUMBER, NUMBER, st.integers(-(1 << 15), (1 << 15) - 1), *[st.binary(max_size=40)] * 7),
    min_size=1,
    max_size=30,
)


def row(number: int, due_us: int = 0, body: bytes = b"body") -> Row:
    name, key = b"delayer.in", b"orders.eu"
    return (number, due_us, 5, 1 << 31, 1, name, name, key, b"delayer.out", key, b"\x10\x00\x02", body)


def table(rows: Sequence[Row]) -> Any:
    columns = zip(*rows, strict=True) if rows else [[] for _ in codec.COLUMNS]
    arrays = [pa.array(values, field.type) for values, field in zip(columns, codec.SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=codec.SCHEMA)


def rows_of(found: Any) -> list[Row]:
    columns = [column.cast(pa.int64()) if name in codec.NUMBERS else column for name, column in _columns(found)]
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


def _columns(found: Any) -> list[tuple[str, Any]]:
    return list(zip(found.column_names, found.columns, strict=True))


def canonical(rows: Sequence[Row]) -> bytes:
    """The form that is digested, in plain Python."""

    def number(value: int) -> bytes:
        return value.to_bytes(8, "little", signed=True)

    form = number(len(rows))
    for column in range(5):
        form += b"".join(number(values[column]) for values in rows)
    for column in range(5, 12):
        form += b"".join(number(len(values[column])) for values in rows) + b"".join(values[column] for values in rows)
    return form


def read_back(packed: Packed) -> Any:
    return unpack(packed.packed, codec.FORMAT, packed.messages, packed.digest)


@settings(deadline=None)
@given(ROWS)
def test_round_trip(rows: list[Row]) -> None:
    expected = sorted(rows, key=lambda values: (values[1], values[0]))
    packed = pack(table(rows))
    found = rows_of(read_back(packed))
    assert [(values[1], values[0]) for values in found] == [(values[1], values[0]) for values in expected]
    assert sorted(found) == sorted(rows)
    assert packed.digest == hashlib.sha256(canonical(found)).digest()
    assert packed.messages == len(rows)
    assert packed.raw_bytes == sum(len(values[10]) + len(values[11]) for values in rows)
    assert (packed.first_due_us, packed.last_due_us) == (expected[0][1], expected[-1][1])
    ids = [values[0] for values in rows]
    assert (packed.first_id, packed.last_id) == (min(ids), max(ids))
    assert sorted(codec.ids_of(packed.packed, b"", len(packed.packed), 1) or ()) == sorted(ids)


def test_bodies_of_any_size() -> None:
    chance = random.Random(1)
    rows = [row(n, n, chance.randbytes(size)) for n, size in enumerate((0, 1, 70_000, 3_000_000, 0))]
    assert rows_of(read_back(pack(table(rows)))) == rows


def test_an_unsorted_table_and_a_sorted_one_are_the_same() -> None:
    rows = [row(n, n // 3, b"%d" % n) for n in range(100)]
    assert pack(table(rows[::-1])) == pack(table(rows))


@settings(deadline=None)
@given(ROWS, st.randoms())
def test_the_digest_knows_nothing_of_the_encoding(rows: list[Row], chance: random.Random) -> None:
    whole = codec.ordered(table(rows))
    expected = codec.digest_of(whole)
    cut = chance.randrange(len(rows) + 1)
    chunked = pa.concat_tables([whole.slice(0, cut), whole.slice(cut)])
    assert codec.digest_of(chunked) == expected
    assert codec.digest_of(pa.concat_tables([whole, whole]).slice(len(rows), len(rows))) == expected
    sink = pa.BufferOutputStream()
    pq.write_table(whole, sink, compression=chance.choice(["none", "snappy", "zstd"]), row_group_size=7)
    assert codec.digest_of(pq.read_table(pa.BufferReader(sink.getvalue()))) == expected


def test_the_digest_knows_where_a_byte_string_ends() -> None:
    one = (*row(1)[:10], b"ab", b"c")
    other = (*row(1)[:10], b"a", b"bc")
    assert codec.digest_of(table([one])) != codec.digest_of(table([other]))
    assert codec.digest_of(table([row(1, 1, b"ab"), row(2, 2, b"")])) != codec.digest_of(
        table([row(1, 1, b"a"), row(2, 2, b"b")])
    )


def small() -> Packed:
    return pack(table([row(n, n, b'{"order": %d}' % n) for n in range(20)]))


def test_every_flipped_bit_is_found() -> None:
    """All of them, in a small segment. Nothing but SegmentBroken comes out."""
    packed = small()
    for place in range(len(packed.packed) * 8):
        broken = bytearray(packed.packed)
        broken[place // 8] ^= 1 << place % 8
        with pytest.raises(SegmentBroken, match=r"checksum"):
            read_back(packed._replace(packed=bytes(broken)))


def test_every_cut_is_found() -> None:
    packed = small()
    for length in range(len(packed.packed)):
        with pytest.raises(SegmentBroken):
            read_back(packed._replace(packed=packed.packed[:length]))
    with pytest.raises(SegmentBroken):
        read_back(packed._replace(packed=packed.packed + b"\0"))


def test_broken_bytes_under_a_right_checksum_are_found() -> None:
    """Not by chance, but by a bug of ours: whatever the decoder says to it, it is a SegmentBroken."""
    packed = small()
    chance = random.Random(7)
    for _ in range(3_000):
        parquet = bytearray(packed.packed[8:])
        for _ in range(chance.randint(1, 3)):
            parquet[chance.randrange(4, len(parquet) - 8)] = chance.randrange(256)
        try:
            table = read_back(packed._replace(packed=codec.framed(bytes(parquet))))
        except SegmentBroken:
            continue
        assert table.equals(read_back(packed))  # a byte that says nothing, or the same


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"messages": 19}, "expected 19 messages, found 20"),
        ({"digest": bytes(32)}, "expected the digest 0000"),
        ({"digest": b""}, "expected the digest ,"),
        ({"packed": b""}, "found 0 bytes"),
    ],
)
def test_a_mismatch_with_the_header_is_named(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(SegmentBroken, match=reason) as caught:
        read_back(small()._replace(**change))
    assert caught.value.reason == str(caught.value)


def test_a_format_of_the_future_is_not_guessed_at() -> None:
    packed = small()
    with pytest.raises(SegmentBroken, match="format 1 at most, found 2"):
        unpack(packed.packed, 2, packed.messages, packed.digest)
    with pytest.raises(SegmentBroken, match="of format 2"):
        codec.ids_of(packed.packed[:100], packed.packed[-100:], len(packed.packed), 2)


def test_a_lack_of_memory_says_nothing_about_the_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*_: object, **__: object) -> None:
        raise pa.ArrowMemoryError("malloc of size 1 failed")

    monkeypatch.setattr(pq, "ParquetFile", lacks)
    with pytest.raises(MemoryError):
        read_back(small())


def test_another_file_than_ours() -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(table([row(1)]).drop_columns(["body"]), sink)
    with pytest.raises(SegmentBroken, match="expected the columns"):
        unpack(codec.framed(bytes(sink.getvalue())), 1, 1, bytes(32))


@pytest.mark.parametrize("rows", [0, 3])
def test_rows_that_cannot_be_packed(rows: int) -> None:
    whole = table([row(n) for n in range(rows)])
    with pytest.raises(ValueError, match=f"found {rows} of"):
        pack(whole if not rows else whole.drop_columns(["format"]))


def test_ids_come_from_the_ends_of_a_file() -> None:
    chance = random.Random(3)
    ids = sorted(chance.sample(range(1 << 40), 4_000))
    packed = pack(table([row(number, number, chance.randbytes(300)) for number in ids])).packed
    size = len(packed)
    assert size > 10 * codec.HEAD
    assert codec.ids_of(packed[: codec.HEAD], packed[-codec.TAIL :], size, 1) == ids
    assert codec.ids_of(packed[:2_000], packed[-codec.TAIL :], size, 1) is None
    assert codec.ids_of(packed[: codec.HEAD], packed[-200:], size, 1) is None
    for place in (6, size - 9, size - 500, size - 2):  # the checksum of the metadata, and these themselves
        broken = bytearray(packed)
        broken[place] ^= 1
        with pytest.raises(SegmentBroken):
            codec.ids_of(bytes(broken[: codec.HEAD]), bytes(broken[-codec.TAIL :]), size, 1)
    found = 0
    for place in range(12, 8_000, 97):  # the page of ids has a checksum of its own
        broken = bytearray(packed)
        broken[place] ^= 1
        with pytest.raises(SegmentBroken):
            codec.ids_of(bytes(broken[: codec.HEAD]), bytes(broken[-codec.TAIL :]), size, 1)
        found += 1
    assert found == 83


# What format 1 looks like. Once it is released these bytes must read, whatever changes.
STORED = Path(__file__).with_name("segment_format_1.bin").read_bytes()
STORED_DIGEST = bytes.fromhex("7e64d093ca50c7dd4e115b1943d5f94d581f3bd8038e0be042d28ff7198fa9c6")
STORED_ROWS = [
    (7, 1_790_000_000_123_000, 1_780_000_000_123_456, 4_294_967_295, 1, b"delayer.in", b"delayer.in", b"orders.eu",
     b"", b"queue", b"\x10\x00\x02", b"\x00\xff body 4711"),
    (9, 1_790_000_000_124_000, 1_780_000_000_123_456, 0, 1, b"", b"ex\x00change", b"", b"delayer.out", b"", b"", b""),
]  # fmt: skip


def test_stored_bytes_of_format_1_are_read() -> None:
    assert rows_of(unpack(STORED, 1, 2, STORED_DIGEST)) == STORED_ROWS
