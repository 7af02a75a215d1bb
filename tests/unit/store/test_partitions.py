"""When a partition that could not be made is tried again, and how often that is said."""

from __future__ import annotations

import pytest

from delayer.store.rows import partitions
from delayer.store.rows.partitions import Days, Making, Rarer


def test_tries_get_rarer_from_a_minute_to_hours() -> None:
    vain = Rarer(60.0, 4 * 3600.0)
    assert vain.may(7, 0.0)
    at, waited = 0.0, []
    for _ in range(10):
        vain.done(7, at)
        pause = next(seconds for seconds in range(60, 20_000, 60) if vain.may(7, at + seconds))
        assert not vain.may(7, at + pause - 0.001)
        waited.append(pause // 60)
        at += pause
    assert waited == [1, 2, 4, 8, 16, 32, 64, 128, 240, 240]
    assert vain.may(8, 0.0), "each for itself"
    vain.forget(7)
    vain.done(7, at)
    assert vain.may(7, at + 60.0)


@pytest.mark.parametrize(
    ("made", "at_once", "after_a_minute"),
    [
        (Making.NOT_NOW, [5, 6], [4, 5, 6]),
        (Making.SLOW, [], [4, 5, 6]),
        (Making.LOCKED, [], [4, 5, 6]),
        (Making.DONE, [5, 6], [5, 6]),
    ],
)
async def test_missing_days_after_a_failed_attempt(
    monkeypatch: pytest.MonkeyPatch, made: Making, at_once: list[int], after_a_minute: list[int]
) -> None:
    """What stands in one day's way does not stop the others; what stands in every day's way does."""

    async def make(*_: object) -> Making:
        return made

    monkeypatch.setattr(partitions, "make", make)
    days, wanted = Days(()), [4, 5, 6]
    assert days.missing(wanted, 4, 0.0) == wanted
    await days.make(None, [4], 4, 0.0, 60.0)
    assert days.missing(wanted, 4, 59.0) == at_once
    assert days.missing(wanted, 4, 60.0) == after_a_minute
