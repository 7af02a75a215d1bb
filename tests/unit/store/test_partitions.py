"""The next attempt after a failed creation of a partition."""

from __future__ import annotations

import pytest

from delayer.store.rows import partitions
from delayer.store.rows.partitions import AGAIN_SECONDS, LOCKED_SECONDS, Days, PartitionResult


@pytest.mark.parametrize(
    ("made", "at_once", "pause", "later"),
    [
        (PartitionResult.NOT_NOW, [5, 6], AGAIN_SECONDS, [4, 5, 6]),
        (PartitionResult.SLOW, [], AGAIN_SECONDS, [4, 5, 6]),
        (PartitionResult.LOCKED, [], LOCKED_SECONDS, [4, 5, 6]),
        (PartitionResult.DONE, [5, 6], AGAIN_SECONDS, [5, 6]),
    ],
)
async def test_missing_days_after_a_failed_attempt(
    monkeypatch: pytest.MonkeyPatch, made: PartitionResult, at_once: list[int], pause: float, later: list[int]
) -> None:
    """A failure of one day does not stop the other days; a failure of all days does."""

    async def make(*_: object) -> PartitionResult:
        return made

    monkeypatch.setattr(partitions, "make", make)
    days, wanted = Days(()), [4, 5, 6]
    assert days.missing(wanted, 4, 0.0) == wanted
    await days.ensure(None, [4], 4, 0.0, 60.0)
    assert days.missing(wanted, 4, pause - 1) == at_once
    assert days.missing(wanted, 4, pause) == later
