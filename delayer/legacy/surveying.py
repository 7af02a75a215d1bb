"""What an import of tables would bring, and what it would leave: counted, and where that is asked looked at."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from sqlalchemy import Executable, Select, TableClause
from sqlalchemy.ext.asyncio import AsyncConnection

from delayer.core.importing import Phase, Run, Survey
from delayer.core.message import Target
from delayer.legacy.beside import longest_headers
from delayer.legacy.layout import Pick
from delayer.legacy.meant import MeantTables
from delayer.legacy.statements import Moving
from delayer.legacy.timeouts import epoch_ms, problem_of

LOOKED_AT: Final = 2_000
"""Rows of which the headers are in memory at once, where a preview looks at all of them; fewer where they are long."""
LOOK_BYTES: Final = 16 << 20
SOON: Final = "due within a minute, or overdue: a timeout manager may have them in hand (--overdue-too takes them)"
SOONER: Final = "due before the cutoff"
NO_TIME: Final = "without a due time"
BEYOND_LIMIT: Final = "beyond the limit"


class Surveying:
    """By one connection. ``target``: where what has this destination goes."""

    def __init__(
        self, connection: AsyncConnection, meant: MeantTables, target: Callable[[str], Target], *, thorough: bool
    ) -> None:
        self._connection = connection
        self._meant = meant
        self._target = target
        self._thorough = thorough

    async def run(self, unfinished: Run | None) -> Survey:
        """Of what a run would bring, or ``unfinished`` has yet to. Raises ImportImpossible."""
        survey, thorough, limit = Survey(), self._thorough, self._meant.wanted.meant.limit
        connection = self._connection
        ours = await self._meant.found(connection)
        if unfinished is None:
            await self._meant.refuse_leftovers(connection, ours)
        elif await self._survey_staged(ours, survey) or unfinished.phase is Phase.RUNNING:
            return survey
        pick = await self._meant.pick(connection)
        whole = Survey() if thorough else survey
        shares = await self._meant.shares(connection, ours, pick) if thorough else {}
        for one in ours:
            if thorough:
                await self._look(one, one.source, one.looks(pick, shares.get(one.name)), survey)
            if not thorough or limit is not None:
                await self._add_goals(one.goals(pick), whole)
            await leave_others(connection, one, pick, survey)
        found = whole.messages or 0
        if limit is not None and found > limit:
            survey.leave(BEYOND_LIMIT, found - limit)
            survey.messages = limit
        survey.remarks.append(f"tables: {', '.join(one.name for one in ours)}")
        return survey

    async def _survey_staged(self, ours: Sequence[Moving], survey: Survey) -> bool:
        """What an interrupted run has yet to bring. Whether there is any: a stage that was committed is whole."""
        there = await self._meant.staged(self._connection)
        ours = [one for one in ours if one.beside.table.name in there]
        for one in ours:
            if self._thorough:
                await self._look(one, one.beside.table, one.beside.looks(), survey)
            else:
                await self._add_goals(one.beside.goals(), survey)
        if survey.messages:
            survey.remarks.append("this is what the run that was interrupted staged and did not remove yet")
        return bool(survey.messages)

    async def _add_goals(self, goals: Executable, survey: Survey) -> None:
        for destination, count, first, last in await self._connection.execute(goals):
            survey.add(self._target(destination or ""), epoch_ms(first), epoch_ms(last), count)

    async def _look(self, one: Moving, of: TableClause, rows: Select[Any], survey: Survey) -> None:
        """Count these rows one by one, with what would be wrong with each: only its headers tell that."""
        dialect = self._connection.dialect.name
        longest = (await self._connection.execute(longest_headers(dialect, of, one.layout))).scalar_one() or 0
        at_once = max(min(LOOKED_AT, LOOK_BYTES // max(longest, 1)), 1)
        async with self._connection.stream(rows.execution_options(yield_per=at_once)) as found:
            async for some in found.partitions():
                for destination, due, headers in some:
                    target = self._target(destination or "")
                    survey.add(target, epoch_ms(due), problem=problem_of(headers, target.routing_key))
                await asyncio.sleep(0)  # heartbeats and signals are served


async def leave_others(connection: AsyncConnection, one: Moving, pick: Pick, survey: Survey) -> None:
    """Add what is not meant of this table, and why."""
    row = (await connection.execute(one.others(pick))).one()
    for why, count in zip((NO_TIME, SOONER, SOON), row, strict=True):
        survey.leave(why, int(count or 0))
