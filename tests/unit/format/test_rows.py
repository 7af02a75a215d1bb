"""The content of a row: bytes of every format can still be read, and damage is found."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delayer.core.message import Due, Parcel, Target
from delayer.format.rows import COLUMNS, FORMAT, READ, checksum, moved_row, read_row, reason_text, stored_row
from delayer.store import statements

NAMES = (
    "id", "due_at", "checksum", "format", "route", "exchange", "routing_key", "to_exchange", "to_key", "properties",
    "body", "key",
)  # fmt: skip
ROUTE, KEY, PROPERTIES = b"delayer.in", b"orders.\xff\x00eu", b"\x20\x00\x00\x00\x00\x0e\x07x-delayI\x00\x00\x03\xe8"
# Rows of format 1. Never edit them: add the next format below.
ROWS_1 = [
    (7, 1_795_000_000_123, 1_442_107_447, 1, ROUTE, ROUTE, KEY, b"delayer.out", b"orders.eu", PROPERTIES,
     b"\x00\x01 body", b"k\x00"),
    (8, -1, 3_971_697_493, 1, b"", b"", b"", b"", b"", b"", b"", None),
]  # fmt: skip
FORMAT_1: list[tuple[Mapping[str, object], Parcel]] = [
    (dict(zip(NAMES, row, strict=True)), Parcel(row[1], *row[4:7], Target(*row[7:9]), *row[9:]))  # type: ignore[arg-type]
    for row in ROWS_1
]


def read(record: Mapping[str, object], attempts: int = 0) -> Due:
    return read_row([record[name] for name in READ], attempts)


@pytest.mark.parametrize("statement", [statements.CLAIM, statements.CLAIM_HELD])
def test_the_claims_return_the_columns_in_reading_order(statement: str) -> None:
    found = re.findall(r"\b[mh]\.(\w+)(?=,|\s*$|\s*FROM)", statement[statement.index(".checksum") - 20 :])
    assert tuple(found[: len(READ)]) == READ


@pytest.mark.parametrize(("record", "parcel"), FORMAT_1)
def test_format_1_still_reads(record: Mapping[str, object], parcel: Parcel) -> None:
    assert read(record) == Due(record["id"], parcel.due_ms, 0, parcel, sound=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(("record", "parcel"), FORMAT_1)
def test_format_1_is_still_written(record: Mapping[str, object], parcel: Parcel) -> None:
    expected = dict(record) | {"lane": 3}
    del expected["id"]
    assert dict(zip(COLUMNS, stored_row(parcel, 3), strict=True)) == expected


def test_a_format_of_the_future_is_not_sound() -> None:
    record, _ = FORMAT_1[0]
    assert not read(dict(record) | {"format": FORMAT + 1}).sound


pieces = st.binary(max_size=6)


@settings(deadline=None)
@given(st.tuples(pieces, pieces, pieces, pieces), st.tuples(pieces, pieces, pieces, pieces))
def test_the_checksum_finds_bytes_moved_between_columns(
    one: tuple[bytes, bytes, bytes, bytes], two: tuple[bytes, bytes, bytes, bytes]
) -> None:
    if b"".join(one) == b"".join(two) and one != two:
        assert checksum(*one) != checksum(*two)


@settings(deadline=None)
@given(pieces, pieces, pieces, pieces)
def test_a_message_reads_as_it_was_written(exchange: bytes, key: bytes, properties: bytes, body: bytes) -> None:
    parcel = Parcel(5, b"r", exchange, key, Target(key, exchange), properties, body)
    record = dict(zip(COLUMNS, stored_row(parcel, 1), strict=True)) | {"id": 1}
    due = read(record, attempts=4)
    assert due == Due(1, 5, 4, parcel, sound=True)
    assert moved_row(due, 1) == stored_row(parcel, 1)


def test_a_moved_damaged_row_is_still_damaged() -> None:
    record, _ = FORMAT_1[0]
    due = read(dict(record) | {"body": b"damaged"})
    assert not due.sound
    moved = dict(zip(COLUMNS, moved_row(due, 1), strict=True)) | {"id": 7}
    assert not read(moved).sound


@pytest.mark.parametrize(
    ("text", "kept"), [("NO_ROUTE", "NO_ROUTE"), ("a\0b", "a\ufffdb"), ("\udcff", "?"), ("ü", "ü")]
)
def test_reasons_are_text_that_postgres_keeps(text: str, kept: str) -> None:
    assert reason_text(text) == kept
