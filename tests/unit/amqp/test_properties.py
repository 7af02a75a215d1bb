"""Properties: the same spans and values as pamqp's, and edits that keep every other byte."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pamqp import commands
from pamqp import decode as oracle

from delayer.amqp.errors import MalformedProperties, MalformedTable
from delayer.amqp.properties import (
    FLAGS,
    MAX_DEPTH,
    SIZES,
    Properties,
    Value,
    byte_array,
    encode_headers,
    entries,
    entry,
    int64,
    long_string,
    negated,
    splice,
)
from delayer.amqp.values import Timestamp
from tests.unit.amqp.tables import EVERY_TYPE, decode, nested, properties, sized, table_of_every_type, tables

TIME = datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC)
ORACLE: dict[str, object] = {
    "content_type": "text/plain",
    "content_encoding": "gzip",
    "headers": {"x-delay": 5000, "name": "value", "deep": {"list": [1, "two"]}},
    "delivery_mode": 2,
    "priority": 9,
    "correlation_id": "corr",
    "reply_to": "back",
    "expiration": "60000",
    "message_id": "m-1",
    "timestamp": TIME,
    "message_type": "order",
    "user_id": "guest",
    "app_id": "shop",
}


def test_every_subset_has_the_spans_of_pamqp() -> None:
    """8,192 subsets: the spans cover all bytes, and the values are pamqp's."""
    ours = [name for name in FLAGS if name != "cluster_id"]
    for chosen in itertools.product((False, True), repeat=len(ORACLE)):
        values = {name: value for (name, value), here in zip(ORACLE.items(), chosen, strict=True) if here}
        raw = commands.Basic.Properties(**values).marshal()
        found = Properties.parse(raw)
        assert list(found.spans) == [name for name, here in zip(ours, chosen, strict=True) if here]
        assert b"".join(raw[start:stop] for start, stop in found.spans.values()) == raw[2:]
        assert found.short("message_id") == (b"m-1" if "message_id" in values else None)
        assert found.short("expiration") == (b"60000" if "expiration" in values else None)
        assert found.short("user_id") == (b"guest" if "user_id" in values else None)
        assert found.timestamp == (int(TIME.timestamp()) if "timestamp" in values else None)
        assert len(found.headers_items()) == (3 if "headers" in values else 0)
        assert splice(raw, append=b"", drop=(), remove={b"absent"}) == raw


def test_header_entries() -> None:
    raw = encode_headers(entry(b"a", long_string(b"\xff")) + entry(b"b", b"I\0\0\0\5") + entry(b"a", b"V"))
    found = Properties.parse(raw)
    assert [(field.name, chr(field.type), field.type_and_value[1:]) for field in found.headers_items()] == [
        (b"a", "S", b"\0\0\0\1\xff"),
        (b"b", "I", b"\0\0\0\5"),
        (b"a", "V", b""),
    ]
    first = found.get(b"a")
    assert first is not None
    assert (first.value, first.content, first.type_and_value) == (b"\xff", b"\xff", b"S\0\0\0\1\xff")
    second = found.get(b"b")
    assert second is not None
    assert (second.value, second.content) == (5, b"\0\0\0\5")
    assert found.get(b"A") is None


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "2 bytes"),
        (b"\x10", "2 bytes"),
        (b"\x10\x01\x02", "undefined"),  # more flags follow
        (b"\x10\x02\x02", "undefined"),
        (b"\x10\x00", "take 3 bytes, found 2"),
        (b"\x10\x00\x02\x02", "take 3 bytes, found 4"),
        (b"\x80\x00", "cut short"),
        (b"\x80\x00\x05abc", "take 8 bytes, found 6"),
        (b"\xc0\x00\x05abc", "cut short"),
        (b"\x20\x00\x00\x00\x00", "cut short"),
        (b"\x20\x00\x00\x00\x00\x01", "take 7 bytes"),
        (b"\x20\x00\xff\xff\xff\xff", "take"),
        (b"\x30\x00\x00\x00\x00\x01\x02", "take"),
        (b"\x00\x40" + bytes(7), "take"),
        (b"\x00\x00\x00", "found 3"),
    ],
)
def test_malformed_properties(raw: bytes, why: str) -> None:
    with pytest.raises(MalformedProperties, match=why):
        Properties.parse(raw)


