"""Moving what is meant into the tables beside, in one transaction: out of reach of any timeout manager."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from sqlalchemy.ext.asyncio import AsyncConnection

from delayer.core.importing import SOON_MS
from delayer.faultpoint import reach
from delayer.legacy import tables
from delayer.legacy.layout import Pick
from delayer.legacy.meant import MeantTables
from delayer.legacy.ports import CountMismatch, ImportImpossible
from delayer.legacy.spelling import MYSQL
from delayer.legacy.statements import Moving

ATTEMPTS: Final = 3
"""How often staging is tried that takes longer than it may."""


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
                if spare := await connection.run_sync(tables.spare_indexes, one.beside, self._schema):
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
            if (statement := await connection.run_sync(tables.ordering, one.beside, self._schema)) is not None:
                await connection.execute(statement)
        await connection.commit()
        return count

    async def _take(self, ours: Sequence[Moving]) -> int:
        """Move what is meant, and commit. A timeout manager that reads without locks sees all of it until then: so
        nothing may be due by then, however long it took."""
        connection = self._connection
        ahead_ms = SOON_MS
        for _ in range(ATTEMPTS):
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
            f"to move the timeouts takes longer than what is due meanwhile can wait, {ATTEMPTS} times: nothing is "
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
