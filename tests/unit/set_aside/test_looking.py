"""Filters, ids and previews: users' requests, and the text of messages shown to them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayer.amqp import properties
from delayer.amqp.properties import Field, Properties, encode_headers, entry, int64, long_string, sized
from delayer.amqp.values import Delivery
from delayer.core.filters import EARLIEST_MS, LAST_MS, Filter, Token, names_of, own_name, read_token
from delayer.format import reading
from delayer.format.envelope import InvalidEnvelope, read_envelope
from delayer.format.headers import REFUSED
from delayer.format.refusal import EntryPoints, read_refusal
from delayer.set_aside.messages import Result
from delayer.store.lanes.notify import HELD, WAITING, parse_payload
from tests.support.raw import Props, Value, array, number, octets, table, text

ENTRIES = EntryPoints(b"delays", frozenset({b"delayer.in"}))


@pytest.mark.parametrize(
    ("delayed", "may_delay", "hidden"),
    [(0, False, ""), (0, True, "up to 12 s ago"), (2, True, "holds 2 messages"), (None, True, "may hold")],
)
def test_an_empty_queue_may_hide_messages(delayed: int | None, may_delay: bool, hidden: str) -> None:
    found: Result = Result(0, delayed, may_delay=may_delay)
    assert hidden in found.hidden and bool(found.hidden) == bool(hidden)


@pytest.mark.parametrize(
    ("given", "expected"),
    [("id:7", Token(7)), ("id:48213@1795291200000", Token(48213, 1795291200000)), (" id:5@-1 ", Token(5, -1))],
)
def test_ids_of_delayer_are_parsed(given: str, expected: Token) -> None:
    assert read_token(given) == expected
    assert read_token(str(expected)) == expected


@pytest.mark.parametrize(
    "given",
    ["", "5", "48213@1795291200000", "#5", "ID:5", "id:", "id:x", "id:5@", "id:@5", "id:-5", "id:5@x", "id:5@1@2",
     "id:9223372036854775808"],
)  # fmt: skip
def test_invalid_ids_of_delayer_are_rejected(given: str) -> None:
    with pytest.raises(ValueError, match="an id as"):
        read_token(given)


@pytest.mark.parametrize(
    ("delayer_id", "message_id", "names"),
    [
        ("c0ffee", "order-7", {"id:c0ffee", "order-7"}),
        ("5", "5", {"id:5", "5"}),
        ("c0ffee", "id:5", {"id:c0ffee"}),
        ("", "", set()),
    ],
)
def test_a_publishers_id_is_never_taken_for_one_of_delayer(delayer_id: str, message_id: str, names: set[str]) -> None:
    assert names_of(own_name(delayer_id), message_id) == names


def test_filters_are_shown_as_given() -> None:
    assert Filter().everything
    assert not Filter().narrow
    assert Filter().as_dict() == {}
    some = Filter(route=b"in", due_from_ms=0, headers=((b"who", "me"),))
    assert some.narrow
    assert some.as_dict() == {"route": "in", "due_from_ms": 0, "headers": {"who": "me"}}
    assert not Filter(due_before_ms=5).narrow
    assert [Filter(due_from_ms=1, due_before_ms=3).in_range(at) for at in range(5)] == [False, True, True, False, False]


HEADERS: list[tuple[bytes, Value, str, object, str]] = [
    (b"text", text("käse"), "string", "käse", "käse"),
    (b"broken", text(b"\xff"), "string", "\\xff", "\\xff"),
    (b"bytes", octets(b"\x00a"), "bytes", "\x00a", "\x00a"),
    (b"number", number("l", -5), "int64", -5, "-5"),
    (b"small", number("b", 5), "int8", 5, "5"),
    (b"half", number("d", 0.5), "double", 0.5, "0.5"),
    (b"nan", number("d", float("nan")), "double", "nan", "nan"),
    (b"yes", Value(b"t", b"\x01"), "bool", True, "true"),
    (b"when", Value(b"T", (1_900_000_000).to_bytes(8, "big")), "timestamp", "2030-03-17T17:46:40Z",
     "2030-03-17T17:46:40Z"),
    (b"nothing", Value(b"V", b""), "void", None, "None"),
]  # fmt: skip


def test_headers_are_read_with_their_types_and_compared_as_text() -> None:
    raw = Props(headers=tuple((name, value) for name, value, *_ in HEADERS), message_id=b"m", delivery_mode=2).encode()
    found = reading.decode_properties(raw, whole=True)
    assert found.properties == {"delivery_mode": 2, "message_id": "m"}
    assert [tuple(one) for one in found.headers] == [(n.decode(), kind, value) for n, _, kind, value, _ in HEADERS]
    for name, _, _, _, as_text in HEADERS:
        for asked, expected in ((as_text, True), (as_text + "x", False)):
            assert reading.has_properties(raw, Filter(headers=((name, asked),))) is expected, name
    assert reading.has_properties(raw, Filter())


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([b"V"] * 30_000, reading.MOST_HEADERS),
        ([sized(b"A", b"V" * 30_000), *[int64(1)] * 20], 20),
        ([sized(b"F", b"\x01aV" * 30_000), long_string(bytes(reading.MOST_HEADER_BYTES))], 0),
        ([sized(b"A", b"V" * 3_000)] * 9, 2),
        ([int64(1)] * reading.MOST_HEADERS, reading.MOST_HEADERS),
        ([], 0),
    ],
)
def test_a_list_leaves_out_headers_and_says_how_much(values: list[bytes], shown: int) -> None:
    table = [entry(b"h", value) for value in values]
    raw = encode_headers(b"".join(table))
    cut, all_ = (reading.decode_properties(raw, whole=whole) for whole in (False, True))
    assert (len(cut.headers), len(all_.headers), all_.left_out) == (shown, len(values), 0)
    size = len(raw) - len(encode_headers())
    assert cut.left_out <= size and (cut.left_out == 0) == (shown == len(values))
    assert size - cut.left_out <= reading.MOST_HEADER_BYTES
    assert cut.properties == all_.properties == {"delivery_mode": 2}


def test_what_lists_read_of_a_message_makes_no_objects_of_other_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0

    def field(*values: Any) -> Field:
        nonlocal made
        made += 1
        return Field(*values)

    monkeypatch.setattr(properties, "Field", field)
    raw = encode_headers(entry(b"h", b"V") * 30_000 + entry(REFUSED, long_string(b"why")))
    assert read_refusal(Delivery(1, False, b"", b"", raw, b""), ENTRIES).reason == "why"
    with pytest.raises(InvalidEnvelope):
        read_envelope(Properties.parse(raw), b"", 100_000)
    reading.decode_properties(raw, whole=False)
    assert made <= reading.MOST_HEADERS + 1


def test_a_forged_history_of_dead_letters_is_not_decoded_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, value_at = 0, properties.value_at

    def decode(*where: Any) -> Any:
        nonlocal decoded
        decoded += 1
        return value_at(*where)

    monkeypatch.setattr(properties, "value_at", decode)
    died = sized(b"F", entry(b"queue", long_string(b"delays")) + entry(b"reason", long_string(b"expired")))
    raw = encode_headers(entry(b"x-death", sized(b"A", b"V" * 9_000 + died + sized(b"F", b"") * 9_000)))
    assert read_refusal(Delivery(1, False, b"", b"", raw, b""), ENTRIES).reason == "the broker: expired in delays"
    assert decoded == 3


@given(st.binary(max_size=60))
def test_a_list_reads_the_headers_as_a_single_message_has_them(table: bytes) -> None:
    raw = encode_headers(table)
    assert reading.decode_properties(raw, whole=False) == reading.decode_properties(raw, whole=True)


def test_nested_values_are_plain() -> None:
    raw = Props(headers=((b"a", array(number("I", 1), table((b"k", text("v"))))),)).encode()
    assert reading.decode_properties(raw, whole=True).headers[0].value == [1, {"k": "v"}]


@given(st.binary(max_size=60))
def test_any_bytes_can_be_read(raw: bytes) -> None:
    reading.decode_properties(raw, whole=True)
    reading.has_properties(raw, Filter(headers=((b"", ""),)))
    read_refusal(Delivery(1, False, b"", b"", raw, b""), ENTRIES)


@given(st.binary(max_size=60), st.integers(0, 60))
def test_previews_are_printable(body: bytes, limit: int) -> None:
    assert all(one.isprintable() or one in "\t\r\n" for one in reading.preview(body, limit))


def test_previews() -> None:
    assert reading.preview(b'{"a": 1}') == '{"a": 1}'
    assert reading.preview("käse".encode(), 2) == "k"  # never half a character
    assert reading.preview(b"\x00\x01") == "00 01"
    assert reading.preview(b"\x1b[31mred") == b"\x1b[31mred".hex(" ")


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ("waiting 5", (WAITING, 5)),
        ("held -1", (HELD, -1)),
        ("", None),
        ("waiting", None),
        ("other 5", None),
        (f"held {LAST_MS + 1}", None),
        (f"waiting {EARLIEST_MS - 1}", None),
        (f"waiting -1{'0' * 400}", None),  # more than a float has
    ],
)
def test_notifications_of_lanes(payload: str, expected: tuple[str, int] | None) -> None:
    assert parse_payload(payload) == expected
