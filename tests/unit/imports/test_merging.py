"""Rows of several tables come in one order, each once."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from datetime import datetime, timedelta

import pytest

from delayer.imports.sql import merged

NOON = datetime(2031, 1, 31, 12)  # noqa: DTZ001 - the columns have no zone
Row = tuple[int, str, bytes, datetime, str]


async def stream(rows: list[Row]) -> AsyncIterator[Row]:
    for row in rows:
        yield row


@pytest.mark.parametrize(("count", "rows"), [(0, 0), (1, 0), (1, 5_000), (3, 700), (40, 130)])
@pytest.mark.parametrize("seconds", [1, 50, 1_000_000])
async def test_one_order(count: int, rows: int, seconds: int) -> None:
    chance = random.Random(count)
    tables: list[list[Row]] = [
        sorted(
            ((i, "q", b"", NOON + timedelta(seconds=chance.randrange(seconds)), "{}") for i in range(rows + n)),
            key=lambda row: (row[3], row[0]),
        )
        for n in range(count)
    ]
    found = [one async for one in merged([stream(table) for table in tables])]
    dues = [row[3] for _, row in found]
    assert dues == sorted(dues)
    assert [[row for number, row in found if number == n] for n in range(count)] == tables
