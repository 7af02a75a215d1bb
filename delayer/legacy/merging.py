"""Rows of several tables in one order: of their due instants, and in a table of their ids where these are equal."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from heapq import heapify, heappop, heapreplace
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection

from delayer.legacy.beside import Beside
from delayer.legacy.layout import Place

READ: Final = 2_000
"""Rows that are in memory, of all tables together; more where there are very many tables."""
LEAST: Final = 100
READ_BYTES: Final = 32 << 20
"""The same for their bytes: a row more than that only where it is alone."""


class Merge:
    """The rows behind ``after``, where that is said for a table. Each is read once, by portions of one table, so many
    tables cost no more than one does."""

    def __init__(self, tables: Sequence[Beside], after: Mapping[str, Place]) -> None:
        self._tables = tables
        self._after = dict(after)
        self._portion = max(READ // max(len(tables), 1), LEAST)
        self._rows: list[deque[Any]] = [deque() for _ in tables]
        self._heads: list[tuple[datetime, int]] | None = None
        self._largest: dict[str, int] = {}

    async def next(self, connection: AsyncConnection) -> tuple[str, Any] | None:
        """The next row and its table's name; None when nothing is left. Raises the driver's errors."""
        if self._heads is None:
            for index in range(len(self._tables)):
                await self._read(connection, index)
            self._heads = [(rows[0][3], index) for index, rows in enumerate(self._rows) if rows]
            heapify(self._heads)
        if not self._heads:
            return None
        _, index = self._heads[0]
        rows = self._rows[index]
        row = rows.popleft()
        if not rows:
            await self._read(connection, index)
        if rows:
            heapreplace(self._heads, (rows[0][3], index))
        else:
            heappop(self._heads)
        return self._tables[index].name, row

    async def _read(self, connection: AsyncConnection, index: int) -> None:
        one = self._tables[index]
        limit = await self._fitting(connection, one)
        found = (await connection.execute(one.batch(limit, self._after.get(one.name)))).all()
        if found:
            self._rows[index].extend(found)
            self._after[one.name] = Place(found[-1][3], found[-1][0])

    async def _fitting(self, connection: AsyncConnection, one: Beside) -> int:
        """How many of the next rows fit into memory. Asked for only where there are rows that might not."""
        dialect, room = connection.dialect.name, READ_BYTES // len(self._tables)
        if one.name not in self._largest:
            self._largest[one.name] = (await connection.execute(one.largest(dialect))).scalar_one() or 0
        if self._portion * self._largest[one.name] <= room:
            return self._portion
        sizes = await connection.execute(one.sizes(dialect, self._portion, self._after.get(one.name)))
        fitting = 0
        for size in sizes.scalars():
            room -= size
            if room < 0:
                break
            fitting += 1
        return max(fitting, 1)
