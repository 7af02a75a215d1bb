"""Which tables of a database an import means, which of their rows, and what stands beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from heapq import merge
from itertools import islice

from sqlalchemy.ext.asyncio import AsyncConnection

from delayer.core.importing import SOON_MS, Meant, Run
from delayer.legacy import tables
from delayer.legacy.layout import Layout, Pick, staged_beside
from delayer.legacy.ports import ImportImpossible
from delayer.legacy.spelling import clock, counting
from delayer.legacy.statements import Moving
from delayer.legacy.timeouts import moment_of


@dataclass(frozen=True, slots=True)
class Wanted:
    """The tables that match ``patterns``. ``overdue_too``: no timeout manager runs."""

    patterns: Sequence[str]
    layout: Layout
    meant: Meant
    schema: str | None = None
    endpoint: str | None = None
    overdue_too: bool = False


class MeantTables:
    """The tables of one run at a time. Connections are the caller's; all raise the driver's errors."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self._tables: list[Moving] | None = None
        self._token = ""

    def is_of(self, run: Run) -> None:
        """What is staged from here on, or was, is this run's."""
        if run.token != self._token:
            self._token, self._tables = run.token, None

    async def found(self, connection: AsyncConnection) -> list[Moving]:
        """The tables that are meant, as the database has them. Raises ImportImpossible where there are none."""
        if self._tables is None:
            self._tables = await connection.run_sync(
                tables.found, self.wanted.patterns, self.wanted.schema, self.wanted.layout, self._token
            )
        return self._tables

    async def found_staged(self, connection: AsyncConnection) -> list[Moving]:
        """From now on only those that one stands beside."""
        # After the last batch they may be gone already: a run that died before the store knew.
        there = await self.staged(connection)
        self._tables = [one for one in await self.found(connection) if one.beside.table.name in there]
        return self._tables

    def look_again(self) -> None:
        """They are others by now."""
        self._tables = None

    async def staged(self, connection: AsyncConnection) -> set[str]:
        """The tables beside them that exist, of every run."""
        return await connection.run_sync(tables.staged, self.wanted.schema)

    async def refuse_leftovers(self, connection: AsyncConnection, ours: Sequence[Moving]) -> None:
        """Of an import that another store knows. Raises ImportImpossible."""
        there = await self.staged(connection)
        for one in ours:
            for name in staged_beside(one.name, there):
                if (await connection.execute(counting(name, self.wanted.schema))).scalar_one():
                    raise ImportImpossible(
                        f"table {name} holds timeouts of another store's import: finish or abort that one"
                    )

    async def count(self, connection: AsyncConnection, ours: Sequence[Moving]) -> int:
        """How many rows are staged."""
        there = await self.staged(connection)
        besides = [one.beside for one in ours]
        return sum([(await connection.execute(one.count())).scalar_one() for one in besides if one.table.name in there])

    async def drop(self, connection: AsyncConnection) -> None:
        """Those beside them, and commit."""
        there = await self.staged(connection)
        for one in self._tables or ():
            if one.beside.table.name in there:
                await connection.execute(one.beside.drop())
        await connection.commit()

    async def pick(self, connection: AsyncConnection, ahead_ms: int = SOON_MS) -> Pick:
        """What is meant, by the database's clock: nothing that is due within ``ahead_ms``."""
        after = None
        if not self.wanted.overdue_too:
            now: datetime = (await connection.execute(clock(connection.dialect.name))).scalar_one()
            after = now + timedelta(milliseconds=ahead_ms)
        cutoff_ms = self.wanted.meant.cutoff_ms
        since = None if cutoff_ms is None else moment_of(cutoff_ms)
        return Pick(after, since, self.wanted.endpoint)

    async def shares(self, connection: AsyncConnection, ours: Sequence[Moving], pick: Pick) -> dict[str, int]:
        """How many of the soonest ``limit`` stand in each table; nothing without a limit."""
        limit = self.wanted.meant.limit
        if limit is None:
            return {}
        dues = []
        for one in ours:
            rows = await connection.execute(one.soonest(pick, limit))
            dues.append([(due, one.name) for (due,) in rows])
        shares = dict.fromkeys((one.name for one in ours), 0)
        for _, name in islice(merge(*dues), limit):
            shares[name] += 1
        return shares
