"""Sources that are tables of timeouts in a database: PostgreSQL, MySQL and MariaDB, SQL Server, by SQLAlchemy.

*Staging* moves what is meant out of reach of any timeout manager (statements.py), in one transaction, into tables that
no other run has, of whatever store; a batch is read
from there, and removed when it is committed here. *put_back* moves the rest back. So a row is at any time where it was,
or staged, or in our store; after a kill between our commit and the removal it is in both of these, and the next run
removes it, by the place that was committed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from heapq import merge
from itertools import islice
from typing import Any, Final

from sqlalchemy import URL, Executable, Select, TableClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from delayer.core.importing import REPLIES, SOON_MS, Batch, Item, Meant, Phase, Rewrite, Run, Survey, renamed, rewriting
from delayer.core.message import Target
from delayer.faultpoint import reach
from delayer.legacy import places, tables
from delayer.legacy.ahead import Ahead
from delayer.legacy.databases import Database
from delayer.legacy.merging import Merge
from delayer.legacy.ports import CountMismatch, ImportImpossible
from delayer.legacy.statements import MYSQL, Layout, Moving, Pick, Place, clock, counting, staged_beside
from delayer.legacy.timeouts import Timeout, epoch_ms, item_of, moment_of, problem_of

BATCH: Final = 2_000
BATCH_BYTES: Final = 8 << 20
MOST_TARGETS: Final = 10_000
LOOKED_AT: Final = 2_000
"""Rows of which the headers are in memory at once, where a preview looks at all of them; fewer where they are long."""
LOOK_BYTES: Final = 16 << 20
ATTEMPTS: Final = 3
"""How often staging is tried that takes longer than it may."""
AT_A_STRETCH: Final = 250
"""Rows that are made messages before the loop gets its turn."""
LAZILY: Final = {"postgresql": "SET LOCAL synchronous_commit = off"}
"""By dialect: a removal that a crash of the source undoes is done again by the next run, since the store has the place
in every table; and the end, which drops the tables, waits for everything before it."""
SOON: Final = "due within a minute, or overdue: a timeout manager may have them in hand (--overdue-too takes them)"
SOONER: Final = "due before the cutoff"
NO_TIME: Final = "without a due time"
BEYOND_LIMIT: Final = "beyond the limit"


class Tables:
    """Satisfies ports.Source, for the tables that match ``patterns``. ``overdue_too``: no timeout manager runs."""

    def __init__(
        self,
        name: str,
        url: URL,
        patterns: Sequence[str],
        layout: Layout,
        meant: Meant,
        *,
        schema: str | None = None,
        endpoint: str | None = None,
        rewrites: Sequence[Rewrite] = (),
        replies: Sequence[Rewrite] = (),
        overdue_too: bool = False,
    ) -> None:
        self.name = name
        self._database = Database(url)
        self._patterns = patterns
        self._layout = layout
        self._meant = meant
        self._schema = schema
        self._endpoint = endpoint
        self._rewrites = rewrites
        self._replies = replies
        self._overdue_too = overdue_too
        self._source = name.encode()
        self._targets: dict[str, Target] = {}
        self._tables: list[Moving] | None = None
        self._token = ""
        self._ahead = Ahead(self._read)
        self._merge: Merge | None = None
        self._read_upto: dict[str, Place] = {}
        self._removed_upto: dict[str, Place] = {}

    @property
    def parameters(self) -> dict[str, object]:
        """See the port."""
        said: dict[str, object] = {
            "database": self._database.shown,
            "tables": list(self._patterns),
            "overdue_too": self._overdue_too,
        }
        if self._schema is not None:
            said["schema"] = self._schema
        if self._endpoint is not None:
            said["endpoint"] = self._endpoint
        return said | rewriting(self._rewrites) | rewriting(self._replies, REPLIES) | self._meant.as_dict()

    # ---- the port

    async def survey(self, unfinished: Run | None = None, *, thorough: bool = False) -> Survey:
        """See the port."""
        survey = Survey()
        if unfinished is not None:
            self._is_of(unfinished)
        async with self._database.connected() as connection:
            ours = await self._found(connection)
            if unfinished is None:
                await self._refuse_leftovers(connection, ours)
            elif await self._survey_staged(connection, ours, survey, thorough) or unfinished.phase is Phase.RUNNING:
                return survey
            pick = await self._pick(connection)
            whole = Survey() if thorough else survey
            shares = await self._shares(connection, ours, pick) if thorough else {}
            for one in ours:
                if thorough:
                    await self._look(connection, one, one.source, one.looks(pick, shares.get(one.name)), survey)
                if not thorough or self._meant.limit is not None:
                    await self._add_goals(connection, one.goals(pick), whole)
                row = (await connection.execute(one.others(pick))).one()
                for why, count in zip((NO_TIME, SOONER, SOON), row, strict=True):
                    survey.leave(why, int(count or 0))
        found = whole.messages or 0
        if self._meant.limit is not None and found > self._meant.limit:
            survey.leave(BEYOND_LIMIT, found - self._meant.limit)
            survey.messages = self._meant.limit
        survey.remarks.append(f"tables: {', '.join(one.name for one in ours)}")
        return survey

    async def _survey_staged(
        self, connection: AsyncConnection, ours: Sequence[Moving], survey: Survey, thorough: bool
    ) -> bool:
        """What an interrupted run has yet to bring. Whether there is any: a stage that was committed is whole."""
        there = await self._staged(connection)
        ours = [one for one in ours if one.staged.name in there]
        for one in ours:
            if thorough:
                await self._look(connection, one, one.staged, one.staged_looks(), survey)
            else:
                await self._add_goals(connection, one.staged_goals(), survey)
        if survey.messages:
            survey.remarks.append("this is what the run that was interrupted staged and did not remove yet")
        return bool(survey.messages)

    async def _add_goals(self, connection: AsyncConnection, goals: Executable, survey: Survey) -> None:
        for destination, count, first, last in await connection.execute(goals):
            survey.add(self._target(destination or ""), epoch_ms(first), epoch_ms(last), count)

    async def _look(
        self, connection: AsyncConnection, one: Moving, of: TableClause, rows: Select[Any], survey: Survey
    ) -> None:
        """Count these rows one by one, with what would be wrong with each: only its headers tell that."""
        dialect = connection.dialect.name
        longest = (await connection.execute(one.longest_headers(dialect, of))).scalar_one() or 0
        at_once = max(min(LOOKED_AT, LOOK_BYTES // max(longest, 1)), 1)
        async with connection.stream(rows.execution_options(yield_per=at_once)) as found:
            async for some in found.partitions():
                for destination, due, headers in some:
                    target = self._target(destination or "")
                    survey.add(target, epoch_ms(due), problem=problem_of(headers, target.routing_key))
                await asyncio.sleep(0)  # heartbeats and signals are served

    async def stage(self, run: Run) -> int:
        """See the port."""
        self._is_of(run)
        async with self._database.connected() as connection:
            ours = await self._found(connection)
            there = await self._staged(connection)
            for one in ours:
                if one.staged.name not in there:
                    await connection.execute(one.create())
                    if spare := await connection.run_sync(tables.spare_indexes, one, self._schema):
                        await connection.execute(one.bare(spare))
            await connection.commit()
            # A stage that was committed is whole.
            if not (count := await self._count(connection, ours)):
                await connection.rollback()
                if connection.dialect.name in MYSQL:
                    # Or every index would be locked to its end, and no timeout manager could store a timeout.
                    await connection.execution_options(isolation_level="READ COMMITTED")
                count = await self._take(connection, ours)
                reach("import.moved")
            # Afterwards: an index of what is there is made in a tenth of the time that adding to it takes.
            for one in ours:
                if (statement := await connection.run_sync(tables.ordering, one, self._schema)) is not None:
                    await connection.execute(statement)
            await connection.commit()
        return count

    async def _take(self, connection: AsyncConnection, ours: Sequence[Moving]) -> int:
        """Move what is meant, and commit. A timeout manager that reads without locks sees all of it until then: so
        nothing may be due by then, however long it took."""
        ahead_ms = SOON_MS
        for _ in range(ATTEMPTS):
            began = time.monotonic()
            pick = await self._pick(connection, ahead_ms)
            taken = await self._copy(connection, ours, pick)
            copied_ms = _ms_since(began)
            since = began
            if pick.after is not None and copied_ms > SOON_MS // 4:
                since, ahead_ms = time.monotonic(), SOON_MS + 2 * copied_ms
                pick = await self._pick(connection, ahead_ms)
                assert pick.after is not None
                for one in ours:
                    taken[one.name] -= (await connection.execute(one.spare(pick.after))).rowcount
            await self._forget(connection, ours, taken)
            if pick.after is None or _ms_since(since) <= ahead_ms - SOON_MS // 2:
                await connection.commit()
                return sum(taken.values())
            await connection.rollback()
            ahead_ms = SOON_MS + 3 * _ms_since(began)
        raise ImportImpossible(
            f"to move the timeouts takes longer than what is due meanwhile can wait, {ATTEMPTS} times: nothing is "
            "moved. Next: take fewer at a time (--limit, --table), or stop the timeout managers and say --overdue-too"
        )

    async def _copy(self, connection: AsyncConnection, ours: Sequence[Moving], pick: Pick) -> dict[str, int]:
        """How many of each table."""
        shares = await self._shares(connection, ours, pick)
        return {one.name: (await connection.execute(one.take(pick, shares.get(one.name)))).rowcount for one in ours}

    async def _forget(self, connection: AsyncConnection, ours: Sequence[Moving], taken: Mapping[str, int]) -> None:
        for one in ours:
            forgotten = (await connection.execute(one.forget(connection.dialect.name))).rowcount
            if (copied := taken[one.name]) != forgotten:
                raise CountMismatch(
                    f"table {one.name}: {copied} timeouts were copied, but {forgotten} deleted: nothing is moved"
                )

    async def _shares(self, connection: AsyncConnection, ours: Sequence[Moving], pick: Pick) -> dict[str, int]:
        """How many of the soonest ``limit`` stand in each table; nothing without a limit."""
        if self._meant.limit is None:
            return {}
        dues = []
        for one in ours:
            rows = await connection.execute(one.soonest(pick, self._meant.limit))
            dues.append([(due, one.name) for (due,) in rows])
        shares = dict.fromkeys((one.name for one in ours), 0)
        for _, name in islice(merge(*dues), self._meant.limit):
            shares[name] += 1
        return shares

    async def resume(self, run: Run) -> None:
        """See the port."""
        self._is_of(run)
        async with self._database.connected() as connection:
            # After the last batch they may be gone already: a run that died before the store knew.
            there = await self._staged(connection)
            self._tables = [one for one in await self._found(connection) if one.staged.name in there]
            for name, place in places.read(run.progress).items():
                one = next((table for table in self._tables if table.name == name), None)
                if one is not None:
                    await connection.execute(one.remove(place))
                    self._read_upto[name] = self._removed_upto[name] = place
            await connection.commit()

    async def next_batch(self) -> Batch | None:
        """See the port."""
        return await self._ahead.next()

    async def _read(self) -> Batch | None:
        """The soonest behind what was read before, which may be there yet."""
        items: list[Item] = []
        upto = dict(self._read_upto)
        size = 0
        async with self._database.connected() as connection:
            if self._merge is None:
                self._merge = Merge(await self._found(connection), upto)
            while len(items) < BATCH and size < BATCH_BYTES:
                found = await self._merge.next(connection)
                if found is None:
                    break
                name, row = found
                items.append(self._item(row))
                upto[name] = Place(row[3], row[0])
                size += len(row[2] or b"")
                if not len(items) % AT_A_STRETCH:
                    await asyncio.sleep(0)  # whoever commits meanwhile has to be served
        self._read_upto = upto
        return Batch(items, places.write(upto)) if items else None

    async def remove(self, batch: Batch) -> int:
        """See the port."""
        removed = 0
        upto = places.read(batch.progress)
        async with self._database.connected() as connection:
            if (lazily := LAZILY.get(connection.dialect.name)) is not None:
                await connection.execute(text(lazily))
            for one in await self._found(connection):
                place, before = upto.get(one.name), self._removed_upto.get(one.name)
                if place is not None and place != before:
                    removed += (await connection.execute(one.remove(place, before))).rowcount
            await connection.commit()
        self._removed_upto = upto
        return removed

    async def finish(self) -> dict[str, int]:
        """See the port."""
        left = Survey()
        async with self._database.connected() as connection:
            ours = await self._found(connection)
            count = await self._count(connection, ours)
            if count:
                raise CountMismatch(f"{count} staged timeouts are left")
            await self._drop(connection)
            pick = await self._pick(connection)
            self._tables = None
            for one in await self._found(connection):
                row = (await connection.execute(one.others(pick))).one()
                for why, number in zip((NO_TIME, SOONER, SOON), row, strict=True):
                    left.leave(why, int(number or 0))
        return left.left

    async def put_back(self, run: Run) -> int:
        """See the port."""
        await self.resume(run)
        back = 0
        async with self._database.connected() as connection:
            for one in await self._found(connection):
                back += (await connection.execute(one.give_back())).rowcount
                await connection.execute(one.empty())
            await connection.commit()
            await self._drop(connection)
        return back

    async def close(self) -> None:
        """See the port."""
        await self._ahead.close()
        await self._database.close()

    # ---- messages

    def _target(self, destination: str) -> Target:
        target = self._targets.get(destination)
        if target is None:
            if len(self._targets) >= MOST_TARGETS:
                self._targets.clear()
            target = Target(b"", renamed(destination.encode("utf-8", "surrogateescape"), self._rewrites))
            self._targets[destination] = target
        return target

    def _item(self, row: Any) -> Item:
        id_, destination, state, due, headers = row
        body = state if type(state) is bytes else bytes(state or b"")
        timeout = Timeout(str(id_), destination or "", epoch_ms(due), headers, body)
        return item_of(timeout, self._source, self._target(timeout.address).routing_key, self._replies)

    async def _pick(self, connection: AsyncConnection, ahead_ms: int = SOON_MS) -> Pick:
        """What is meant, by the database's clock: nothing that is due within ``ahead_ms``."""
        after = None
        if not self._overdue_too:
            now: datetime = (await connection.execute(clock(connection.dialect.name))).scalar_one()
            after = now + timedelta(milliseconds=ahead_ms)
        since = None if self._meant.cutoff_ms is None else moment_of(self._meant.cutoff_ms)
        return Pick(after, since, self._endpoint)

    # ---- tables

    def _is_of(self, run: Run) -> None:
        """What is staged from here on, or was, is this run's."""
        if run.token != self._token:
            self._token, self._tables = run.token, None

    async def _found(self, connection: AsyncConnection) -> list[Moving]:
        """The tables that are meant, as the database has them. Raises ImportImpossible where there are none."""
        if self._tables is None:
            self._tables = await connection.run_sync(
                tables.found, self._patterns, self._schema, self._layout, self._token
            )
        return self._tables

    async def _staged(self, connection: AsyncConnection) -> set[str]:
        """The tables beside them that exist, of every run."""
        return await connection.run_sync(tables.staged, self._schema)

    async def _refuse_leftovers(self, connection: AsyncConnection, ours: Sequence[Moving]) -> None:
        """Of an import that another store knows. Raises ImportImpossible."""
        there = await self._staged(connection)
        for one in ours:
            for name in staged_beside(one.name, there):
                if (await connection.execute(counting(name, self._schema))).scalar_one():
                    raise ImportImpossible(
                        f"table {name} holds timeouts of another store's import: finish or abort that one"
                    )

    async def _count(self, connection: AsyncConnection, ours: Sequence[Moving]) -> int:
        there = await self._staged(connection)
        return sum([(await connection.execute(one.count())).scalar_one() for one in ours if one.staged.name in there])

    async def _drop(self, connection: AsyncConnection) -> None:
        there = await self._staged(connection)
        for one in self._tables or ():
            if one.staged.name in there:
                await connection.execute(one.drop())
        await connection.commit()


def _ms_since(began: float) -> int:
    return int((time.monotonic() - began) * 1000)
