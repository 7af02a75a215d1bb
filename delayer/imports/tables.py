"""Which tables of timeouts are meant, what of them, and moving that into the tables beside in one transaction: out of
reach of any timeout manager.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from heapq import merge
from itertools import islice

from sqlalchemy import Connection, Executable, inspect
from sqlalchemy.ext.asyncio import AsyncConnection

from delayer.core.faultpoint import reach
from delayer.core.importing import SOON_MS, Meant, Run
from delayer.imports.state_machine import CountMismatch, ImportImpossible
from delayer.imports.statements import MYSQL, Beside, Layout, Moving, Pick, clock, counting, is_staged, staged_beside
from delayer.imports.timeouts import moment_of


def meant_tables(
    connection: Connection, patterns: Sequence[str], schema: str | None, layout: Layout, token: str
) -> list[Moving]:
    """Those that match, in the order of their names, for the run of this token. Raises ImportImpossible where none
    does, or one is no table of timeouts."""
    inspector = inspect(connection)
    names = sorted(inspector.get_table_names(schema=schema))
    meant = [name for name in names if not is_staged(name) and any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not meant:
        # Names of other tables that are told where none matches.
        raise ImportImpossible(
            f"no table matches {', '.join(patterns)}: found {', '.join(names[:20]) or 'no table at all'}"
        )
    return [_moving(connection, name, schema, layout, token) for name in meant]


def _moving(connection: Connection, name: str, schema: str | None, layout: Layout, token: str) -> Moving:
    types = {str(one["name"]): one["type"] for one in inspect(connection).get_columns(name, schema=schema)}
    try:
        layout = layout.of([*types])
    except KeyError as missing:
        raise ImportImpossible(f"table {name}: expected the columns of a timeout table, {missing} is missing") from None
    exact = types[layout.time] if connection.dialect.name == "mssql" else None
    return Moving(name, schema, [*types], layout, exact, token=token)


def staged_tables(connection: Connection, schema: str | None) -> set[str]:
    """Those beside them that exist, of every run."""
    return {name for name in inspect(connection).get_table_names(schema=schema) if is_staged(name)}


def spare_indexes(connection: Connection, one: Beside, schema: str | None) -> list[str]:
    """Indexes of the new one beside it that nobody needs there."""
    if connection.dialect.name not in MYSQL:
        return []
    return sorted(str(index["name"]) for index in inspect(connection).get_indexes(one.table.name, schema=schema))


def ordering(connection: Connection, one: Beside, schema: str | None) -> Executable | None:
    """What gives the one beside it the order that its batches are read in; None where it has it."""
    inspector = inspect(connection)
    if one.index_name in {index["name"] for index in inspector.get_indexes(one.table.name, schema=schema)}:
        return None
    if connection.dialect.name in MYSQL:
        key = inspector.get_pk_constraint(one.table.name, schema=schema)["constrained_columns"]
        if key == [one.layout.time, one.layout.id]:
            return None
        if key == [one.layout.id]:
            return one.cluster()
    return one.index()


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
                meant_tables, self.wanted.patterns, self.wanted.schema, self.wanted.layout, self._token
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
        return await connection.run_sync(staged_tables, self.wanted.schema)

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


class Staging:
    """By one connection."""

    def __init__(self, connection: AsyncConnection, meant: MeantTables) -> None:
        self._connection = connection
        self._meant = meant
        self._schema = meant.wanted.schema

    async def run(self) -> int:
        """How many are staged, now or before. Raises CountMismatch, ImportImpossible."""
        connection = self._connection
        ours = await self._meant.found(connection)
        there = await self._meant.staged(connection)
        for one in ours:
            if one.beside.table.name not in there:
                await connection.execute(one.beside.create())
                if spare := await connection.run_sync(spare_indexes, one.beside, self._schema):
                    await connection.execute(one.beside.bare(spare))
        await connection.commit()
        # A stage that was committed is whole.
        if not (count := await self._meant.count(connection, ours)):
            await connection.rollback()
            if connection.dialect.name in MYSQL:
                # Or every index would be locked to its end, and no timeout manager could store a timeout.
                await connection.execution_options(isolation_level="READ COMMITTED")
            count = await self._take(ours)
            reach("import.moved")
        # Afterwards: an index of what is there is made in a tenth of the time that adding to it takes.
        for one in ours:
            if (statement := await connection.run_sync(ordering, one.beside, self._schema)) is not None:
                await connection.execute(statement)
        await connection.commit()
        return count

    async def _take(self, ours: Sequence[Moving]) -> int:
        """Move what is meant, and commit. A timeout manager that reads without locks sees all of it until then: so
        nothing may be due by then, however long it took."""
        connection = self._connection
        ahead_ms = SOON_MS
        # How often staging is tried that takes longer than it may.
        for _ in range(3):
            began = time.monotonic()
            pick = await self._meant.pick(connection, ahead_ms)
            taken = await self._copy(ours, pick)
            copied_ms = _ms_since(began)
            since = began
            if pick.after is not None and copied_ms > SOON_MS // 4:
                since, ahead_ms = time.monotonic(), SOON_MS + 2 * copied_ms
                pick = await self._meant.pick(connection, ahead_ms)
                assert pick.after is not None
                for one in ours:
                    taken[one.name] -= (await connection.execute(one.beside.spare(pick.after))).rowcount
            await self._forget(ours, taken)
            if pick.after is None or _ms_since(since) <= ahead_ms - SOON_MS // 2:
                await connection.commit()
                return sum(taken.values())
            await connection.rollback()
            ahead_ms = SOON_MS + 3 * _ms_since(began)
        raise ImportImpossible(
            f"to move the timeouts takes longer than what is due meanwhile can wait, {3} times: nothing is "
            "moved. Next: take fewer at a time (--limit, --table), or stop the timeout managers and say --overdue-too"
        )

    async def _copy(self, ours: Sequence[Moving], pick: Pick) -> dict[str, int]:
        """How many of each table."""
        connection = self._connection
        shares = await self._meant.shares(connection, ours, pick)
        return {one.name: (await connection.execute(one.take(pick, shares.get(one.name)))).rowcount for one in ours}

    async def _forget(self, ours: Sequence[Moving], taken: Mapping[str, int]) -> None:
        connection = self._connection
        for one in ours:
            forgotten = (await connection.execute(one.forget(connection.dialect.name))).rowcount
            if (copied := taken[one.name]) != forgotten:
                raise CountMismatch(
                    f"table {one.name}: {copied} timeouts were copied, but {forgotten} deleted: nothing is moved"
                )


def _ms_since(began: float) -> int:
    return int((time.monotonic() - began) * 1000)
