"""How late is too late, and for whom: tables over the rule, the plan and the release."""

from __future__ import annotations

from typing import Any

import pytest

from delayer.core import late, unanswered
from delayer.core.message import Due, Target
from delayer.core.plan import Ask, AtOnce, Mode, Park, Policy, Route, TooLate, decide
from delayer.services.release import sorted_out
from tests.rig.fakes import NOW, due

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
    why = late.reason(NOW - late_ms, NOW, limit_ms)
    assert (why is not None) == held
    assert why is None or late.for_good(why)


@pytest.mark.parametrize(
    ("why", "for_good"),
    [
        ("late: by 2 s, and late_limit of its route is 1 s", True),
        ("unfit: its headers cannot be read", True),
        ("returned: 312 NO_ROUTE", False),
        ("import: there is no such queue or exchange", False),
        ("", False),
    ],
)
def test_only_what_time_does_not_mend_waits_for_a_person(why: str, for_good: bool) -> None:
    assert late.for_good(why) == for_good
    assert late.retry_ms(why, NOW) == (late.FOR_GOOD_MS if for_good else NOW)


def policy(limit_ms: int | None, mode: Mode = Mode.STORE, **more: Any) -> Policy:
    route = Route(b"in", b"out", late_limit_ms=limit_ms, delay_from=("x-delay", "x-deliver-at", "timestamp"))
    return Policy(mode, {b"in": route}, b"delays", 100 * 24 * HOUR, **more)


def ask(timestamp: int | None = None, **headers: object) -> Ask:
    names = {"x-" + name.replace("_", "-"): value for name, value in headers.items()}
    names = {"timestamp_in_ms" if name == "x-stamp" else name: value for name, value in names.items()}
    return Ask(b"in", b"k", {name.encode(): value for name, value in names.items()}, timestamp)


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
def test_what_comes_in_late(asked: Ask, limit_ms: int | None, plan: type) -> None:
    assert isinstance(decide(asked, policy(limit_ms), NOW), plan)


def test_a_keyed_message_is_parked_however_late_and_judged_at_its_release() -> None:
    keyed = Ask(b"in", b"k", {b"x-deliver-at": OLD, b"x-delay-key": "a"})
    assert isinstance(decide(keyed, policy(HOUR), NOW), Park)


def row(id: int, route: bytes, late_ms: int, *, attempts: int = 0, held_for: str = "") -> Due:
    whole = due(id, attempts=attempts)
    parcel = whole.parcel._replace(route=route, due_ms=NOW - late_ms)
    return whole._replace(due_ms=NOW - late_ms, parcel=parcel, held_for=held_for)


def test_a_release_holds_what_its_route_wants_held() -> None:
    rows = [
        row(1, b"strict", 2 * HOUR),
        row(2, b"strict", 1),
        row(3, b"patient", 9 * HOUR),
        row(4, b"strict", 2 * HOUR, attempts=3, held_for="returned: 312 NO_ROUTE"),
        row(5, b"strict", 2 * HOUR, attempts=1, held_for="late: by 1:00:01, …"),
    ]
    out, held = sorted_out(rows, {b"strict": HOUR}, NOW)
    assert [one.id for one in out] == [2, 3, 5], "what a person wants delivered goes, however late"
    assert [one.id for one, _ in held] == [1, 4]
    assert all(late.for_good(why) for _, why in held)


def test_what_is_late_now_and_perhaps_delivered_stays_known_as_that() -> None:
    """Or a cancel would say that it is cancelled. It waits for a person all the same."""
    said = unanswered.reason(8.0, "exchange 'x', key 'k'")
    rows = [row(1, b"strict", 2 * HOUR, attempts=1, held_for=said), row(2, b"strict", 2 * HOUR)]
    _, held = sorted_out(rows, {b"strict": HOUR}, NOW)
    assert [unanswered.perhaps_out(why) for _, why in held] == [True, False]
    assert all(late.for_good(why) and late.by_hand(late.retry_ms(why, NOW)) for _, why in held)
    again = row(1, b"strict", 2 * HOUR, attempts=2, held_for=held[0][1])
    assert sorted_out([again], {b"strict": HOUR}, NOW) == ([again], [])


def test_without_limits_nothing_is_looked_at() -> None:
    rows = [row(1, b"any", 9 * HOUR)]
    assert sorted_out(rows, {}, NOW) == (rows, [])
