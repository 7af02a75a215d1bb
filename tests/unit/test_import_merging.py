"""Rows of several tables come in one order, each once, by as many questions as one table would take."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pytest

from delayer.legacy.merging import LEAST, READ, Merge
from delayer.legacy.statements import Place

NOON = datetime(2031, 1, 31, 12)  # noqa: DTZ001 - the columns have no zone
Row = tuple[int, str, bytes, datetime, str]


@dataclass
class Table:
    """Stands in for statements.Moving: a question is what it answers."""

    name: str
    rows: list[Row]
    asked: int = 0

    def batch(self, limit: int, after: Place | None) -> list[Row]:
        self.asked += 1
        behind = [row for row in self.rows if after is None or (row[3], row[0]) > (after.time, after.id)]
        return sorted(behind, key=lambda row: (row[3], row[0]))[:limit]


class Answer(list[Row]):
    def all(self) -> list[Row]:
        return list(self)


class Connection:
    async def execute(self, question: list[Row]) -> Answer:
        return Answer(question)


async def merged(tables: list[Table], after: dict[str, Place] | None = None) -> list[tuple[str, Row]]:
    merge = Merge(tables, after or {})  # type: ignore[arg-type]
    connection: Any = Connection()
    found = []
    while (one := await merge.next(connection)) is not None:
        found.append(one)
    assert await merge.next(connection) is None
    return found


def tables_of(count: int, rows: int, seconds: int) -> list[Table]:
    chance = random.Random(count)
    return [
        Table(
            f"t{n}",
            [(i, "q", b"", NOON + timedelta(seconds=chance.randrange(seconds)), "{}") for i in range(rows + n)],
        )
        for n in range(count)
    ]


@pytest.mark.parametrize(("count", "rows"), [(0, 0), (1, 0), (1, 5_000), (3, 700), (40, 130)])
@pytest.mark.parametrize("seconds", [1, 50, 1_000_000])
async def test_one_order(count: int, rows: int, seconds: int) -> None:
    tables = tables_of(count, rows, seconds)
    found = await merged(tables)
    dues = [row[3] for _, row in found]
    assert dues == sorted(dues)
    for table in tables:
        own = [row for name, row in found if name == table.name]
        assert own == sorted(table.rows, key=lambda row: (row[3], row[0]))
        assert table.asked <= 2 + len(own) // max(READ // count, LEAST)
    assert len(found) == sum(len(table.rows) for table in tables)


async def test_behind_a_place() -> None:
    tables = tables_of(2, 300, 20)
    all_of = await merged(tables)
    name, row = all_of[250]
    after = {one: Place(last[3], last[0]) for one, last in all_of[:251]}
    assert after[name] == Place(row[3], row[0])
    assert await merged(tables, after) == all_of[251:]
