"""decide() on routes for messages of other systems, and on routes of dead letters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayer.amqp.values import Timestamp
from delayer.core import retry_policy
from delayer.core.cascade import routing_key
from delayer.core.delay_headers import DelayRequest
from delayer.core.delay_sources import CONSULTED, SOURCES, source_of
from delayer.core.message import KeyGroup, Target
from delayer.core.nservicebus import (
    CLEAR_TIMEOUTS,
    DELAY_IN_SECONDS,
    EXPIRE,
    REPLY_TO,
    ROUTE_EXPIRED_TO,
    SAGA_ID,
    TIME_SENT,
)
from delayer.core.plan import AtOnce, Cancel, EnterCascade, Mode, Park, Policy, Refuse, Route, TooLate
from delayer.core.retry_policy import FAILED_IN, RETRIES, FailedAttempt, RetryPolicy
from tests.support.planning import decide, request
from tests.support.raw import wire_instant

NOW = 1_800_000_000_000  # 2027-01-15 08:00:00
HOUR_MS = 3_600_000
SAGA = "2d6f1c1e-6e7c-4d0b-9f6c-b2a300e5c1aa"
RETRY = RetryPolicy(5_000, 2, HOUR_MS, 0.0, 3, b"parking-lot")

NSB = Route(b"nsb", b"out", delay_from=("nservicebus",))
LATER = Route(b"later", b"", delay_from=("x-delay", "nservicebus-timeout"))
"""One header may give the due instant here, and a timeout's header the address."""
EVERY = Route(b"every", b"", delay_from=(*SOURCES, "json:/nextattempt/time"))
TIMEOUTS = Route(b"Sales.Timeouts", b"", delay_from=("nservicebus-timeout",))
BITS = Route(b"bits", b"out", delay_from=("routing-key-bits",))
CELERY = Route(b"celery", b"out", delay_from=("celery-eta",))
MAILERQ = Route(b"mailerq", b"amqpdelayer", delay_from=("timestamp", "json:/nextattempt/time"))
HEADERS = Route(b"headers", b"", b"k", ("header:a:b:rfc3339", "header:c", "header:d:s"), routing_key_header=b"to")
DRAMATIQ = Route(b"dramatiq", b"", delay_from=("json:/options/eta",))
OF_DRAMATIQ = (  # from Dramatiq 2.2.1: remind.send_with_options(args=("order-4711",), delay=3_600_000)
    b'{"queue_name":"mail.DQ","actor_name":"remind","args":["order-4711"],"kwargs":{},"options":{"eta":1800003600000},'
    b'"message_id":"ecc9e2b7-a84e-4d37-9177-873909bfcff5","message_timestamp":1800000000000}'
)
DEAD = Route(b"dead", b"", retry=RETRY)
STORE = Policy(
    Mode.STORE,
    {route.source: route for route in (NSB, TIMEOUTS, LATER, EVERY, BITS, CELERY, MAILERQ, HEADERS, DRAMATIQ, DEAD)},
    max_delay_ms=3650 * 24 * HOUR_MS,
    own_queues=frozenset({b"delays", b"delays.due"}),
)
NATIVE = replace(STORE, mode=Mode.NATIVE)


def ask(exchange: bytes, headers: dict[bytes, object] | None = None, key: bytes = b"k", **more: Any) -> DelayRequest:
    return request(exchange, key, headers or {}, **more)


def sent(ago_ms: int) -> str:
    return wire_instant(NOW - ago_ms)


