"""Field values: every type decoded as pamqp decodes it, skipped without recursion, and negated in its own type."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import decode as oracle

from delayer.amqp import properties
from delayer.amqp.errors import MalformedTable
from delayer.amqp.properties import Value
from delayer.core.message import Timestamp
from tests.unit.amqp.tables import EVERY_TYPE, nested, sized, table_of_everything, tables


@pytest.mark.parametrize(("kind", "raw", "expected"), EVERY_TYPE)
def test_every_type_means_what_it_says(kind: str, raw: bytes, expected: Value) -> None:
    found = properties.decode(ord(kind), raw)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(("kind", "raw", "expected"), [row for row in EVERY_TYPE if row[0] != "T"])
def test_pamqp_reads_the_same(kind: str, raw: bytes, expected: Value) -> None:
    """But for timestamps: beyond 2**32 it takes them for milliseconds."""
    assert oracle.embedded_value(kind.encode() + raw) == (1 + len(raw), expected)


def test_a_timestamp_is_told_from_an_integer() -> None:
    assert isinstance(properties.decode(ord("T"), bytes(8)), Timestamp)
    assert not isinstance(properties.decode(ord("l"), bytes(8)), Timestamp)


def test_integers_of_other_clients() -> None:
    assert properties.decode(ord("L"), struct.pack(">q", -2)) == -2


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        ("I", b"\0\0\0"),
        ("I", b"\0\0\0\0\0"),
        ("S", b"\0\0\0"),
        ("S", b"\0\0\0\2a"),
        ("S", b"\0\0\0\1ab"),
        ("S", b"\xff\xff\xff\xff"),
        ("?", b""),
        ("\0", b""),
        ("A", sized(b"I\0")),
        ("A", sized(b"?")),
        ("F", sized(b"\5ab")),
        ("F", sized(b"\1a")),
        ("F", sized(b"\1aS\0")),
        ("V", b"\0"),
    ],
)
def test_broken_values(kind: str, raw: bytes) -> None:
    with pytest.raises(MalformedTable):
        properties.decode(ord(kind), raw)


@pytest.mark.parametrize("kind", [b"A", b"F"])
@pytest.mark.parametrize("levels", [100, 200_000])
def test_deep_nesting_is_skipped_and_refused_when_read(kind: bytes, levels: int) -> None:
    value = nested(levels, kind)
    table = properties.entry(b"deep", value) + properties.entry(b"after", b"t\x01")
    assert [name for name, _, _ in properties.entries(table, 0, len(table))] == [b"deep", b"after"]
    with pytest.raises(MalformedTable, match="deeper than 64"):
        properties.decode(value[0], value[1:])


@pytest.mark.parametrize("kind", [b"A", b"F"])
def test_nesting_that_people_use_is_read(kind: bytes) -> None:
    value = nested(properties.MAX_DEPTH, kind)
    found = properties.decode(value[0], value[1:])
    depth = 0
    while found:
        assert isinstance(found, list | dict)
        found = found[0] if isinstance(found, list) else found[""]
        depth += 1
    assert depth == properties.MAX_DEPTH - 1


def test_entries_of_a_table() -> None:
    table = table_of_everything()
    found = properties.entries(table, 0, len(table))
    assert [name for name, _, _ in found] == [b"h%d" % at for at in range(len(EVERY_TYPE))]
    for (_, type_at, stop), (kind, raw, _) in zip(found, EVERY_TYPE, strict=True):
        assert table[type_at:stop] == kind.encode() + raw


@given(tables)
def test_entries_cover_the_table(parts: list[bytes]) -> None:
    table = b"".join(parts)
    found = properties.entries(b"__" + table + b"\0\0", 2, len(table) + 2)
    assert len(found) == len(parts)
    assert b"".join(properties.entry(name, (b"__" + table)[type_at:stop]) for name, type_at, stop in found) == table


@given(st.binary(max_size=80), st.integers(0, 255))
def test_random_bytes_are_a_value_or_malformed(raw: bytes, kind: int) -> None:
    try:
        properties.decode(kind, raw)
        properties.entries(raw, 0, len(raw))
    except MalformedTable:
        pass


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"I" + struct.pack(">i", 5000), b"I" + struct.pack(">i", -5000)),
        (b"I" + struct.pack(">i", -5000), b"I" + struct.pack(">i", 5000)),
        (b"I" + struct.pack(">i", 0), b"I" + struct.pack(">i", 0)),
        (b"I" + struct.pack(">i", -(1 << 31)), b"l" + struct.pack(">q", 1 << 31)),
        (b"b\x7f", b"b\x81"),
        (b"b\x80", b"s" + struct.pack(">h", 128)),
        (b"s" + struct.pack(">h", -32768), b"I" + struct.pack(">i", 32768)),
        (b"l" + struct.pack(">q", 9), b"l" + struct.pack(">q", -9)),
        (b"l" + struct.pack(">q", -(1 << 63)), b"l" + struct.pack(">q", (1 << 63) - 1)),
        (b"L" + struct.pack(">q", -(1 << 63)), b"L" + struct.pack(">q", (1 << 63) - 1)),
        (b"B\xff", b"s" + struct.pack(">h", -255)),
        (b"B\x00", b"B\x00"),
        (b"u" + struct.pack(">H", 65535), b"I" + struct.pack(">i", -65535)),
        (b"i" + struct.pack(">I", (1 << 32) - 1), b"l" + struct.pack(">q", -(1 << 32) + 1)),
        (b"f" + struct.pack(">f", 1.5), b"f" + struct.pack(">f", -1.5)),
        (b"d" + struct.pack(">d", -1e300), b"d" + struct.pack(">d", 1e300)),
        (b"d" + struct.pack(">d", 0.0), b"d" + struct.pack(">d", -0.0)),
        (b"D" + struct.pack(">Bi", 3, 1500), b"D" + struct.pack(">Bi", 3, -1500)),
        (b"D" + struct.pack(">Bi", 0, -(1 << 31)), b"D" + struct.pack(">Bi", 0, (1 << 31) - 1)),
        (b"S" + sized(b"5000"), b"S" + sized(b"-5000")),
        (b"S" + sized(b"-5000"), b"S" + sized(b"5000")),
        (b"S" + sized(b"+5000"), b"S" + sized(b"-5000")),
        (b"S" + sized(b" 1.5e3 "), b"S" + sized(b"-1.5e3 ")),
    ],
)
def test_negated(before: bytes, after: bytes) -> None:
    assert properties.negated(before[0], before[1:]) == after


@given(st.sampled_from("bBsuIilLfd"), st.binary(min_size=8, max_size=8))
def test_negated_is_the_negative(kind: str, noise: bytes) -> None:
    raw = noise[: properties.SIZES[ord(kind)]]
    value = properties.decode(ord(kind), raw)
    turned = properties.negated(ord(kind), raw)
    assert isinstance(value, int | float)
    if value == -(1 << 63) and kind in "lL":
        assert properties.decode(turned[0], turned[1:]) == (1 << 63) - 1
    elif not math.isnan(value):
        assert properties.decode(turned[0], turned[1:]) == -value


@pytest.mark.parametrize(("kind", "raw"), [("S", sized(b"soon")), ("S", sized(b"")), ("t", b"\1"), ("V", b""),
                                           ("T", bytes(8)), ("x", sized(b"5")), ("A", sized(b""))])  # fmt: skip
def test_values_without_a_sign_are_not_negated(kind: str, raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"sign|number"):
        properties.negated(ord(kind), raw)


def test_encoders() -> None:
    assert properties.long_string(b"ab") == b"S\0\0\0\2ab"
    assert properties.byte_array(b"\xff") == b"x\0\0\0\1\xff"
    assert properties.int64(-1) == b"l" + b"\xff" * 8
    assert properties.entry(b"k", b"V") == b"\1kV"
    with pytest.raises(ValueError, match="64 bits"):
        properties.int64(1 << 63)
    with pytest.raises(ValueError, match="255 bytes"):
        properties.entry(b"k" * 256, b"V")