@pytest.mark.parametrize(
    "inside", [b"\1", b"\1a", b"\5abc", b"\1a?", b"\1aI\0\0", b"\1aS\0\0\0\x09abc", b"\1aS\0\0", b"\0", b"\1aV\1"]
)
def test_a_table_broken_inside(inside: bytes) -> None:
    raw = struct.pack(">HI", FLAGS["headers"] | FLAGS["delivery_mode"], len(inside)) + inside + b"\x02"
    found = Properties.parse(raw)
    with pytest.raises(MalformedTable):
        found.headers_items()
    with pytest.raises(MalformedTable):
        found.get(b"a")
    with pytest.raises(MalformedTable):
        splice(raw, remove={b"a"})
    # An edit that need not read the table still works: a refused message keeps its bytes and gains its reason.
    grown = splice(raw, append=entry(b"r", b"V"), drop={"delivery_mode"})
    assert grown == struct.pack(">HI", FLAGS["headers"], len(inside) + 3) + inside + b"\1rV"


@given(st.binary(max_size=60))
@settings(max_examples=500)
def test_random_bytes_are_properties_or_malformed(raw: bytes) -> None:
    try:
        found = Properties.parse(raw)
    except MalformedProperties:
        return
    try:
        for field in found.headers_items():
            assert found.get(field.name) is not None
            assert field.value is not Ellipsis
    except MalformedTable:
        pass


@given(properties())
def test_an_empty_edit_does_not_change_any_byte(raw: bytes) -> None:
    assert splice(raw) == raw
    assert splice(Properties.parse(raw), remove={b"no such name here"}, remove_prefixes=(b"no such prefix",)) == raw


@given(properties())
def test_appended_headers_can_be_removed(raw: bytes) -> None:
    added = entry(b"a name longer than any of them", int64(5)) + entry(b"a name longer, too", b"V")
    grown = splice(raw, append=added)
    assert len(grown) == len(raw) + len(added) + (0 if "headers" in Properties.parse(raw).spans else 4)
    bare = splice(grown, remove={b"a name longer than any of them"}, remove_prefixes=(b"a name longer, ",))
    assert bare == (raw if "headers" in Properties.parse(raw).spans else splice(bare, append=b""))
    assert splice(bare, drop={"headers"}) == splice(raw, drop={"headers"})


@given(properties(), st.sets(st.sampled_from(sorted(FLAGS))))
def test_drop(raw: bytes, drop: set[str]) -> None:
    before = Properties.parse(raw)
    after = Properties.parse(splice(raw, drop=drop))
    expected = {name: raw[start:stop] for name, (start, stop) in before.spans.items() if name not in drop}
    assert {name: after.raw[start:stop] for name, (start, stop) in after.spans.items()} == expected


A, B, C = entry(b"a", b"I\0\0\0\1"), entry(b"b", b"B\2"), entry(b"x-death", b"A" + sized(b""))
MODE, TYPE, ID = b"\x02", b"\x01t", b"\x02id"
FULL = struct.pack(">H", 0x9080 | 0x2000)  # content_type, headers, delivery_mode, message_id


def full(*headers: bytes) -> bytes:
    return FULL + TYPE + sized(b"".join(headers)) + MODE + ID