@pytest.mark.parametrize(
    ("asked", "due_ms"),
    [
        (ask(b"nsb"), NOW),
        (ask(b"nsb", {TIME_SENT: sent(5)}), NOW),
        (ask(b"nsb", {DELAY_IN_SECONDS: 60, TIME_SENT: sent(5_000)}), NOW + 55_000),
        (ask(b"nsb", {DELAY_IN_SECONDS: 60, TIME_SENT: sent(65_000)}), NOW - 5_000),
        (ask(b"nsb", {DELAY_IN_SECONDS: 60}), NOW + 60_000),  # without an instant to measure from: from now
        (ask(b"nsb", {DELAY_IN_SECONDS: -9, TIME_SENT: sent(0)}), NOW - 9_000),
        (ask(b"nsb", {b"x-delay": 5}), NOW),  # a form that this route does not name
        (ask(b"bits", key=routing_key(3600, b"a.b")), NOW + HOUR_MS),
        (ask(b"bits", key=routing_key(0, b"a.b")), NOW),
        (ask(b"bits", key=b"a.b"), NOW),
        (ask(b"bits", {b"timestamp_in_ms": NOW - 1000}, routing_key(60, b"a")), NOW + 59_000),
        (ask(b"celery", {b"eta": "2027-01-15T09:00:00+00:00"}), NOW + HOUR_MS),
        (ask(b"celery", {b"eta": "2027-01-15T07:00:00"}), NOW - HOUR_MS),
        (ask(b"celery", {b"eta": None}), NOW),
        (ask(b"celery"), NOW),
        (ask(b"mailerq", body=b'{"nextattempt": {"time": "2027-01-15 09:00:00"}}'), NOW + HOUR_MS),
        (ask(b"mailerq", body=b"{}"), NOW),
        (ask(b"dramatiq", body=OF_DRAMATIQ), NOW + HOUR_MS),
        (ask(b"headers", {b"a:b": "2027-01-15T09:00:00.0000001+00:00", b"c": 5}), NOW + HOUR_MS + 1),
        (ask(b"headers", {b"c": "5"}), NOW + 5),
        (ask(b"headers", {b"d": 2.5}), NOW + 3_000),
        # Of two forms, the first present wins.
        (ask(b"mailerq", timestamp=NOW // 1000 + 9, body=b"no json"), NOW + 9_000),
    ],
)
def test_the_due_instant_of_another_systems_message(asked: DelayRequest, due_ms: int) -> None:
    plan = decide(asked, STORE, NOW)
    assert isinstance(plan, AtOnce if due_ms <= NOW else Park), plan
    assert plan.due_ms == due_ms


def test_a_plan_removes_the_digits_of_a_cascade() -> None:
    plan = decide(ask(b"bits", key=routing_key(60, b"Sales.Orders")), STORE, NOW)
    assert plan == Park(NOW + 60_000, Target(b"out", b"Sales.Orders"))


@pytest.mark.words
@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (ask(b"nsb", {DELAY_IN_SECONDS: "soon"}), "nservicebus: expected seconds"),
        (ask(b"headers", {b"d": "soon"}), "header:d:s: expected seconds"),
        (ask(b"headers", {b"to": 5}), "to: expected a string"),
        (ask(b"nsb", {DELAY_IN_SECONDS: 5, TIME_SENT: "x"}), "nservicebus: NServiceBus.TimeSent: expected an instant"),
        (ask(b"nsb", {DELAY_IN_SECONDS: 1 << 40}), "the delay is too long"),
        (ask(b"celery", {b"eta": "soon"}), "celery-eta: expected an instant in ISO 8601"),
        (ask(b"dramatiq", body=b'{"options": {"eta": 1795291200}}'), "found 1795291200: these are seconds"),
        (ask(b"mailerq", body=b"mail"), "json:/nextattempt/time: expected a JSON body"),
        (ask(b"Sales.Timeouts", {EXPIRE: "x", REPLY_TO: "Sales"}), "nservicebus-timeout: NServiceBus.Timeout.Expire"),
        (ask(b"Sales.Timeouts", {EXPIRE: sent(-5)}), "nservicebus-timeout: expected the address of a queue"),
        (ask(b"later", {b"x-delay": 5, EXPIRE: "x", REPLY_TO: "Sales"}), "nservicebus-timeout: NServiceBus.Timeout.E"),
        (ask(b"later", {b"x-delay": 5, EXPIRE: sent(-5)}), "nservicebus-timeout: expected the address of a queue"),
        (ask(b"Sales.Timeouts", {EXPIRE: sent(-5), REPLY_TO: "r" * 256}), "an address of at most 255 bytes, found 256"),
        (ask(b"Sales.Timeouts", {EXPIRE: sent(-5), REPLY_TO: "delays"}), "leads into delayer's own queues"),
        (ask(b"Sales.Timeouts", {CLEAR_TIMEOUTS: "True"}), "nservicebus-timeout: NServiceBus.ClearTimeouts"),
    ],
)
def test_unreadable_delays_are_refused(asked: DelayRequest, reason: str) -> None:
    plan = decide(asked, STORE, NOW)
    assert isinstance(plan, Refuse)
    assert reason in plan.reason


