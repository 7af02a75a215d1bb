"""Messages between Postgres and Arrow: the bytes of both sides, against plain Python. Postgres itself reads and writes
them in tests/integration/test_segments.py."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delayer.store.segments import codec
from tests.unit.store.test_segments_codec import Row, row, rows_of, table

EPOCH_US = 946_684_800_000_000
NUMBER = st.integers(-(1 << 62), (1 << 62) - 1)
ROWS = st.lists(
    st.tuples(NUMBER, NUMBER, NUMBER, NUMBER, st.integers(-(1 << 15), (1 << 15) - 1), *[st.binary(max_size=40)] * 7),
    max_size=30,
)


def as_one_row(rows: Sequence[Row]) -> dict[str, bytes]:
    """What sql/lock_run.sql gives."""
    columns: dict[str, bytes] = {}
    for place, name in enumerate(codec.COLUMNS):
        values = [one[place] for one in rows]
        if name in codec.BYTES:
            columns[name] = b"".join(values)
            columns[f"{name}_lengths"] = b"".join(struct.pack(">i", len(value)) for value in values)
        else:
            columns[name] = b"".join(struct.pack(">q", value - EPOCH_US * name.endswith("_at")) for value in values)
    return columns


def as_copy(rows: Sequence[Row], lane: int) -> bytes:
    """What a binary COPY expects."""
    stream = b"PGCOPY\n\xff\r\n\0" + struct.pack(">ii", 0, 0)
    for id_, due_us, parked_us, checksum, format_, *strings in rows:
        stream += struct.pack(">h", len(codec.COPIED))
        for number in (id_, due_us - EPOCH_US, parked_us - EPOCH_US, checksum):
            stream += struct.pack(">iq", 8, number)
        stream += struct.pack(">ihih", 2, lane, 2, format_)
        stream += b"".join(struct.pack(">i", len(value)) + value for value in strings)
    return stream + struct.pack(">h", -1)


@settings(deadline=None)
@given(ROWS)
def test_from_postgres(rows: list[Row]) -> None:
    found = codec.table_of(as_one_row(rows))
    assert found.schema == codec.SCHEMA
    assert rows_of(found) == rows


@settings(deadline=None)
@given(ROWS, st.integers(1, (1 << 15) - 1), st.integers(1, 500))
def test_to_postgres(rows: list[Row], lane: int, portion: int) -> None:
    portions = list(codec.copy_stream(table(rows), lane, portion))
    assert b"".join(portions) == as_copy(rows, lane)
    assert max(map(len, portions)) <= max(portion, 19)


def test_a_piece_of_a_table() -> None:
    """A table that does not begin at the first row."""
    rows = [row(n, n, b"%d" % n * n) for n in range(10)]
    assert b"".join(codec.copy_stream(table(rows).slice(3, 4), 7, 1 << 20)) == as_copy(rows[3:7], 7)


def test_lengths_that_do_not_fit() -> None:
    columns = as_one_row([row(1), row(2)])
    with pytest.raises(ValueError, match="expected 8 bytes by the lengths, found 9"):
        codec.table_of(columns | {"body": columns["body"] + b"x"})
