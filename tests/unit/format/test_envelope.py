"""Envelopes: a message comes out unchanged, even from an envelope of an older version."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayer.amqp.properties import Properties, byte_array, encode_headers, entry, int64, long_string
from delayer.core.cascade import Cascade, routing_key
from delayer.core.delay_headers import LONGEST_TIMER_MS
from delayer.core.hold import Hold, HoldKind
from delayer.core.message import BROKER_LEAD_MS, REPLACE, Parcel, Target
from delayer.core.units import LATEST_MS
from delayer.format.envelope import (
    ID_BYTES,
    Endpoints,
    Envelope,
    HoldNote,
    InvalidEnvelope,
    envelope_properties,
    into_broker,
    into_cascade,
    read_envelope,
)
from delayer.format.headers import ROOM
from tests.unit.amqp.tables import properties, sized, text, with_headers

DUE_MS = 1_800_000_000_000
MAX = 131_052


# An envelope of format 1. Never change it: such messages may be in a cascade for years.
FORMAT_1 = bytes.fromhex(
    "3000000000f8"
    "0c782d64656c617965722d6964530000000269640d782d64656c617965722d6475656c000001a3185c5000"
    "12782d64656c617965722d656e76656c6f70656c0000000000000001"
    "0f782d64656c617965722d726f75746553000000096f72646572732e696e"
    "12782d64656c617965722d65786368616e676553000000096f72646572732e696e"
    "15782d64656c617965722d726f7574696e672d6b65795300000003612e62"
    "0c782d64656c617965722d746f530000000a6f72646572732e6f7574"
    "10782d64656c617965722d746f2d6b65795300000003612e62"
    "14782d64656c617965722d70726f706572746965737800000005" "2000000000"
    "02"
)  # fmt: skip
PLAIN = Parcel(DUE_MS, b"orders.in", b"orders.in", b"a.b", Target(b"orders.out", b"a.b"), b"\x20\x00\0\0\0", b"body")


def opened(raw: bytes, body: bytes = b"body", max_properties: int = MAX) -> Envelope:
    return read_envelope(Properties.parse(raw), body, max_properties)


short = st.binary(max_size=5) | st.just(b"s" * 255)
parcels = st.builds(
    Parcel,
    st.integers(0, LATEST_MS),
    short,
    short,
    short,
    st.builds(Target, short, short),
    properties(),
    st.binary(max_size=9),
    st.none(),
    st.just(b""),  # the envelope carries its own id instead
    mode=st.just(REPLACE),
    since_ms=st.none(),
)


held = st.none() | st.builds(
    HoldNote,
    st.builds(Hold, st.sampled_from(HoldKind), st.text(max_size=600), st.booleans(), st.booleans()),
    st.integers(1, (1 << 31) - 1),
    st.none() | st.integers(0, LATEST_MS),
)


@given(parcels, st.binary(max_size=ID_BYTES), held)
def test_an_envelope_returns_its_message(parcel: Parcel, id: bytes, held: HoldNote | None) -> None:
    raw = envelope_properties(parcel, id, held)
    envelope = opened(raw, parcel.body)
    assert envelope[:2] == (id, parcel)
    found = envelope.held
    assert (found is None) == (held is None)
    if found is not None and held is not None:
        text = found.hold.text
        assert found == held._replace(hold=replace(held.hold, text=text))
        assert held.hold.text.encode("utf-8", "replace").startswith(text.encode())
    assert raw.endswith(b"\x02")
    assert Properties.parse(raw).spans.keys() == {"headers", "delivery_mode"}  # the broker acts on none of them


def test_the_format() -> None:
    assert envelope_properties(PLAIN, b"id") == FORMAT_1
    assert opened(FORMAT_1) == Envelope(b"id", PLAIN)


def test_the_broker_may_add_to_an_envelope() -> None:
    found = Properties.parse(FORMAT_1)
    start, stop = found.spans["headers"]
    start += 4  # the length of the table
    died = entry(b"x-death", b"A" + sized(b"")) + text("x-first-death-queue")
    assert opened(with_headers(FORMAT_1[start:stop], died)) == Envelope(b"id", PLAIN)


def carrier(**changed: bytes | None) -> bytes:
    """An envelope with other values: underscores for hyphens, None to leave one out."""
    values: dict[str, bytes | None] = {
        "id": long_string(b"id"), "due": int64(DUE_MS), "envelope": int64(1), "route": long_string(b"r"),
        "exchange": long_string(b"e"), "routing-key": long_string(b"k"), "to": long_string(b"t"),
        "to-key": long_string(b"k"), "properties": byte_array(b"\0\0"),
    }  # fmt: skip
    values |= {name.replace("_", "-"): value for name, value in changed.items()}
    return encode_headers(b"".join(entry(b"x-delayer-" + n.encode(), v) for n, v in values.items() if v is not None))


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"\0\0", "header x-delayer-envelope is missing"),
        *(
            (carrier(**{name.replace("-", "_"): None}), f"header x-delayer-{name} is missing")
            for name in ("id", "due", "envelope", "route", "exchange", "routing-key", "to", "to-key", "properties")
        ),
        (carrier(envelope=int64(2)), "expected envelope format 1, found 2"),
        (carrier(envelope=int64(0)), "expected envelope format 1, found 0"),
        (carrier(envelope=long_string(b"1" * 100)), "header x-delayer-envelope: expected at most 8 bytes, found 100"),
        (carrier(due=int64(-1)), "expected a due instant"),
        (carrier(due=int64(LATEST_MS + 1)), "expected a due instant"),
        (carrier(due=long_string(b"\x7f" * 9)), "header x-delayer-due: expected at most 8 bytes, found 9"),
        (carrier(id=long_string(b"i" * 33)), "header x-delayer-id: expected at most 32 bytes, found 33"),
        (carrier(to=long_string(b"t" * 256)), "header x-delayer-to: expected at most 255 bytes, found 256"),
        (carrier(to_key=long_string(b"t" * 256)), "header x-delayer-to-key: expected at most 255 bytes"),
        (carrier(route=long_string(b"t" * 256)), "header x-delayer-route: expected at most 255 bytes"),
        (carrier(properties=byte_array(bytes(MAX - ROOM + 1))), "header x-delayer-properties: expected at most"),
    ],
)
def test_other_messages_are_no_envelopes(raw: bytes, reason: str) -> None:
    with pytest.raises(InvalidEnvelope, match=reason):
        opened(raw)


CASCADE = Endpoints(Cascade(), b"delays.due", b"delays.refused", MAX)


@given(parcels, held, st.integers(BROKER_LEAD_MS, LATEST_MS))
def test_a_broker_that_delays_gets_the_same_envelope_with_a_safe_delivery_time(
    parcel: Parcel, note: HoldNote | None, at_ms: int
) -> None:
    sent = into_broker(parcel, b"id", at_ms, 0, replace(CASCADE, broker_delays=True), held=note)
    assert (sent.exchange, sent.routing_key) == (b"delayer.delay-delivery", routing_key(0, b"delays.due"))
    assert (sent.body, sent.token) == (parcel.body, b"id")
    timer = Properties.parse(sent.properties).get(b"x-opt-delivery-time")
    assert timer is not None and (timer.type, timer.value) == (ord("l"), min(at_ms - BROKER_LEAD_MS, LONGEST_TIMER_MS))
    plain = envelope_properties(parcel, b"id", note, BROKER_LEAD_MS)
    assert opened(sent.properties, parcel.body) == opened(plain, parcel.body)
    assert into_broker(parcel, b"id", at_ms, 7, CASCADE, held=note) == into_cascade(
        parcel, b"id", 7, CASCADE, held=note
    )