TO_SALES: dict[bytes, object] = {EXPIRE: sent(-5_000), ROUTE_EXPIRED_TO: "Sales.Orders"}
OF_SAGA = TO_SALES | {SAGA_ID: SAGA}
KEY = f"nservicebus-saga:{SAGA}:id-1:{NOW + 5_000}".encode()
ORDERS = Target(b"", b"Sales.Orders")


@pytest.mark.parametrize(
    ("headers", "message_id", "policy", "plan"),
    [
        (TO_SALES, b"id-1", STORE, Park(NOW + 5_000, ORDERS)),
        (TO_SALES | {EXPIRE: sent(9)}, b"id-1", STORE, AtOnce(NOW - 9, ORDERS)),
        (OF_SAGA, b"id-1", STORE, Park(NOW + 5_000, ORDERS, KEY)),
        (OF_SAGA | {EXPIRE: sent(9)}, b"id-1", STORE, AtOnce(NOW - 9, ORDERS)),
        # Without an id, or with one that is too long, a key could not tell two timeouts apart.
        (OF_SAGA, None, STORE, Park(NOW + 5_000, ORDERS)),
        (OF_SAGA, b"i" * 255, STORE, Park(NOW + 5_000, ORDERS)),
        (OF_SAGA | {SAGA_ID: "0" * 8}, b"id-1", STORE, Park(NOW + 5_000, ORDERS)),
        # Also below park_beyond: a cancel does not reach the cascade.
        (OF_SAGA, b"id-1", replace(STORE, park_beyond_ms=HOUR_MS), Park(NOW + 5_000, ORDERS, KEY)),
        (OF_SAGA, b"id-1", NATIVE, EnterCascade(NOW + 5_000, 5, ORDERS)),
        # A timeout without a key is delivered, and its saga ignores it if finished.
        (OF_SAGA, b"id-1", replace(STORE, no_keys="several consumers"), Park(NOW + 5_000, ORDERS)),
        ({CLEAR_TIMEOUTS: "True", SAGA_ID: SAGA}, b"x", STORE, Cancel(KeyGroup(f"nservicebus-saga:{SAGA}:".encode()))),
        ({CLEAR_TIMEOUTS: "False"}, b"x", STORE, AtOnce(NOW, Target(b"", b"k"), undelayed=True)),
    ],
)
def test_a_route_of_timeouts(headers: dict[bytes, object], message_id: bytes, policy: Policy, plan: object) -> None:
    assert decide(ask(b"Sales.Timeouts", headers, message_id=message_id), policy, NOW) == plan
    if isinstance(plan, Cancel):
        assert isinstance(plan.key, KeyGroup)
        assert KEY.startswith(plan.key)


@pytest.mark.words
@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (replace(NATIVE, has_store=False), "keys and cancels need a store"),
        (replace(STORE, no_keys="several consumers"), "several consumers"),
    ],
)
def test_clearing_timeouts_needs_keys(policy: Policy, reason: str) -> None:
    plan = decide(ask(b"Sales.Timeouts", {CLEAR_TIMEOUTS: "True", SAGA_ID: SAGA}), policy, NOW)
    assert isinstance(plan, Refuse)
    assert plan.reason.startswith(f"NServiceBus.ClearTimeouts: {reason}")


# ---- dead letters

