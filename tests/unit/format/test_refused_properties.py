"""The properties of refused messages, to the byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayer.amqp.properties import Properties, byte_array, encode_headers, entry, long_string
from delayer.amqp.values import Delivery
from delayer.core.marks import ID
from delayer.core.message import DIRECT_REPLY
from delayer.format.headers import EXCHANGE, ROUTING_KEY
from delayer.format.refusal import refused_properties
from delayer.format.release import why_unpublishable
from tests.unit.amqp.tables import properties, sized, text, with_headers, with_short

MAX = 131_052


def delivered(raw: bytes, body: bytes = b"") -> Delivery:
    return Delivery(1, False, b"orders.in", b"k", raw, body)


def test_a_full_frame_keeps_no_forged_header() -> None:
    """Tools for refused messages trust these headers, and a full frame leaves no room for the daemon's own."""
    forged = (text("x-delayer-refused"), text("x-delayer-exchange", "private"), text("x-delayer-id"), text("x-death"))
    raw = with_headers(*forged, text("large", "v" * 1_000))
    came = Delivery(1, False, b"in", b"k", raw, b"")
    kept, token = refused_properties(came, "too long to carry", b"id", 1_100)
    assert (kept, token) == (with_headers(text("large", "v" * 1_000)), b"")


def test_a_refused_message_drops_properties_that_do_not_fit() -> None:
    came = delivered(with_headers(text("large", "v" * 200_000)))
    kept, token = refused_properties(came, "too long to carry", b"id", MAX)
    names = {field.name for field in Properties.parse(kept).headers_items()}
    assert (names, token) == ({ID, b"x-delayer-refused", EXCHANGE, ROUTING_KEY}, b"id")


GAINED = (
    entry(ID, long_string(b"id"))
    + entry(b"x-delayer-refused", long_string(b"why"))
    + entry(b"x-delayer-exchange", long_string(b"orders.in"))
    + entry(b"x-delayer-routing-key", long_string(b"k"))
)


def refused(raw: bytes, max_properties: int = MAX) -> tuple[bytes, bytes]:
    return refused_properties(delivered(raw), "why", b"id", max_properties)


def test_a_second_refusal_does_not_add_headers() -> None:
    once, _ = refused(with_headers(text("a")))
    assert refused(once) == (once, b"id")


@pytest.mark.parametrize(
    "raw", [b"", b"\xff", b"\x00\x01", b"\x20\x00\0\0\0\x09broken", with_headers(b"\x03bad?"), b"\x80\x00\x09cut"]
)
def test_broken_property_bytes_are_kept_in_a_header(raw: bytes) -> None:
    wrapped = encode_headers(GAINED + entry(b"x-delayer-properties", byte_array(raw)))
    assert refused(raw) == (wrapped, b"id")


def test_a_table_that_fills_the_frame_keeps_its_bytes() -> None:
    raw = with_headers(entry(b"x", byte_array(bytes(1000))))
    whole, _ = refused(raw)
    wrapped = encode_headers(GAINED + entry(b"x-delayer-properties", byte_array(raw)))
    assert len(wrapped) > len(whole)
    assert refused(raw, len(whole)) == (whole, b"id")
    assert refused(raw, len(whole) - 1) == (raw, b"")
    full = b"\x21\x10" + sized(entry(b"x", byte_array(bytes(1000)))) + b"\x0560000\x05guest"
    assert refused(full, len(full)) == (raw, b"")  # but expiration and user id go


@pytest.mark.parametrize(
    "raw",
    [
        with_headers(text("a"), text("CC")),
        with_headers(entry(b"BCC", b"V")),
        with_short(with_short(with_headers(text("a")), "reply_to", DIRECT_REPLY), "user_id", b"guest"),
    ],
)
def test_properties_that_would_close_the_channel_are_kept_in_a_header(raw: bytes) -> None:
    wrapped = encode_headers(GAINED + entry(b"x-delayer-properties", byte_array(raw)))
    assert refused(raw) == (wrapped, b"id")
    kept, token = refused(raw, len(wrapped) - 1)
    assert (why_unpublishable(Properties.parse(kept)), token) == ("", b"")


@given(properties() | st.binary(max_size=400), st.integers(0, 1000), st.text(max_size=700))
def test_anything_can_be_refused(raw: bytes, room: int, reason: str) -> None:
    limit = max(len(raw), 900) + room
    found, token = refused_properties(delivered(raw), reason, b"id", limit)
    assert len(found) <= limit
    parsed = Properties.parse(found)
    assert parsed.short("expiration") is None
    assert parsed.short("user_id") is None
    assert not why_unpublishable(parsed)
    if token:
        field = parsed.get(ID)
        assert field is not None
        assert field.content == token


def test_a_reason_is_cut_between_two_characters() -> None:
    field = Properties.parse(refused_properties(delivered(b"\0\0"), "aü" * 400, b"id", MAX)[0]).get(
        b"x-delayer-refused"
    )
    assert field is not None
    assert isinstance(field.value, str)
    assert len(field.content) <= 500
