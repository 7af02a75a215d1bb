"""How late is too late, and for whom: tables over the rule, the plan and the release."""

from __future__ import annotations

from typing import Any

import pytest

from delayer.core.delay_headers import DelayRequest
from delayer.core.hold import Hold, HoldKind, too_late, unfit
from delayer.core.message import Due, Target
from delayer.core.plan import AtOnce, Mode, Park, Policy, Route, TooLate, decide
from delayer.release.loop import sorted_out
from tests.support.fakes import NOW, due

HOUR = 3_600_000
TARGET = Target(b"out", b"k")


@pytest.mark.parametrize(
    ("late_ms", "limit_ms", "held"),
    [
        (0, 0, False),
        (1, 0, True),
        (HOUR, HOUR, False),
        (HOUR + 1, HOUR, True),
        (-1, 0, False),
        (10 * HOUR, None, False),
    ],
)
def test_the_rule(late_ms: int, limit_ms: int | None, held: bool) -> None:
    hold = too_late(NOW - late_ms, NOW, limit_ms)
    assert (hold is not None) == held
    assert hold is None or hold.for_a_person


def policy(limit_ms: int | None, mode: Mode = Mode.STORE, **more: Any) -> Policy:
    route = Route(b"in", b"out", late_limit_ms=limit_ms, delay_from=("x-delay", "x-deliver-at", "timestamp"))
    return Policy(mode, {b"in": route}, b"delays", 100 * 24 * HOUR, **more)


def ask(timestamp: int | None = None, **headers: object) -> DelayRequest:
    names = {"x-" + name.replace("_", "-"): value for name, value in headers.items()}
    names = {"timestamp_in_ms" if name == "x-stamp" else name: value for name, value in names.items()}
    return DelayRequest(b"in", b"k", {name.encode(): value for name, value in names.items()}, timestamp)


OLD = NOW - 2 * HOUR
PLANS = [
    ("an instant that passed", ask(deliver_at=OLD), HOUR, TooLate),
    ("an instant that passed just now", ask(deliver_at=NOW - HOUR), HOUR, AtOnce),
    ("no limit", ask(deliver_at=OLD), None, AtOnce),
    ("a delay that the queue waited out", ask(delay=HOUR // 2, stamp=OLD), HOUR, TooLate),
    ("a delay that the queue waited out in time", ask(delay=HOUR, stamp=OLD), HOUR, AtOnce),
    ("at once", ask(delay=0), 0, AtOnce),
    ("the plugin's mark for what was delayed before", ask(delay=-2 * HOUR), HOUR, AtOnce),
    ("no delay at all", ask(), 0, AtOnce),
    ("the timestamp property", ask(timestamp=OLD // 1000), HOUR, TooLate),
    ("the future", ask(deliver_at=NOW + HOUR), 0, Park),
]


@pytest.mark.parametrize(("asked", "limit_ms", "plan"), [row[1:] for row in PLANS], ids=[row[0] for row in PLANS])
def test_messages_that_come_in_late(asked: DelayRequest, limit_ms: int | None, plan: type) -> None:
    assert isinstance(decide(asked, policy(limit_ms), NOW), plan)


def test_a_keyed_message_is_parked_however_late_and_judged_at_its_release() -> None:
    keyed = DelayRequest(b"in", b"k", {b"x-deliver-at": OLD, b"x-delay-key": "a"})
    assert isinstance(decide(keyed, policy(HOUR), NOW), Park)


def row(id: int, route: bytes, late_ms: int, *, attempts: int = 0, hold: Hold | None = None) -> Due:
    whole = due(id, attempts=attempts)
    parcel = whole.parcel._replace(route=route, due_ms=NOW - late_ms)
    return whole._replace(due_ms=NOW - late_ms, parcel=parcel, hold=hold)


def test_a_release_holds_what_its_route_wants_held() -> None:
    rows = [
        row(1, b"strict", 2 * HOUR),
        row(2, b"strict", 1),
        row(3, b"patient", 9 * HOUR),
        row(4, b"strict", 2 * HOUR, attempts=3, hold=Hold(HoldKind.RETURNED, "late: not")),
        row(5, b"strict", 2 * HOUR, attempts=1, hold=Hold(HoldKind.LATE, "x")),
    ]
    rows.append(row(6, b"strict", 2 * HOUR, attempts=1, hold=unfit("x")))
    out, held = sorted_out(rows, {b"strict": HOUR}, NOW)
    assert [one.id for one in out] == [2, 3, 5, 6], "what a person wants delivered goes, however late"
    assert [one.id for one, _ in held] == [1, 4]
    assert all(hold.kind is HoldKind.LATE for _, hold in held)


def test_without_limits_nothing_is_looked_at() -> None:
    rows = [row(1, b"any", 9 * HOUR)]
    assert sorted_out(rows, {}, NOW) == (rows, [])
