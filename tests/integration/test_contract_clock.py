"""Never early where the ruling clock is another machine's, known to within some milliseconds only (design, G2)."""

from __future__ import annotations

import pytest

from delayer.core.delay_headers import DelayRequest
from delayer.core.message import Target
from delayer.core.plan import AtOnce, Cascade, Mode, Park, Plan, Policy, Route, decide

UPPER, LOWER = 1_000_040, 1_000_000
TARGET = Target(b"out", b"k")


def plan(mode: Mode, **headers: object) -> Plan:
    policy = Policy(mode, {b"in": Route(b"in", b"out")}, b"delays", 86_400_000)
    ask = DelayRequest(b"in", b"k", {name.replace("_", "-").encode(): value for name, value in headers.items()})
    return decide(ask, policy, UPPER, LOWER)


@pytest.mark.parametrize(
    ("due_ms", "at_once"), [(LOWER - 1, True), (LOWER, True), (LOWER + 1, False), (UPPER, False), (UPPER + 1, False)]
)
def test_an_instant_that_the_clock_may_not_have_reached_is_waited_for(due_ms: int, at_once: bool) -> None:
    expected = AtOnce(due_ms, TARGET) if at_once else Park(due_ms, TARGET)
    assert plan(Mode.STORE, x_deliver_at=due_ms) == expected


@pytest.mark.parametrize("headers", [{}, {"x_delay": 0}, {"x_delay": "0"}])
def test_no_delay_is_due_now_and_not_when_the_clock_may_say_so(headers: dict[str, object]) -> None:
    assert plan(Mode.STORE, **headers) == AtOnce(LOWER, TARGET)


def test_a_delay_counts_from_the_later_bound_and_keeps_its_length_in_the_cascade() -> None:
    assert plan(Mode.STORE, x_delay=1000) == Park(UPPER + 1000, TARGET)
    assert plan(Mode.NATIVE, x_delay=1000) == Cascade(UPPER + 1000, 1, TARGET)


def test_an_instant_counts_from_the_earlier_bound_in_the_cascade() -> None:
    assert plan(Mode.NATIVE, x_deliver_at=UPPER + 1000) == Cascade(UPPER + 1000, 2, TARGET)
