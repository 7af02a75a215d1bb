"""When a lane asks for its held rows: tables."""

from __future__ import annotations

import pytest

from delayer.core.pace import Scope
from delayer.store.retries import LOCKED_MS, NEVER_MS, Retries, Turn

NOW = 1_800_000_000_000
LIMITED = Scope(frozenset({b"slow"}), only=True)
OTHERS = Scope(frozenset({b"slow"}), only=False)


@pytest.mark.parametrize(("soonest_ms", "wanted"), [(None, False), (NOW + 1, False), (NOW, True), (NOW - 60_000, True)])
def test_held_rows_are_asked_for_when_one_is_to_be_tried(soonest_ms: int | None, wanted: bool) -> None:
    assert Retries(soonest_ms).turn(None, 1000, NOW) is (Turn.SHARE if wanted else Turn.NONE)


def test_one_scope_that_asks_in_vain_keeps_no_other_from_asking() -> None:
    retries = Retries(NOW)
    retries.in_vain(OTHERS, NOW)
    assert retries.turn(OTHERS, 1000, NOW + LOCKED_MS - 1) is Turn.NONE
    assert retries.turn(LIMITED, 1000, NOW) is Turn.SHARE
    assert retries.turn(OTHERS, 1000, NOW + LOCKED_MS) is Turn.SHARE


def test_news_end_the_pause() -> None:
    retries = Retries(NOW)
    retries.in_vain(None, NOW)
    retries.again()
    assert retries.turn(None, 1000, NOW) is Turn.SHARE


def test_of_a_single_row_held_ones_and_waiting_ones_take_turns() -> None:
    retries = Retries(NOW)
    for scope in (None, LIMITED, OTHERS):
        assert [retries.turn(scope, 1, NOW) for _ in range(4)] == [Turn.SHARE, Turn.SPARE] * 2
    # And each by itself, however often the others ask.
    asked = [retries.turn(scope, 1, NOW) for _ in range(2) for scope in (LIMITED, OTHERS)]
    assert asked == [Turn.SHARE] * 2 + [Turn.SPARE] * 2


def test_who_had_no_bytes_has_the_next_turn() -> None:
    retries = Retries(NOW)
    retries.crowded(LIMITED, True)
    assert (retries.limit(LIMITED, 1000), retries.limit(OTHERS, 1000), retries.limit(None, 1000)) == (1, 1000, 1000)
    retries.crowded(LIMITED, False)
    assert retries.limit(LIMITED, 1000) == 1000


@pytest.mark.parametrize(
    ("soonest_ms", "in_vain", "paced", "next_ms"),
    [
        (None, False, False, NEVER_MS),
        (NOW + 5, False, False, NOW + 5),
        (NOW + 5, False, True, NOW + 5),
        (NOW - 5, False, False, NOW - 5),
        (NOW - 5, True, False, NOW + LOCKED_MS),
        (NOW - 5, False, True, NOW + LOCKED_MS),
    ],
)
def test_how_long_a_lane_may_sleep(soonest_ms: int | None, in_vain: bool, paced: bool, next_ms: int) -> None:
    retries = Retries(soonest_ms)
    if in_vain:
        retries.in_vain(None, NOW)
    assert retries.next_ms(NOW, paced=paced) == next_ms


def test_what_is_expected_is_news_if_it_is_sooner() -> None:
    retries = Retries(NOW)
    assert [retries.expect(NOW + 1), retries.expect(NOW), retries.expect(NOW - 1)] == [False, False, True]
    assert retries.soonest_ms == NOW - 1
