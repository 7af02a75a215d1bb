"""Keys of messages without ``x-delay-key`` (``key_from``), and the modes of keys."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delayer.amqp.values import Timestamp
from delayer.core.delay_headers import DelayRequest
from delayer.core.message import REPLACE, KeyMode, Target
from delayer.core.plan import Cancel, EnterCascade, Mode, Park, Policy, Refuse, Route
from tests.support.planning import decide, request

NOW = 1_800_000_000_000
BY_ID = Route(b"id.in", b"out", key_from="message_id")
BY_CORRELATION = Route(b"correlation.in", b"out", key_from="correlation_id")
BY_HEADER = Route(b"header.in", b"out", key_from="header:Order:No", default_delay_ms=5_000)
SAGAS = Route(b"sagas.in", b"", key_from="message_id", delay_from=("nservicebus-timeout", "x-delay"))
PLAIN = Route(b"plain.in", b"out")
STORE = Policy(
    Mode.STORE, {one.source: one for one in (BY_ID, BY_CORRELATION, BY_HEADER, SAGAS, PLAIN)}, max_delay_ms=1 << 50
)
NATIVE = replace(STORE, mode=Mode.NATIVE)
OUT = Target(b"out", b"k")


def ask(exchange: bytes, headers: dict[str, object] | None = None, **more: object) -> DelayRequest:
    return request(exchange, b"k", {name.encode(): value for name, value in (headers or {}).items()}, **more)


SOON = {"x-delay": 5_000}


@pytest.mark.parametrize("policy", [STORE, NATIVE], ids=["store", "native"])
@pytest.mark.parametrize(
    ("asked", "key", "undelayed"),
    [
        (ask(b"id.in", SOON, message_id=b"order-7"), b"order-7", False),
        (ask(b"correlation.in", SOON, correlation_id=b"o-7", message_id=b"m"), b"o-7", False),
        (ask(b"header.in", {"Order:No": "o-7"}), b"o-7", True),
        (ask(b"header.in", {"Order:No": b"\xff"}), b"\xff", True),
        (ask(b"header.in", {"Order:No": -4711}), b"-4711", True),
        (ask(b"header.in", {"Order:No": 0}), b"0", True),
        (ask(b"header.in", {"Order:No": "o" * 255}), b"o" * 255, True),
        (ask(b"id.in", SOON | {"x-delay-key": "k-1"}, message_id=b"order-7"), b"k-1", False),
    ],
)
def test_a_property_or_header_of_the_publisher_is_the_key(
    asked: DelayRequest, key: bytes, undelayed: bool, policy: Policy
) -> None:
    assert decide(asked, policy, NOW) == Park(NOW + 5_000, OUT, key, undelayed)


def test_a_message_due_at_once_is_parked_so_that_it_can_replace_another() -> None:
    assert decide(ask(b"id.in", message_id=b"order-7"), STORE, NOW) == Park(NOW, OUT, b"order-7", undelayed=True)


@pytest.mark.parametrize(
    "asked",
    [
        ask(b"id.in", SOON),
        ask(b"id.in", SOON, message_id=b"", correlation_id=b"o-7"),
        ask(b"correlation.in", SOON, message_id=b"m"),
        ask(b"header.in", SOON | {"order:no": "o-7", "Order": "o-7"}),
        *(ask(b"header.in", SOON | {"Order:No": empty}) for empty in ("", b"", None)),
        ask(b"plain.in", SOON, message_id=b"m"),
    ],
)
def test_a_message_without_that_value_has_no_key(asked: DelayRequest) -> None:
    assert decide(asked, STORE, NOW) == Park(NOW + 5_000, OUT)
    assert decide(asked, NATIVE, NOW) == EnterCascade(NOW + 5_000, 5, OUT)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (1.5, "expected a string, found 1.5"),
        (0.0, "expected a string, found 0.0"),
        (False, "expected a string, found False"),
        (Timestamp(5), "expected a string, found 5"),
        ([], "expected a string, found []"),
        ({"a": 1}, "expected a string, found {'a': 1}"),
        ("é" * 128, "expected at most 255 bytes, found 256"),
    ],
)
def test_another_value_is_refused(value: object, found: str) -> None:
    assert decide(ask(b"header.in", {"Order:No": value}), STORE, NOW) == Refuse(f"key_from header:Order:No: {found}")


def test_without_a_store_in_reach_a_message_with_a_key_is_refused() -> None:
    plan = decide(ask(b"id.in", SOON, message_id=b"order-7"), replace(NATIVE, has_store=False), NOW)
    assert isinstance(plan, Refuse)
    assert plan.reason.startswith("key_from message_id: keys and cancels need a store")
    assert isinstance(decide(ask(b"id.in", SOON), replace(NATIVE, has_store=False), NOW), EnterCascade)


def test_the_timeout_of_a_saga_keeps_the_key_by_which_its_saga_clears_it() -> None:
    headers: dict[str, object] = {
        "NServiceBus.Timeout.Expire": "2027-01-15 08:00:05:000000 Z",
        "NServiceBus.Timeout.RouteExpiredTimeoutTo": "Sales",
    }
    of_saga = {"NServiceBus.SagaId": "4a1c"}
    sales = Target(b"", b"Sales")
    key = b"nservicebus-saga:4a1c:m-1:%d" % (NOW + 5_000)
    assert decide(ask(b"sagas.in", headers | of_saga, message_id=b"m-1"), STORE, NOW) == Park(NOW + 5_000, sales, key)
    assert decide(ask(b"sagas.in", headers, message_id=b"m-1"), STORE, NOW) == Park(NOW + 5_000, sales, b"m-1")


def test_a_cancel_names_the_publishers_value() -> None:
    assert decide(ask(b"id.in", {"x-delay-cancel": "order-7"}, message_id=b"m-2"), STORE, NOW) == Cancel(b"order-7")


def test_the_named_header_is_read_and_stays_in_the_message() -> None:
    assert b"Order:No" in BY_HEADER.consulted
    assert b"Order:No" not in BY_HEADER.named
    assert b"" not in BY_ID.consulted


DEBOUNCE = {"x-delay-key-mode": "debounce", "x-delay-key-ceiling": 5}


@pytest.mark.parametrize("header", ["x-delay-key", "x-delay-cancel"])
@pytest.mark.parametrize("mode", [{}, {"x-delay-key-mode": "keep"}, DEBOUNCE])
def test_a_publisher_may_not_use_the_key_of_a_schedule(header: str, mode: dict[str, object]) -> None:
    headers = SOON | mode
    plan = decide(ask(b"plain.in", headers | {header: "delayer.schedule/tick"}), STORE, NOW)
    assert isinstance(plan, Refuse)
    assert "belong to schedules" in plan.reason
    by_id = decide(ask(b"id.in", headers, message_id=b"delayer.schedule/tick"), STORE, NOW)
    assert isinstance(by_id, Refuse)
    assert "belong to schedules" in by_id.reason


@pytest.mark.parametrize("policy", [STORE, NATIVE], ids=["store", "native"])
@pytest.mark.parametrize(
    ("headers", "mode"),
    [
        ({"x-delay-key-mode": "replace"}, REPLACE),
        ({"x-delay-key-mode": b"keep"}, KeyMode(keep=True)),
        ({"x-delay-key-mode": "debounce", "x-delay-key-ceiling": 0}, KeyMode(ceiling_ms=0)),
        ({"x-delay-key-mode": "debounce", "x-delay-key-ceiling": "60000"}, KeyMode(ceiling_ms=60_000)),
        ({"x-delay-key-mode": "debounce", "x-delay-key-ceiling": 0.5}, KeyMode(ceiling_ms=1)),
    ],
)
def test_a_message_chooses_the_mode_of_its_key(headers: dict[str, object], mode: KeyMode, policy: Policy) -> None:
    expected = Park(NOW + 5_000, OUT, b"k-1", mode=mode)
    assert decide(ask(b"plain.in", SOON | headers | {"x-delay-key": "k-1"}), policy, NOW) == expected
    assert decide(ask(b"id.in", SOON | headers, message_id=b"k-1"), policy, NOW) == expected


KEYED = {"x-delay-key": "k-1"}


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        (KEYED | {"x-delay-key-mode": "Keep"}, "x-delay-key-mode: expected replace, keep or debounce, found 'Keep'"),
        (KEYED | {"x-delay-key-mode": 5}, "x-delay-key-mode: expected replace, keep or debounce, found 5"),
        (KEYED | {"x-delay-key-mode": None}, "x-delay-key-mode: expected replace, keep or debounce, found None"),
        (
            KEYED | {"x-delay-key-mode": "debounce"},
            "x-delay-key-mode: debounce: expected its x-delay-key-ceiling, in milliseconds, found none",
        ),
        (
            KEYED | {"x-delay-key-mode": "keep", "x-delay-key-ceiling": 5},
            "x-delay-key-ceiling: expected x-delay-key-mode debounce, found keep",
        ),
        (KEYED | {"x-delay-key-ceiling": 5}, "x-delay-key-ceiling: expected x-delay-key-mode debounce, found replace"),
        (
            KEYED | {"x-delay-key-mode": "debounce", "x-delay-key-ceiling": -1},
            "x-delay-key-ceiling: expected zero or more milliseconds, found -1",
        ),
        (
            KEYED | {"x-delay-key-mode": "debounce", "x-delay-key-ceiling": "1m"},
            "x-delay-key-ceiling: expected milliseconds as an integer, a numeric string or a float, found '1m'",
        ),
        ({"x-delay-key-mode": "keep"}, "x-delay-key-mode: expected a key, by x-delay-key or key_from, found none"),
        ({"x-delay-key-ceiling": 5}, "x-delay-key-ceiling: expected a key, by x-delay-key or key_from, found none"),
    ],
)
def test_a_mode_that_cannot_apply_is_refused(headers: dict[str, object], reason: str) -> None:
    assert decide(ask(b"plain.in", SOON | headers), STORE, NOW) == Refuse(reason)


def test_a_cancel_has_no_mode() -> None:
    asked = ask(b"plain.in", {"x-delay-cancel": "k-1", "x-delay-key-mode": "nonsense"})
    assert decide(asked, STORE, NOW) == Cancel(b"k-1")
