"""Rows of several tables come in one order, each once, by as many questions as one table would take."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from delayer.imports import sql
from delayer.imports.sql import LEAST, READ, Merge
from delayer.imports.statements import Place

NOON = datetime(2031, 1, 31, 12)  # noqa: DTZ001 - the columns have no zone
Row = tuple[int, str, bytes, datetime, str]


@dataclass
class Table:
    """Stands in for beside.Beside: a question is what it answers."""

    name: str
    rows: list[Row]
    asked: int = 0
    read_bytes: list[int] = field(default_factory=list)

    def batch(self, limit: int, after: Place | None) -> list[Row]:
        self.asked += 1
        found = self._behind(limit, after)
        self.read_bytes.append(sum(len(row[2]) for row in found))
        return found

    def sizes(self, _dialect: str, limit: int, after: Place | None) -> list[int]:
        return [len(row[2]) for row in self._behind(limit, after)]

    def largest(self, _dialect: str) -> list[int | None]:
        return [max((len(row[2]) for row in self.rows), default=None)]

    def _behind(self, limit: int, after: Place | None) -> list[Row]:
        behind = [row for row in self.rows if after is None or (row[3], row[0]) > (after.time, after.id)]
        return sorted(behind, key=lambda row: (row[3], row[0]))[:limit]


class Answer(list[Any]):
    def all(self) -> list[Any]:
        return list(self)

    def scalars(self) -> list[Any]:
        return list(self)

    def scalar_one(self) -> Any:
        [one] = self
        return one


class Connection:
    dialect = SimpleNamespace(name="any")

    async def execute(self, question: list[Any]) -> Answer:
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


async def test_no_more_bytes_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among small rows are some that are as large as all that may be read at once, and larger."""
    room = 1_000
    monkeypatch.setattr(sql, "READ_BYTES", 2 * room)
    tables = tables_of(2, 500, 100)
    chance = random.Random(1)
    for table in tables:
        table.rows = [(*row[:2], bytes(chance.choice([0, 3, 50, room, 3 * room])), *row[3:]) for row in table.rows]
    found = await merged(tables)
    assert len(found) == sum(len(table.rows) for table in tables)
    for table in tables:
        assert max(table.read_bytes) == 3 * room, "that one alone"
        assert all(size <= room or size == 3 * room for size in table.read_bytes)
        assert table.asked < len(table.rows)
