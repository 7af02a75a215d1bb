"""A retry of a refused message goes only to its own exchange, with any headers."""

from __future__ import annotations

from typing import Any

import pytest

from delayer.amqp.properties import Properties
from delayer.amqp.values import Delivery, Outgoing
from delayer.core.message import DIRECT_REPLY
from delayer.format.refusal import NO_EDITS, EntryPoints, RetryEdits, build_retry, read_refusal, refused_properties
from tests.support.raw import Header, Props, Value, array, content, decimal, nested, number, table, text

LIMIT = 100_000
ENTRIES = EntryPoints(b"delays", frozenset({b"delayer.in", b"other.in"}))


@pytest.mark.parametrize(
    "props",
    [
        Props(),
        Props(headers=((b"x-delay", number("l", 5)), (b"who", text("me")))),
        Props(headers=(), expiration=b"60000", message_id=b"m", timestamp=5, type=b"t", app_id=b"a"),
        Props(expiration=b"1", cluster_id=b"c"),
        Props(expiration=b"315360000000"),
        Props(headers=((b"x-opt-delivery-time", number("l", 1_800_000_000_000)),)),
        Props(headers=((b"x-opt-delivery-time", text("1800000000000")),)),
        Props(headers=((b"timestamp_in_ms", number("l", 1_700_000_000_000)),)),
    ],
)
def test_a_retry_has_the_original_bytes_and_delay(props: Props) -> None:
    came = Delivery(1, False, b"delayer.in", b"orders.eu", props.encode(), b"body")
    properties, token = refused_properties(came, "too long", b"abc", LIMIT)
    stands = Delivery(2, True, b"delays.refused", b"orders.eu", properties, b"body")
    said = read_refusal(stands, ENTRIES)
    assert (said.id, said.reason, said.exchange, said.routing_key) == (
        "id:abc",
        "too long",
        b"delayer.in",
        b"orders.eu",
    )
    back = build_retry(stands, ENTRIES, LIMIT, NO_EDITS)
    assert isinstance(back, Outgoing)
    assert back._replace(properties=b"") == Outgoing(b"delayer.in", b"orders.eu", b"", b"body", token)
    expected = props if props.headers is not None else Props(**{**vars(props), "headers": ()})
    added = (b"x-delayer-id", b"timestamp_in_ms")
    assert Props.decode(back.properties).without(*added) == expected.without(*added)


def died(queue: str, exchange: str, key: str | bytes = "orders.eu") -> Value:
    return table(
        (b"exchange", text(exchange)), (b"queue", text(queue)), (b"reason", text("expired")),
        (b"routing-keys", array(text(key))),
    )  # fmt: skip


def standing(*headers: Header, **more: Any) -> Delivery:
    """A delivery of the refused queue."""
    return Delivery(1, False, b"delays.refused", b"orders.eu", Props(headers=headers, **more).encode(), b"")


