"""The scanner of a lane outlives a store that cannot be asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import asyncpg
import pytest

from delayer.core.errors import StoreLost
from delayer.store.lanes.lane import PostgresLane


@pytest.mark.parametrize("error", [StoreLost("too many clients"), asyncpg.InterfaceError("closed"), OSError("reset")])
async def test_a_scan_that_fails_is_repeated(error: Exception) -> None:
    """Opening a connection of the pool raises StoreLost, a statement the driver's errors."""
    outcomes: list[Exception | None] = [None, error, None]

    async def scan() -> None:
        if outcome := outcomes.pop(0):
            raise outcome

    async def closed_within(_: float) -> bool:
        return not outcomes

    lane: Any = SimpleNamespace(scan=scan, _closed_within=closed_within, owned=True, number=1)
    await PostgresLane._scan_on(lane)
    assert not outcomes
