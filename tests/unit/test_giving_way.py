"""A job gives way to the traffic by what it sees of it, and takes what there is where there is none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayer.core.giving_way import EASY_MS, FIRST, LATE_MS, LEAST, LONGEST, MOST, Pace, Seen

WORK = 0.3


def after(*looks: Seen) -> Pace:
    pace = Pace()
    for seen in looks:
        pace.look(seen)
    return pace


def looks(rate: float, late_ms: float = 5.0, *, owners: int = 1, count: int = 2, apart: float = 1.0) -> list[Seen]:
    """``count`` looks at a steady traffic."""
    return [Seen(n * apart, owners, round(n * apart * rate), late_ms) for n in range(count)]


@pytest.mark.parametrize(
    ("seen", "gives_way"),
    [
        ([], True),
        (looks(0, owners=0, count=1), False),
        (looks(0, count=1), True),  # not known yet what passes
        (looks(2_000), True),
        (looks(0), False),
        (looks(20), False),
        (looks(20, late_ms=90.0), True),
        (looks(2_000, count=2, apart=0.1), True),
        ([*looks(0), Seen(1.05, 1, 100, 5.0)], False),  # too soon after the one before, to say how many pass
        ([*looks(0), Seen(1.05, 1, 100, 90.0)], True),
        ([*looks(0), Seen(2.0, 1, 2_000, 5.0)], True),  # traffic sets in
        ([*looks(2_000), Seen(2.0, 0, 2_000, 0.0)], False),  # the last daemon went
        ([*looks(0, owners=0), Seen(2.0, 1, 0, 0.0)], True),  # one came
    ],
)
def test_when_it_gives_way(seen: Sequence[Seen], gives_way: bool) -> None:
    pace = after(*seen)
    assert pace.giving_way is gives_way
    assert (pace.rest(WORK) > 0) is gives_way


def test_it_rests_longer_the_later_the_messages_are() -> None:
    shares = [after(*looks(2_000, late_ms, count=4)).share for late_ms in (EASY_MS, LATE_MS, LATE_MS + 1)]
    assert shares == sorted(shares)
    assert shares[0] < FIRST == shares[1] < shares[2]


def test_after_a_late_minute_it_comes_back_slowly() -> None:
    pace = after(*looks(2_000, LATE_MS + 1, count=20))
    assert pace.share == MOST
    eased = 0
    while pace.share > LEAST:
        eased += 1
        pace.look(Seen(20.0 + eased, 1, 40_000 + eased * 2_000, 0.0))
    assert 10 < eased < 40


def test_one_rest_has_an_end() -> None:
    assert after(*looks(2_000)).rest(3600.0) == LONGEST


@given(st.lists(st.builds(Seen, st.floats(0, 100), st.integers(0, 3), st.integers(0, 10**6), st.floats(0, 2_000))))
def test_whatever_is_seen_it_works_on(seen: list[Seen]) -> None:
    pace = after(*seen)
    assert LEAST <= pace.share <= MOST
    assert 0.0 <= pace.rest(WORK) <= WORK * MOST
    if seen and not seen[-1].owners:
        assert pace.rest(WORK) == 0.0