def says(exchange: str, key: str = "orders.eu", reason: str = "too long") -> tuple[Header, ...]:
    """Headers of the daemon, or forged by a publisher."""
    return (
        (b"x-delayer-id", text("id")), (b"x-delayer-refused", text(reason)),
        (b"x-delayer-exchange", text(exchange)), (b"x-delayer-routing-key", text(key)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("stands", "reason"),
    [
        (standing((b"x-death", array(died("delays", "delayer.in")))), "the broker: expired in delays"),
        (
            standing((b"x-death", array(died("orders", "private"), died("delays", "delayer.in")))),
            "the broker: expired in delays",
        ),
        (
            standing(*says("delayer.in"), (b"x-death", array(died("delays", "delayer.in")))),
            "the broker: expired in delays, and by its own headers: too long",
        ),
        (standing(*says("delayer.in"), (b"x-death", array(died("orders", "private")))), "too long"),
        (standing(*says("delayer.in"), user_id=b"a user"), "too long"),
        (standing(*says("delayer.in"), (b"x-delayer-expiration", text("soon"))), "too long"),
        (standing(*says("delayer.in"), (b"x-delayer-expiration", text("9" * 300))), "too long"),
    ],
)
def test_a_retry_goes_back_through_its_exchange(stands: Delivery, reason: str) -> None:
    back = build_retry(stands, ENTRIES, LIMIT, NO_EDITS)
    assert isinstance(back, Outgoing)
    assert (back.exchange, back.routing_key) == (b"delayer.in", b"orders.eu")
    assert read_refusal(stands, ENTRIES).reason == reason
    props = Props.decode(back.properties)
    assert (props.user_id, props.expiration) == (None, None)
    assert content(props.one(b"x-delayer-id")) == back.token


def test_a_retry_without_an_exchange_goes_to_the_intake_queue() -> None:
    back = build_retry(standing(*says("", "delays")), ENTRIES, LIMIT, NO_EDITS)
    assert isinstance(back, Outgoing)
    assert (back.exchange, back.routing_key) == (b"", b"delays")


@pytest.mark.parametrize(
    ("stands", "why"),
    [
        (standing(*says("private")), "with this key; add a [[route]] for it, or drop the message"),
        (standing(*says("delayer.delay-level-03")), "no route comes from"),
        (standing(*says("", "delays.due")), "no route comes from"),
        (standing((b"x-death", array(died("delays", "private")))), "no route comes from"),
        (standing((b"x-death", array(died("orders", "delayer.in")))), "its origin is unknown"),
        (standing((b"x-death", array(died("delays", "delayer.in", b"k" * 256)))), "no route comes from"),
        # One of the two is forged, and the daemon cannot tell which.
        (standing(*says("other.in"), (b"x-death", array(died("delays", "delayer.in")))), "its origin is unknown"),
        (standing(*says("delayer.in"), (b"x-death", array(died("delays", "other.in")))), "its origin is unknown"),
        (standing(*says("delayer.in"), (b"x-delayer-delivery-time", nested(70))), "x-opt-delivery-time cannot be read"),
        (standing(*says("delayer.in"), (b"large", text("v" * LIMIT))), "are too long"),
        (standing(*says("delayer.in"), (b"CC", text("k"))), "close the channel: CC: expected an array"),
        (standing(*says("delayer.in"), reply_to=DIRECT_REPLY), "close the channel: reply_to: expected a queue"),
    ],
)
def test_forged_headers_stop_a_retry(stands: Delivery, why: str) -> None:
    assert why in str(build_retry(stands, ENTRIES, LIMIT, NO_EDITS))


@pytest.mark.parametrize("when", [number("l", 1_800_000_000_000_000), number("T", 1_800_000_000_000)])
def test_no_retry_carries_a_delivery_time_that_crashes_a_queue_of_rabbitmq_44(when: Value) -> None:
    came = Delivery(1, False, b"delayer.in", b"k", Props(headers=((b"x-opt-delivery-time", when),)).encode(), b"")
    properties, _ = refused_properties(came, "too long", b"abc", LIMIT)
    assert b"x-opt-delivery-time" not in properties, "the header would end the refused queue too"
    back = build_retry(Delivery(2, True, b"delays.refused", b"k", properties, b""), ENTRIES, LIMIT, NO_EDITS)
    assert isinstance(back, str) and "too far ahead" in back


def test_a_decimal_delivery_time_is_never_published() -> None:
    """RabbitMQ 4.4 would close the connection of the daemon."""
    when = decimal(3, 1_800_000_000)
    came = Delivery(1, False, b"delayer.in", b"k", Props(headers=((b"x-opt-delivery-time", when),)).encode(), b"")
    properties, _ = refused_properties(came, "no instant", b"abc", LIMIT)
    assert Properties.parse(properties).get(b"x-opt-delivery-time") is None
    stands = Delivery(2, True, b"delays.refused", b"k", properties, b"")
    assert "is no number" in str(build_retry(stands, ENTRIES, LIMIT, NO_EDITS))
    assert isinstance(
        build_retry(stands, ENTRIES, LIMIT, RetryEdits.of(None, {}, [b"x-opt-delivery-time"], {})), Outgoing
    )


def test_a_new_delivery_time_that_crashes_a_queue_stops_a_retry() -> None:
    mend = RetryEdits.of(None, {"x-opt-delivery-time": 1_800_000_000_000_000}, [], {})
    assert "too far ahead" in str(build_retry(standing(*says("delayer.in")), ENTRIES, LIMIT, mend))


@pytest.mark.parametrize(("delay_ms", "is_kept"), [(0, False), (1, True), (None, True)])
def test_a_retry_without_a_delay_does_not_look_like_one_that_came_back(delay_ms: int | None, is_kept: bool) -> None:
    """Next to ``x-delayer-due``, an ``x-delay`` of 0 is what an earlier delay left. It must stay otherwise, because
    without it an earlier ``timestamp`` would count."""
    edits = RetryEdits.of(delay_ms, {}, [], {})
    back = build_retry(standing(*says("delayer.in"), (b"x-delayer-due", text("1"))), ENTRIES, LIMIT, edits)
    assert isinstance(back, Outgoing)
    assert (Properties.parse(back.properties).get(b"x-delayer-due") is not None) == is_kept


def test_a_failed_retry_has_a_reason() -> None:
    nowhere = Delivery(1, False, b"", b"", Props().encode(), b"")
    assert build_retry(nowhere, ENTRIES, LIMIT, NO_EDITS).startswith("its origin is unknown")
    broken = Delivery(1, False, b"in", b"k", b"\x20\x00\x00\x00\x00\x02\x05x", b"")
    properties, _ = refused_properties(broken, "malformed", b"abc", LIMIT)
    assert "refused again" in str(build_retry(broken._replace(properties=properties), ENTRIES, LIMIT, NO_EDITS))
    assert "refused again" in str(build_retry(broken, ENTRIES, LIMIT, NO_EDITS))