DIED = {
    "queue": "orders", "reason": "rejected", "count": 1, "exchange": "shop", "routing-keys": ["order.new"],
    "time": Timestamp(NOW // 1000),
}  # fmt: skip


def dead(retries: int | None = None, failed_in: str = "orders", **more: object) -> DelayRequest:
    headers: dict[bytes, object] = {retry_policy.X_DEATH: [DIED | more, {"queue": "elsewhere", "reason": "expired"}]}
    if retries is not None:
        headers |= {RETRIES: retries, FAILED_IN: failed_in}
    return ask(b"dead", headers)


BACK = Target(b"", b"orders")


@pytest.mark.parametrize(
    ("asked", "policy", "plan"),
    [
        (dead(), STORE, Park(NOW + 5_000, BACK)),
        (dead(1), STORE, Park(NOW + 10_000, BACK)),
        (dead(2), STORE, Park(NOW + 20_000, BACK)),
        (dead(3), STORE, AtOnce(NOW, Target(b"", b"parking-lot"))),
        (dead(3), replace(STORE, publishing=False), Park(NOW, Target(b"", b"parking-lot"))),
        (dead(2, "billing"), STORE, Park(NOW + 5_000, BACK)),  # it failed elsewhere before
        (dead(), NATIVE, EnterCascade(NOW + 5_000, 5, BACK)),
        # It goes only to this queue, not to the keys in CC.
        (dead()._replace(copies=frozenset({b"delays", b"delays.due"})), STORE,
         Park(NOW + 5_000, BACK)),
        # Its first delivery has done its publisher's cancel already.
        (dead()._replace(headers=dead().headers | {b"x-delay-cancel": "k"}), STORE,
         Park(NOW + 5_000, BACK)),
    ],
)  # fmt: skip
def test_a_dead_letter_goes_back(asked: DelayRequest, policy: Policy, plan: object) -> None:
    assert decide(asked, policy, NOW) == plan


@pytest.mark.parametrize(("before", "retries", "exhausted"), [(None, 1, False), (2, 3, False), (3, 4, True)])
def test_the_failure_of_a_dead_letter(before: int | None, retries: int, exhausted: bool) -> None:
    found = retry_policy.failure(dead(before).headers, RETRY)
    assert found == FailedAttempt(retries, b"orders", "rejected", NOW // 1000, b"shop", b"order.new", exhausted)


@pytest.mark.words
@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (ask(b"dead"), "retry: expected x-death"),
        (ask(b"dead", {retry_policy.X_DEATH: []}), "retry: expected x-death"),
        (ask(b"dead", {retry_policy.X_DEATH: [{"reason": "rejected"}]}), "retry: expected x-death"),
        (ask(b"dead", {retry_policy.X_DEATH: "orders"}), "retry: expected x-death"),
        (dead(-1), "x-delayer-retries: expected a whole number, found -1"),
        (ask(b"dead", dict(dead(1).headers) | {RETRIES: "1"}), "x-delayer-retries: expected a whole number, found '1'"),
        (dead(queue="q" * 256), "retry: expected x-death to name a queue of at most 255 bytes, found one of 256"),
        (dead(queue="ü" * 128), "found one of 256"),
        (dead(queue="delays"), "leads into delayer's own queues"),
        (dead(queue="delays.due"), "leads into delayer's own queues"),
        (dead(queue="amq.rabbitmq.reply-to.g2EF.k"), "leads to a direct reply"),
    ],
)
def test_a_retry_route_refuses_messages_without_x_death(asked: DelayRequest, reason: str) -> None:
    plan = decide(asked, STORE, NOW)
    assert isinstance(plan, Refuse)
    assert reason in plan.reason


@pytest.mark.parametrize(
    ("retries", "chance", "wait"),
    [
        (1, 0.0, 5_000), (1, 1.0, 5_500), (2, 0.0, 10_000), (10, 0.0, 2_560_000), (10, 1.0, 2_816_000),
        # The longest wait includes the jitter.
        (11, 0.0, 3_272_728), (9999, 0.5, 3_436_364), (9999, 1.0, HOUR_MS),
    ],
)  # fmt: skip
def test_the_wait_of_a_retry(retries: int, chance: float, wait: int) -> None:
    assert retry_policy.wait_ms(replace(RETRY, jitter=0.1), retries, chance) == wait