@pytest.mark.parametrize(
    ("before", "edit", "after"),
    [
        (full(A, B, C), lambda raw: splice(raw, remove={b"a"}), full(B, C)),
        (full(A, B, C), lambda raw: splice(raw, remove=frozenset({b"a", b"b", b"x-death"})), full()),
        (full(A, B, A), lambda raw: splice(raw, remove={b"a"}), full(B)),
        (full(C, A, C), lambda raw: splice(raw, remove_prefixes=(b"x-d", b"zz")), full(A)),
        (full(A), lambda raw: splice(raw, append=B), full(A, B)),
        (full(A, C), lambda raw: splice(raw, remove={b"x-death"}, append=B), full(A, B)),
        (full(A), lambda raw: splice(raw, drop={"headers"}), struct.pack(">H", 0x9080) + TYPE + MODE + ID),
        (full(A), lambda raw: splice(raw, drop={"headers"}, append=B), full(B)),
        (full(A), lambda raw: splice(raw, drop={"message_id"}), b"\xb0\x00" + full(A)[2:-3]),
        # No table yet: it goes after the content encoding and before everything else.
        (b"\0\0", lambda raw: splice(raw, append=B), b"\x20\0" + sized(B)),
        (b"\xc0\x80" + TYPE + TYPE + ID, lambda raw: splice(raw, append=B),
         b"\xe0\x80" + TYPE + TYPE + sized(B) + ID),
        (b"\x00\x90" + ID + b"\x01u", lambda raw: splice(raw, drop={"user_id"}), b"\x00\x80" + ID),
        (b"\x00\x10\x01u", lambda raw: splice(raw, drop=frozenset({"user_id", "expiration"})), b"\0\0"),
    ],
)  # fmt: skip
def test_edits(before: bytes, edit: Callable[[bytes], bytes], after: bytes) -> None:
    assert edit(before) == after
    Properties.parse(after)


def test_every_type_survives_its_neighbours_edits() -> None:
    table = table_of_every_type()
    raw = encode_headers(A + table + B)
    assert splice(raw, remove={b"a", b"b"}) == encode_headers(table)
    assert splice(raw, remove={b"a"}, append=C) == encode_headers(table + B + C)


def test_unknown_property() -> None:
    with pytest.raises(ValueError, match="'expires'"):
        splice(b"\0\0", drop={"expires"})


def test_headers_of_our_own() -> None:
    found = commands.Basic.Properties()
    raw = encode_headers(A)
    found.unmarshal(int.from_bytes(raw[:2], "big"), raw[2:])
    assert (found.headers, found.delivery_mode) == ({"a": 1}, 2)
    assert encode_headers() == b"\x30\0\0\0\0\0\x02"


# The values of fields.


@pytest.mark.parametrize(("kind", "raw", "expected"), EVERY_TYPE)
def test_every_type_has_its_value(kind: str, raw: bytes, expected: Value) -> None:
    found = decode(ord(kind), raw)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(("kind", "raw", "expected"), [row for row in EVERY_TYPE if row[0] != "T"])
def test_pamqp_reads_the_same(kind: str, raw: bytes, expected: Value) -> None:
    """Without timestamps: pamqp reads those beyond 2**32 as milliseconds."""
    assert oracle.embedded_value(kind.encode() + raw) == (1 + len(raw), expected)


def test_a_timestamp_differs_from_an_integer() -> None:
    assert isinstance(decode(ord("T"), bytes(8)), Timestamp)
    assert not isinstance(decode(ord("l"), bytes(8)), Timestamp)
    assert decode(ord("L"), struct.pack(">q", -2)) == -2, "as other clients write it"


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        ("I", b"\0\0\0"), ("I", b"\0\0\0\0\0"), ("S", b"\0\0\0"), ("S", b"\0\0\0\2a"), ("S", b"\0\0\0\1ab"),
        ("S", b"\xff\xff\xff\xff"), ("?", b""), ("\0", b""), ("A", sized(b"I\0")), ("A", sized(b"?")),
        ("F", sized(b"\5ab")), ("F", sized(b"\1a")), ("F", sized(b"\1aS\0")), ("V", b"\0"),
    ],
)  # fmt: skip
def test_broken_values(kind: str, raw: bytes) -> None:
    with pytest.raises(MalformedTable):
        decode(ord(kind), raw)


