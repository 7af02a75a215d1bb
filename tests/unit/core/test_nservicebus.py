"""Instants and delays in NServiceBus headers: a row for every shape, and the invalid shapes."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayer.core.delay_headers import UnreadableDelay, read_instant_ms
from delayer.core.nservicebus import (
    CLEAR_TIMEOUTS,
    DELAY_IN_SECONDS,
    DELAYED_UNTIL,
    EXPIRE,
    REPLY_TO,
    RETRIES_TIMESTAMP,
    ROUTE_EXPIRED_TO,
    SAGA_ID,
    TIME_SENT,
    cleared_timeouts,
    delay_seconds,
    delayed_until_ms,
    read_wire_instant_ms,
    saga_of,
    timeout_address,
)
from tests.support.raw import wire_instant

SENT = "2026-04-29 22:11:26:330982 Z"
SENT_MS = 1_777_500_686_331
SAGA = "2d6f1c1e-6e7c-4d0b-9f6c-b2a300e5c1aa"


def test_an_instant_is_rounded_up_to_the_millisecond() -> None:
    assert read_wire_instant_ms(SENT) == SENT_MS
    assert datetime.fromtimestamp(SENT_MS / 1000, UTC).isoformat() == "2026-04-29T22:11:26.331000+00:00"


@pytest.mark.parametrize(
    "value",
    [
        "", "2026-04-29 22:11:26", "2026-04-29 22:11:26.330982 Z", "2026-04-29 22:11:26:330982", SENT + " ",
        "2026-04-29T22:11:26:330982 Z", "2026-02-30 22:11:26:330982 Z", "2026-04-29 24:11:26:330982 Z", b"x", 7, None,
        "٢٠٢٦-04-29 22:11:26:330982 Z", "2026-04-29 22:11:26:33098 Z",
    ],
)  # fmt: skip
def test_an_invalid_instant_is_refused_with_the_expected_form(value: object) -> None:
    with pytest.raises(UnreadableDelay, match=r"expected an instant like .*, found"):
        read_wire_instant_ms(value)


@given(st.integers(0, 253_402_300_799_999))
def test_an_instant_comes_back_from_its_text(epoch_ms: int) -> None:
    text = wire_instant(epoch_ms)
    assert len(text) == 28
    assert read_wire_instant_ms(text) == epoch_ms


@given(
    st.datetimes(),
    st.sampled_from(["", "0000-01-01", "0000-02-29", "2026-02-29", "2026-13-01", "2026-06-00"]),
    st.sampled_from([None, 59, 60, 61]),
)
def test_wire_instants_are_read_like_rfc_3339(moment: datetime, day: str, second: int | None) -> None:
    """Both readers agree, also about days and seconds that do not exist."""
    date = day or moment.date().isoformat()
    time = f"{moment:%H:%M:}{moment.second if second is None else second:02d}"
    try:
        expected: int | None = read_instant_ms(f"{date} {time}.{moment.microsecond:06d}Z")
    except UnreadableDelay:
        expected = None
    text = f"{date} {time}:{moment.microsecond:06d} Z"
    if expected is not None:
        assert read_wire_instant_ms(text) == expected
    else:
        with pytest.raises(UnreadableDelay):
            read_wire_instant_ms(text)


@pytest.mark.parametrize(
    ("headers", "due_ms"),
    [
        ({}, None),
        ({DELAYED_UNTIL: SENT}, None),  # the message was delayed once, but no longer is
        ({DELAY_IN_SECONDS: 60}, None),  # without an instant to measure from
        ({DELAY_IN_SECONDS: 60, TIME_SENT: SENT}, SENT_MS + 60_000),
        ({DELAY_IN_SECONDS: 0, TIME_SENT: SENT}, SENT_MS),
        ({DELAY_IN_SECONDS: -123, TIME_SENT: SENT}, SENT_MS - 123_000),
        # A delayed retry: only the time of the failure is of this sending.
        (
            {
                DELAY_IN_SECONDS: 10,
                TIME_SENT: SENT,
                DELAYED_UNTIL: "2026-04-29 22:12:00:000000 Z",
                RETRIES_TIMESTAMP: "2026-04-30 22:11:26:330000 Z",
            },
            SENT_MS - 1 + 86_400_000 + 10_000,
        ),
        # An outbox kept the message for ten minutes, and the rest of its delay was shorter then.
        ({DELAY_IN_SECONDS: 3000, TIME_SENT: SENT, DELAYED_UNTIL: "2026-04-29 23:11:26:330982 Z"}, SENT_MS + 3_600_000),
    ],
)
def test_the_due_instant_of_a_delayed_message(headers: dict[bytes, object], due_ms: int | None) -> None:
    assert delayed_until_ms(headers) == due_ms


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({DELAY_IN_SECONDS: "soon", TIME_SENT: SENT}, "expected seconds"),
        ({DELAY_IN_SECONDS: 5, TIME_SENT: "yesterday"}, "NServiceBus.TimeSent"),
        ({DELAY_IN_SECONDS: 5, TIME_SENT: SENT, RETRIES_TIMESTAMP: 5}, "NServiceBus.Retries.Timestamp"),
        ({DELAY_IN_SECONDS: 5, TIME_SENT: SENT, DELAYED_UNTIL: b"\xff"}, "NServiceBus.DeliverAt"),
    ],
)
def test_an_unreadable_header_is_named(headers: dict[bytes, object], named: str) -> None:
    with pytest.raises(UnreadableDelay, match=named):
        delayed_until_ms(headers)


def test_the_delay_of_a_message_in_seconds() -> None:
    assert delay_seconds({}) is None
    assert delay_seconds({DELAY_IN_SECONDS: 2147483647}) == 2147483647


@pytest.mark.parametrize(
    ("headers", "address"),
    [
        ({}, None),
        ({ROUTE_EXPIRED_TO: "Sales"}, None),
        ({EXPIRE: SENT, ROUTE_EXPIRED_TO: "Sales.Orders"}, b"Sales.Orders"),
        ({EXPIRE: SENT, ROUTE_EXPIRED_TO: "Sales", REPLY_TO: "Other"}, b"Sales"),
        ({EXPIRE: SENT, ROUTE_EXPIRED_TO: "", REPLY_TO: "Other"}, b"Other"),
        ({EXPIRE: SENT, REPLY_TO: "Other@MACHINE"}, b"Other@MACHINE"),
    ],
)
def test_requests_to_a_timeout_manager(headers: dict[bytes, object], address: bytes | None) -> None:
    assert timeout_address(headers) == address


@pytest.mark.parametrize("headers", [{EXPIRE: SENT}, {EXPIRE: SENT, REPLY_TO: 5}, {EXPIRE: "x", REPLY_TO: "Sales"}])
def test_a_timeout_without_an_instant_or_an_address_is_unreadable(headers: dict[bytes, object]) -> None:
    with pytest.raises(UnreadableDelay):
        timeout_address(headers)


@pytest.mark.parametrize(
    ("headers", "saga"),
    [
        ({}, None),
        ({SAGA_ID: SAGA}, None),
        ({CLEAR_TIMEOUTS: "False", SAGA_ID: SAGA}, None),
        ({CLEAR_TIMEOUTS: "True", SAGA_ID: SAGA}, SAGA.encode()),
        ({CLEAR_TIMEOUTS: "true", SAGA_ID: SAGA.upper()}, SAGA.encode()),
        ({CLEAR_TIMEOUTS: True, SAGA_ID: SAGA}, SAGA.encode()),
    ],
)
def test_the_saga_of_cleared_timeouts(headers: dict[bytes, object], saga: bytes | None) -> None:
    assert cleared_timeouts(headers) == (None if saga is None else b"nservicebus-saga:%b:" % saga)


@pytest.mark.parametrize("saga", [None, "", "00000000-0000-0000-0000-000000000000", 5])
def test_clearing_timeouts_without_a_saga_is_unreadable(saga: object) -> None:
    assert saga_of({SAGA_ID: saga}) is None
    with pytest.raises(UnreadableDelay, match="expected a saga"):
        cleared_timeouts({CLEAR_TIMEOUTS: "True", SAGA_ID: saga})
