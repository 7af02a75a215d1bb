"""The grid of time ahead: every instant is in one bucket, and every sum is the same on every scale."""

from __future__ import annotations

import random

import pytest

from delayer.core import horizon
from delayer.core.horizon import MONTH_MS, OFFSETS, SERIES, bars, bucket_of, by_class, spread
from delayer.core.units import DAY_MS, HOUR_MS, MINUTE_MS

NOW = 1_800_000_000_000


@pytest.mark.parametrize(
    ("wait", "name"),
    [
        (-1, "overdue"), (0, "minute"), (MINUTE_MS - 1, "minute"), (MINUTE_MS, "hour"), (HOUR_MS - 1, "hour"),
        (HOUR_MS, "day"), (DAY_MS - 1, "day"), (DAY_MS, "week"), (7 * DAY_MS - 1, "week"), (7 * DAY_MS, "month"),
        (MONTH_MS, "year"), (12 * MONTH_MS - 1, "year"), (12 * MONTH_MS, "later"), (5000 * DAY_MS, "later"),
    ],
)  # fmt: skip
def test_classes(wait: int, name: str) -> None:
    found = by_class({bucket_of(NOW + wait, NOW): 1.0})
    assert [one for one, count in found.items() if count] == [name]


@pytest.mark.parametrize("series", SERIES, ids=lambda one: one.name)
def test_a_message_is_in_the_bar_of_its_instant(series: horizon.Series) -> None:
    chance = random.Random(11)
    for _ in range(500):
        wait = chance.randrange(series.step * series.bars)
        found = bars({bucket_of(NOW + wait, NOW): 1.0}, series)
        assert found[wait // series.step] == sum(found) == 1.0


def test_overdue_and_very_late_messages_are_in_no_bar() -> None:
    for series in SERIES:
        assert sum(bars({0: 5.0, len(OFFSETS): 7.0}, series)) == 0
    assert sum(bars({bucket_of(NOW + 3 * DAY_MS, NOW): 1.0}, SERIES[0])) == 0


def test_a_segment_is_spread_without_loss() -> None:
    chance = random.Random(12)
    for _ in range(200):
        first = NOW + chance.randrange(-DAY_MS, 400 * DAY_MS)
        last = first + chance.choice([0, 1, chance.randrange(90 * DAY_MS)])
        found = spread(first, last, 1000, NOW)
        assert sum(found.values()) == pytest.approx(1000)
        assert min(found) == bucket_of(first, NOW)
