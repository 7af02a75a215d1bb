"""The account of a long run: which messages with keys had to arrive, and the steps of the others."""

from __future__ import annotations

import pytest

from bench.mixture import FIRST_KEYED, Asked, Once, Steps, Verdict, judge, sent_in


@pytest.mark.parametrize(
    ("asked", "came", "expected"),
    [
        ([Asked(1, 7, 0, 5_000)], {1: 1}, Verdict(0, 0, 0)),
        ([Asked(1, 7, 0, 5_000)], {}, Verdict(1, 0, 0)),
        ([Asked(1, 7, 0, 5_000)], {1: 3}, Verdict(0, 0, 2)),
        # replaced long before it was due, so it must not arrive
        ([Asked(1, 7, 0, 90_000), Asked(2, 7, 1_000, 95_000)], {2: 1}, Verdict(0, 0, 0)),
        ([Asked(1, 7, 0, 90_000), Asked(2, 7, 1_000, 95_000)], {1: 1, 2: 1}, Verdict(0, 1, 0)),
        # due long before the next one of its key, so it must arrive
        ([Asked(1, 7, 0, 1_000), Asked(2, 7, 60_000, 95_000)], {2: 1}, Verdict(1, 0, 0)),
        # due while the next one was on its way: either is right
        ([Asked(1, 7, 0, 60_500), Asked(2, 7, 60_000, 95_000)], {2: 1}, Verdict(0, 0, 0)),
        ([Asked(1, 7, 0, 60_500), Asked(2, 7, 60_000, 95_000)], {1: 1, 2: 1}, Verdict(0, 0, 0)),
        # cancelled, and another key is not
        ([Asked(1, 7, 0, 90_000), Asked(2, 8, 0, 90_000), Asked(3, 7, 1_000, None)], {2: 1}, Verdict(0, 0, 0)),
        ([Asked(1, 7, 0, 90_000), Asked(2, 8, 0, 90_000), Asked(3, 7, 1_000, None)], {1: 1}, Verdict(1, 1, 0)),
    ],
)
def test_the_verdict_on_messages_with_keys(asked: list[Asked], came: dict[int, int], expected: Verdict) -> None:
    assert judge(asked, came) == expected


def test_a_step_has_only_what_arrived_in_it() -> None:
    steps = Steps(start=100.0, seconds=60)
    for late_ms in (1.0, 3.0, -1.0):
        steps.take(late_ms)
    assert steps.ended(159_999) is None
    assert steps.ended(160_000) == {
        "at": 160.0, "messages": 3, "early": 1, "late_p50_ms": 1.0, "late_p99_ms": 3.0, "late_max_ms": 3.0,
    }  # fmt: skip
    assert steps.ended(160_000) is None
    assert steps.ended(300_000) == {"at": 220.0, "messages": 0, "early": 0}


def test_a_repeated_message_does_not_hide_a_missing_one() -> None:
    once = Once(3)
    for n in (0, 2, 2, FIRST_KEYED + 5, FIRST_KEYED + 5):
        once.take(n)
    assert (once.missing, once.repeated, dict(once.keyed)) == (1, 1, {FIRST_KEYED + 5: 2})


@pytest.mark.parametrize(("rate", "seconds", "sent"), [(1000, 60, 60_000), (300, 10, 3_000), (50, 2, 100)])
def test_the_publisher_sends_whole_ticks(rate: int, seconds: int, sent: int) -> None:
    assert sent_in(rate, seconds) == sent