@given(
    st.builds(
        RetryPolicy, st.integers(0, HOUR_MS), st.floats(1, 100), st.integers(HOUR_MS, 10 * HOUR_MS), st.floats(0, 1),
        st.integers(1, 1000), st.just(b"q"),
    ),
    st.integers(1, 1000),
    st.floats(0, 1),
)  # fmt: skip
def test_the_wait_of_a_retry_grows_up_to_the_longest(retry: RetryPolicy, retries: int, chance: float) -> None:
    wait = retry_policy.wait_ms(retry, retries, chance)
    assert retry_policy.wait_ms(retry, retries, 0) <= wait <= retry.longest_ms
    assert retry_policy.wait_ms(retry, retries + 1, chance) >= wait


@pytest.mark.parametrize(
    ("asked", "forms", "at_once"),
    [
        (ask(b"x", {DELAY_IN_SECONDS: -5, TIME_SENT: sent(0)}), ("nservicebus",), True),
        (ask(b"x", {DELAY_IN_SECONDS: 5, TIME_SENT: sent(0)}), ("nservicebus",), False),
        (ask(b"x", key=routing_key(0, b"a")), ("routing-key-bits",), True),
        (ask(b"x", {b"eta": "2027-01-15T07:00:00"}), ("celery-eta",), False),
        (ask(b"x", body=b'{"a": 5}'), ("json:/a", "x-delay"), False),
    ],
)
def test_messages_of_other_systems_without_a_delay_are_never_late(
    asked: DelayRequest, forms: tuple[str, ...], at_once: bool
) -> None:
    route = Route(b"x", b"out", delay_from=forms, late_limit_ms=0)
    plan = decide(asked, replace(STORE, routes={b"x": route}), NOW + HOUR_MS)
    assert isinstance(plan, AtOnce if at_once else TooLate | Park), plan


# ---- the law

values = st.one_of(
    st.integers(-(1 << 31), (1 << 31) - 1),
    st.integers(NOW - HOUR_MS, NOW + HOUR_MS).map(wire_instant),
    st.sampled_from(["True", SAGA, "delays", "Sales", "2027-01-15T09:00:00", "r" * 300, b"\xff", None]),
    st.just([DIED]),
    st.text(max_size=300).map(lambda queue: [DIED | {"queue": queue}]),
    st.text(max_size=9) | st.binary(max_size=300) | st.floats() | st.booleans(),
)
asks = st.builds(
    request,
    st.sampled_from(sorted(STORE.routes)),
    st.sampled_from([b"", b"k", routing_key(60, b"a"), b"delays"]),
    st.dictionaries(st.sampled_from(sorted(CONSULTED | retry_policy.RETRY_HEADERS)), values, max_size=5),
    timestamp=st.none() | st.integers(0, (1 << 64) - 1),
    body=st.sampled_from([b"", b"{}", b'{"nextattempt": {"time": "2027-01-15 09:00:00"}}', b"[" * 9]),
    message_id=st.none() | st.binary(max_size=255),
    chance=st.floats(0, 1),
)


@given(asks, st.sampled_from([STORE, NATIVE, replace(NATIVE, has_store=False), replace(STORE, no_keys="shared")]))
def test_every_message_has_a_plan(asked: DelayRequest, policy: Policy) -> None:
    plan = decide(asked, policy, NOW)
    if isinstance(plan, Park | EnterCascade | AtOnce):
        assert max(map(len, plan.target)) <= 255
        assert 0 <= plan.due_ms <= NOW + policy.max_delay_ms
    if isinstance(plan, Park | Cancel):
        assert policy.has_store
        assert plan.key is None or (len(plan.key) <= 255 and not policy.no_keys)
    if isinstance(plan, Refuse):
        assert plan.reason.isascii()
        assert plan.reason.isprintable()


@pytest.mark.parametrize("name", [*SOURCES, "json:/nextattempt/time", "json:"])
def test_the_names_of_forms(name: str) -> None:
    assert callable(source_of(name))


@pytest.mark.parametrize("name", ["json:nextattempt", "x-dely", "", "5"])
def test_a_name_that_is_no_form(name: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        source_of(name)
