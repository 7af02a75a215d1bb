"""Rows of several tables come in one order, each once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import datetime, timedelta

import pytest

from delayer.core.importing import Batch, Item, Meant
from delayer.imports.sql import SqlTimeouts, merged
from delayer.imports.state_machine import SourceLost
from tests.unit.imports.import_fakes import parcel

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


class Source(SqlTimeouts):
    """Gives these batches in place of those of a database."""

    def __init__(self, answers: list[Batch | Exception]) -> None:
        super().__init__("nservicebus-sql", "postgresql://h/d", (), Meant())
        self.answers = answers

    async def _batches(self) -> AsyncGenerator[Batch]:
        for answer in self.answers:
            if isinstance(answer, Exception):
                raise answer
            yield answer


async def test_an_error_of_reading_ahead_is_raised_at_its_batch() -> None:
    source = Source([Batch([Item(parcel(1))], "1"), SourceLost("gone")])
    assert await source.next_batch() is not None
    await asyncio.sleep(0)
    with pytest.raises(SourceLost, match=r"^gone$"):
        await source.next_batch()
    await source.close()
    await source.close()
