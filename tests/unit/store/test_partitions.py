"""The next attempt after a failed creation of a partition."""

from __future__ import annotations

from unittest.mock import AsyncMock, Mock

import asyncpg
import pytest

from delayer.store.rows.partitions import AGAIN_SECONDS, LOCKED_SECONDS, Days


@pytest.mark.parametrize(
    ("error", "at_once", "pause"),
    [
        (asyncpg.DeadlockDetectedError("why"), [5, 6], AGAIN_SECONDS),
        (asyncpg.QueryCanceledError("why"), [], AGAIN_SECONDS),
        (asyncpg.LockNotAvailableError("why"), [], LOCKED_SECONDS),
    ],
)
async def test_missing_days_after_a_failed_attempt(error: Exception, at_once: list[int], pause: float) -> None:
    """A failure of one day does not stop the other days; a failure of all days does."""
    connection = Mock(execute=AsyncMock(side_effect=error), **{"is_closed.return_value": False})
    days, wanted = Days(()), [4, 5, 6]
    assert days.missing(wanted, 4, 0.0) == wanted
    await days.ensure(connection, [4], 4, 0.0, 60.0)
    assert days.missing(wanted, 4, pause - 1) == at_once
    assert days.missing(wanted, 4, pause) == wanted
