"""Edits of a message on its way, to the byte."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import assume, given

from delayer.amqp.properties import Properties, byte_array, entry, int64, long_string
from delayer.amqp.values import Delivery
from delayer.core.hold import Hold, HoldKind
from delayer.core.marks import ID, LAST_DUE
from delayer.core.message import Parcel, Target
from delayer.core.retry_policy import FailedAttempt
from delayer.format.envelope import ID_BYTES, HoldNote, envelope_properties
from delayer.format.headers import ROOM
from delayer.format.refusal import refused_properties
from delayer.format.release import Unpublishable, note_failure, released_properties, why_unpublishable
from delayer.intake.handle import read_request
from tests.unit.amqp.tables import properties, sized, text, with_headers
from tests.unit.format.test_refused_properties import GAINED, refused

DUE_MS = 1_800_000_000_000
ADDED = entry(ID, long_string(b"id")) + entry(LAST_DUE, int64(DUE_MS))
MAX = 131_052


def released(raw: bytes) -> bytes:
    return released_properties(Properties.parse(raw), b"id", DUE_MS, MAX)


def delivered(raw: bytes, body: bytes = b"") -> Delivery:
    return Delivery(1, False, b"orders.in", b"k", raw, body)


def test_a_release_adds_two_headers_only() -> None:
    assert released(b"\0\0") == with_headers(ADDED)


def test_headers_of_the_broker_and_the_delay_are_removed() -> None:
    gone = [
        "x-death", "x-first-death-exchange", "x-first-death-queue", "x-first-death-reason", "x-last-death-exchange",
        "x-last-death-queue", "x-last-death-reason", "x-delivery-count", "x-acquired-count", "x-deliver-at",
        "x-opt-delivery-delay", "x-opt-delivery-time", "x-delay-routing-key", "x-delay-exchange", "x-delay-key",
        "x-delay-cancel", "x-delayer-id", "x-delayer-due",
    ]  # fmt: skip
    stay = [
        "x-deaths",
        "X-Death",
        "x-first-deat",
        "xx-first-death-",
        "x-delays",
        "x-delayer-user-id",
        "timestamp_in_ms",
    ]
    raw = with_headers(text("a"), *map(text, gone), *map(text, stay), text("x-death"), text("z"))
    assert released(raw) == with_headers(text("a"), *map(text, stay), text("z"), ADDED)


def test_the_first_delay_after_a_mark_counts_and_its_sign_is_flipped() -> None:
    mark, delay, other = (entry(b"x-delay", int64(value)) for value in (-1, 5_000, 7_000))
    properties = Properties.parse(with_headers(mark, delay, other))
    assert read_request(delivered(properties.raw), properties).headers == {b"x-delay": 5_000}
    turned = entry(b"x-delay", int64(-5_000))
    assert released(properties.raw) == with_headers(mark, turned, ADDED)


@pytest.mark.parametrize(
    ("said", "stays"),
    [
        (b"b\x05", b"b\xfb"),
        (b"I" + struct.pack(">i", 1500), b"I" + struct.pack(">i", -1500)),
        (long_string(b"1500.50"), long_string(b"-1500.50")),
        # 0 has no sign.
        (b"b\x00", b"b\x00"),
        (long_string(b"0"), long_string(b"0")),
        (b"d" + struct.pack(">d", -0.0), b"d" + struct.pack(">d", -0.0)),
        # A delay that is over.
        (b"b\xfb", b"b\xfb"),
        (b"d" + struct.pack(">d", -0.5), b"d" + struct.pack(">d", -0.5)),
        # Not a delay: the route reads another form.
        (long_string(b"soon"), long_string(b"soon")),
        (b"d" + struct.pack(">d", float("nan")), b"d" + struct.pack(">d", float("nan"))),
        (b"T" + struct.pack(">Q", 5), b"T" + struct.pack(">Q", 5)),
    ],
    ids=repr,
)
def test_the_delay_stays_with_its_sign_flipped(said: bytes, stays: bytes) -> None:
    raw = with_headers(text("a"), entry(b"x-delay", said), text("z"))
    assert released(raw) == with_headers(text("a"), entry(b"x-delay", stays), text("z"), ADDED)
    assert released(released(raw)) == with_headers(text("a"), entry(b"x-delay", stays), text("z"), ADDED)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"\x01\x00\x04soon", "expiration: expected 0 to 315360000000 milliseconds in digits, found 'soon'"),
        (b"\x02\x00\x15amq.rabbitmq.reply-to", "reply_to: expected a queue"),
        (with_headers(text("CC"), entry(b"CC", b"A" + sized(b""))), "CC: expected an array of routing keys, found 'v'"),
        (with_headers(entry(b"BCC", b"V")), "BCC: expected an array"),
    ],
)
def test_a_message_that_would_close_the_channel_does_not_leave(raw: bytes, why: str) -> None:
    with pytest.raises(Unpublishable, match=f"^the broker would close the channel: {why}"):
        released(raw)


def test_copies_an_expiration_and_a_reply_leave_unchanged() -> None:
    copies = entry(b"CC", b"A" + sized(long_string(b"audit")))
    raw = b"\x23\x00" + sized(copies) + b"\x18amq.rabbitmq.reply-to.g2\x0c315360000000"
    assert released(raw) == raw[:2] + sized(copies + ADDED) + raw[6 + len(copies) :]


def test_the_user_becomes_a_header() -> None:
    raw = b"\x20\x18" + sized(text("x-delayer-user-id", "forged")) + b"\x05guest\x03app"
    assert released(raw) == b"\x20\x08" + sized(ADDED + text("x-delayer-user-id", "guest")) + b"\x03app"


def test_a_delay_that_cannot_be_read_stays_as_it_is() -> None:
    deep = b"F" + sized(b"")
    for _ in range(70):
        deep = b"F" + sized(entry(b"t", deep))
    raw = with_headers(entry(b"x-delay", deep), text("a"))
    assert released(raw) == with_headers(entry(b"x-delay", deep), text("a"), ADDED)


@given(properties())
def test_a_second_release_changes_nothing_more(raw: bytes) -> None:
    assume(not why_unpublishable(Properties.parse(raw)))
    once = released(raw)
    without_user = released(once)
    assert Properties.parse(without_user).spans.keys() == Properties.parse(once).spans.keys()
    assert released(without_user) == without_user


FAILED = FailedAttempt(1, b"orders", "rejected", 1_800_000_000, b"shop", b"order.new", exhausted=False)


def failed(raw: bytes, failure: FailedAttempt = FAILED, max_properties: int = MAX) -> Properties:
    return Properties.parse(note_failure(Properties.parse(raw), failure, max_properties))


def value(found: Properties, name: str) -> Any:
    header = found.get(name.encode())
    assert header is not None, name
    return header.value


def test_a_dead_letter_gains_its_failure_and_keeps_its_other_headers() -> None:
    died = entry(b"x-death", b"A" + sized(b"")) + text("x-first-death-queue") + text("x-last-death-reason")
    found = failed(with_headers(text("mine"), died, text("last")))
    assert [field.name for field in found.headers_items()] == [
        b"mine", b"last", b"x-delayer-retries", b"x-delayer-failed-in", b"x-delayer-error", b"x-delayer-history"
    ]  # fmt: skip
    assert value(found, "x-delayer-retries") == 1
    assert value(found, "x-delayer-failed-in") == "orders"
    assert value(found, "x-delayer-error") == "rejected in queue orders"
    assert value(found, "x-delayer-history") == [
        {"queue": "orders", "reason": "rejected", "time": 1_800_000_000, "exchange": "shop", "routing-key": "order.new"}
    ]


def test_copies_of_a_dead_letter_are_not_sent_again() -> None:
    copies = b"A" + sized(long_string(b"audit"))
    found = failed(with_headers(entry(b"CC", copies), text("mine"), entry(b"BCC", copies)))
    assert found.get(b"CC") is found.get(b"BCC") is None
    assert value(found, "x-delayer-cc") == ["audit"]
    again = failed(found.raw, FAILED._replace(retries=2))
    assert value(again, "x-delayer-cc") == ["audit"]
    assert sum(one.name == b"x-delayer-cc" for one in again.headers_items()) == 1


def test_the_history_keeps_the_first_failure_and_the_last_ones() -> None:
    found = Properties.parse(b"\0\0")
    for n in range(1, 101):
        found = failed(found.raw, FAILED._replace(retries=n, at=n))
    assert [one["time"] for one in value(found, "x-delayer-history")] == [1, *range(82, 101)]
    assert value(found, "x-delayer-retries") == 100


def test_the_history_starts_over_in_another_queue() -> None:
    found = failed(failed(b"\0\0").raw, FAILED._replace(queue=b"billing"))
    assert [one["queue"] for one in value(found, "x-delayer-history")] == ["billing"]


def test_a_foreign_history_is_replaced_and_a_full_frame_gets_none() -> None:
    found = failed(with_headers(text("x-delayer-history", "long ago")), FAILED._replace(retries=2))
    assert len(value(found, "x-delayer-history")) == 1
    short = failed(b"\0\0", max_properties=ROOM + 150)
    assert short.get(b"x-delayer-history") is None
    assert value(short, "x-delayer-retries") == 1


def test_the_room_that_edits_need() -> None:
    """A message that passes the size check at intake passes every later step."""
    longest = b"n" * 255
    raw = with_headers(entry(b"x", byte_array(bytes(1000))))
    parcel = Parcel(DUE_MS, longest, longest, longest, Target(longest, longest), raw, b"")
    note = HoldNote(Hold(HoldKind.CLOSED_CONNECTION, "ü" * 600), 1, DUE_MS)
    assert len(envelope_properties(parcel, b"i" * ID_BYTES, note)) <= len(raw) + ROOM
    raw = b"\x20\x10" + sized(b"") + b"\xff" + bytes(255)
    assert len(released_properties(Properties.parse(raw), b"i" * ID_BYTES, DUE_MS, MAX)) <= len(raw) + ROOM
    every = delivered(raw)._replace(exchange=longest, routing_key=longest)
    assert len(refused_properties(every, "ü" * 600, b"i" * ID_BYTES, MAX)[0]) <= len(raw) + ROOM


def test_a_released_retry_loses_the_headers_of_its_refusal() -> None:
    again, _ = refused(with_headers(text("a")))
    assert released(again) == with_headers(text("a"), ADDED)
    with_user = b"\x20\x10" + sized(text("a") + GAINED + text("x-delayer-user-id")) + b"\x05guest"
    assert released(with_user) == with_headers(text("a"), ADDED, text("x-delayer-user-id", "guest"))


@pytest.mark.parametrize(
    "mention", [text("a", "x-delayer-refused"), text("x-delayer-refused-by"), text("X-delayer-refused")]
)
def test_headers_of_a_message_that_was_never_refused_stay(mention: bytes) -> None:
    raw = with_headers(text("x-delayer-exchange"), mention, text("x-delayer-routing-key"))
    assert released(raw) == raw[:2] + sized(raw[6:] + ADDED)


@pytest.mark.parametrize("due_ms", [-1, 0, -(1 << 62), (1 << 63) - 1])
def test_any_due_instant_that_a_row_can_hold_can_be_released(due_ms: int) -> None:
    field = Properties.parse(released_properties(Properties.parse(b"\0\0"), b"1", due_ms, MAX)).get(b"x-delayer-due")
    assert field is not None
    assert field.value == due_ms