@pytest.mark.parametrize("kind", [b"A", b"F"])
@pytest.mark.parametrize("levels", [100, 200_000])
def test_deep_nesting_is_skipped_and_refused_when_read(kind: bytes, levels: int) -> None:
    value = nested(levels, kind)
    table = entry(b"deep", value) + entry(b"after", b"t\x01")
    assert [name for name, _, _ in entries(table, 0, len(table))] == [b"deep", b"after"]
    with pytest.raises(MalformedTable, match="deeper than 64"):
        decode(value[0], value[1:])


@pytest.mark.parametrize("kind", [b"A", b"F"])
def test_the_deepest_allowed_nesting_is_read(kind: bytes) -> None:
    value = nested(MAX_DEPTH, kind)
    found = decode(value[0], value[1:])
    depth = 0
    while found:
        assert isinstance(found, list | dict)
        found = found[0] if isinstance(found, list) else found[""]
        depth += 1
    assert depth == MAX_DEPTH - 1


@given(tables)
def test_entries_cover_the_table(parts: list[bytes]) -> None:
    table = b"".join(parts)
    found = entries(b"__" + table + b"\0\0", 2, len(table) + 2)
    assert len(found) == len(parts)
    assert b"".join(entry(name, (b"__" + table)[type_at:stop]) for name, type_at, stop in found) == table


@given(st.binary(max_size=80), st.integers(0, 255))
def test_random_bytes_are_a_value_or_malformed(raw: bytes, kind: int) -> None:
    try:
        decode(kind, raw)
        entries(raw, 0, len(raw))
    except MalformedTable:
        pass


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"I" + struct.pack(">i", 5000), b"I" + struct.pack(">i", -5000)),
        (b"b\x7f", b"b\x81"),
        (b"L" + struct.pack(">q", (1 << 63) - 1), b"L" + struct.pack(">q", 1 - (1 << 63))),
        (b"B\xff", b"s" + struct.pack(">h", -255)),
        (b"u" + struct.pack(">H", 65535), b"I" + struct.pack(">i", -65535)),
        (b"i" + struct.pack(">I", (1 << 32) - 1), b"l" + struct.pack(">q", -(1 << 32) + 1)),
    ],
)
def test_negated_integer(before: bytes, after: bytes) -> None:
    assert negated(before[0], before[1:]) == after


@given(st.sampled_from("bBsuIilL"), st.binary(min_size=8, max_size=8))
def test_a_negated_integer_is_the_negative(kind: str, noise: bytes) -> None:
    raw = noise[: SIZES[ord(kind)]]
    value = decode(ord(kind), raw)
    assert isinstance(value, int)
    if value > 0:
        turned = negated(ord(kind), raw)
        assert decode(turned[0], turned[1:]) == -value


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"d" + struct.pack(">d", 2.5), b"d" + struct.pack(">d", -2.5)),
        (b"f" + struct.pack(">f", 2.5), b"f" + struct.pack(">f", -2.5)),
        (b"D" + struct.pack(">Bi", 3, 1500), b"D" + struct.pack(">Bi", 3, -1500)),
        (b"S" + sized(b"5000"), b"S" + sized(b"-5000")),
        (b"S" + sized(b"+5000"), b"S" + sized(b"-5000")),
        (b"S" + sized(b"1.5"), b"S" + sized(b"-1.5")),
    ],
)
def test_negated(before: bytes, after: bytes) -> None:
    assert negated(before[0], before[1:]) == after


def test_encoders() -> None:
    assert long_string(b"ab") == b"S\0\0\0\2ab"
    assert byte_array(b"\xff") == b"x\0\0\0\1\xff"
    assert int64(-1) == b"l" + b"\xff" * 8
    assert entry(b"k", b"V") == b"\1kV"
    with pytest.raises(ValueError, match="64 bits"):
        int64(1 << 63)
    with pytest.raises(ValueError, match="255 bytes"):
        entry(b"k" * 256, b"V")
