"""Sources `nservicebus-sql` (SQL Persistence: a table for each endpoint) and `nservicebus-nhibernate` (one for all)."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from heapq import heapify, heappop, heapreplace
from typing import Any, Final

from sqlalchemy import URL, Executable, Select, TableClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from delayer.core.importing import REPLIES, Batch, Item, Meant, Phase, Rewrite, Run, Survey, renamed, rewriting
from delayer.core.message import Target
from delayer.imports.databases import Database, database_url
from delayer.imports.state_machine import CountMismatch
from delayer.imports.statements import Beside, Layout, Moving, Pick, Place, longest_headers
from delayer.imports.tables import MeantTables, Staging, Wanted
from delayer.imports.timeouts import Timeout, epoch_ms, item_of, problem_of


def write_places(places: Mapping[str, Place]) -> str:
    """By the names of the tables; ids may be uuids, which JSON has none of."""
    said = {
        name: [place.time.isoformat(), {"uuid": str(place.id)} if isinstance(place.id, uuid.UUID) else place.id]
        for name, place in places.items()
    }
    return json.dumps(said, sort_keys=True)


def read_places(text: str | None) -> dict[str, Place]:
    """The other way round; None: nothing is done yet."""
    if text is None:
        return {}
    return {
        name: Place(datetime.fromisoformat(due), uuid.UUID(id_["uuid"]) if isinstance(id_, dict) else id_)
        for name, (due, id_) in json.loads(text).items()
    }


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
        # Rows of which the headers are in memory at once, where a preview looks at all of them; fewer where they are
        # long.
        at_once = max(min(2_000, LOOK_BYTES // max(longest, 1)), 1)
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


Read = Callable[[], Awaitable[Batch | None]]


class Ahead:
    """``DEPTH`` batches ahead of who asks. ``read`` gives the batch behind the one that it gave last, whatever became
    of that one meanwhile; None when nothing is left."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._coming: deque[asyncio.Future[Batch | None]] = deque()

    async def next(self) -> Batch | None:
        """Raises what ``read`` raises."""
        # Batches that are read before anybody asks for them: one while the last is committed, one while it is
        # removed.
        while len(self._coming) <= 2:
            before = self._coming[-1] if self._coming else None
            self._coming.append(asyncio.ensure_future(self._behind(before)))
        batch = None
        try:
            batch = await self._coming.popleft()
        finally:
            if batch is None:
                await self.close()  # whatever it was, those behind it have come to the same end
        return batch

    async def _behind(self, before: asyncio.Future[Batch | None] | None) -> Batch | None:
        """One read after the other."""
        if before is not None and await before is None:
            return None
        return await self._read()

    async def close(self) -> None:
        """Whatever is being read nobody wants any more. Safe to call twice."""
        unwanted = list(self._coming)
        self._coming.clear()
        for one in unwanted:
            one.cancel()
        await asyncio.gather(*unwanted, return_exceptions=True)


BATCH: Final = 2_000
BATCH_BYTES: Final = 8 << 20
LAZILY: Final = {"postgresql": "SET LOCAL synchronous_commit = off"}
"""By dialect: a removal that a crash of the source undoes is done again by the next run, since the store has the place
in every table; and the end, which drops the tables, waits for everything before it."""


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
        self._meant = MeantTables(Wanted(patterns, layout, meant, schema, endpoint, overdue_too))
        self._rewrites = rewrites
        self._replies = replies
        self._source = name.encode()
        self._targets: dict[str, Target] = {}
        self._ahead = Ahead(self._read)
        self._merge: Merge | None = None
        self._read_upto: dict[str, Place] = {}
        self._removed_upto: dict[str, Place] = {}

    @property
    def parameters(self) -> dict[str, object]:
        """See the port."""
        wanted = self._meant.wanted
        said: dict[str, object] = {
            "database": self._database.shown,
            "tables": list(wanted.patterns),
            "overdue_too": wanted.overdue_too,
        }
        if wanted.schema is not None:
            said["schema"] = wanted.schema
        if wanted.endpoint is not None:
            said["endpoint"] = wanted.endpoint
        return said | rewriting(self._rewrites) | rewriting(self._replies, REPLIES) | wanted.meant.as_dict()

    async def survey(self, unfinished: Run | None = None, *, thorough: bool = False) -> Survey:
        """See the port."""
        if unfinished is not None:
            self._meant.is_of(unfinished)
        async with self._database.connected() as connection:
            return await Surveying(connection, self._meant, self._target, thorough=thorough).run(unfinished)

    async def stage(self, run: Run) -> int:
        """See the port."""
        self._meant.is_of(run)
        async with self._database.connected() as connection:
            return await Staging(connection, self._meant).run()

    async def resume(self, run: Run) -> None:
        """See the port."""
        self._meant.is_of(run)
        async with self._database.connected() as connection:
            ours = await self._meant.found_staged(connection)
            for name, place in read_places(run.progress).items():
                one = next((table for table in ours if table.name == name), None)
                if one is not None:
                    await connection.execute(one.beside.remove(place))
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
        # Rows that are made messages before the loop gets its turn.
        async with self._database.connected() as connection:
            if self._merge is None:
                self._merge = Merge([one.beside for one in await self._meant.found(connection)], upto)
            while len(items) < BATCH and size < BATCH_BYTES:
                found = await self._merge.next(connection)
                if found is None:
                    break
                name, row = found
                items.append(self._item(row))
                upto[name] = Place(row[3], row[0])
                size += len(row[2] or b"")
                if not len(items) % 250:
                    await asyncio.sleep(0)  # whoever commits meanwhile has to be served
        self._read_upto = upto
        return Batch(items, write_places(upto)) if items else None

    async def remove(self, batch: Batch) -> int:
        """See the port."""
        removed = 0
        upto = read_places(batch.progress)
        async with self._database.connected() as connection:
            if (lazily := LAZILY.get(connection.dialect.name)) is not None:
                await connection.execute(text(lazily))
            for one in await self._meant.found(connection):
                place, before = upto.get(one.name), self._removed_upto.get(one.name)
                if place is not None and place != before:
                    removed += (await connection.execute(one.beside.remove(place, before))).rowcount
            await connection.commit()
        self._removed_upto = upto
        return removed

    async def finish(self) -> dict[str, int]:
        """See the port."""
        left = Survey()
        async with self._database.connected() as connection:
            ours = await self._meant.found(connection)
            count = await self._meant.count(connection, ours)
            if count:
                raise CountMismatch(f"{count} staged timeouts are left")
            await self._meant.drop(connection)
            pick = await self._meant.pick(connection)
            self._meant.look_again()
            for one in await self._meant.found(connection):
                await leave_others(connection, one, pick, left)
        return left.left

    async def put_back(self, run: Run) -> int:
        """See the port."""
        await self.resume(run)
        back = 0
        async with self._database.connected() as connection:
            for one in await self._meant.found(connection):
                back += (await connection.execute(one.give_back())).rowcount
                await connection.execute(one.beside.empty())
            await connection.commit()
            await self._meant.drop(connection)
        return back

    async def close(self) -> None:
        """See the port."""
        await self._ahead.close()
        await self._database.close()

    def _target(self, destination: str) -> Target:
        target = self._targets.get(destination)
        if target is None:
            if len(self._targets) >= 10_000:
                self._targets.clear()
            target = Target(b"", renamed(destination.encode("utf-8", "surrogateescape"), self._rewrites))
            self._targets[destination] = target
        return target

    def _item(self, row: Any) -> Item:
        id_, destination, state, due, headers = row
        body = state if type(state) is bytes else bytes(state or b"")
        timeout = Timeout(str(id_), destination or "", epoch_ms(due), headers, body)
        return item_of(timeout, self._source, self._target(timeout.address).routing_key, self._replies)


SQL: Final = "nservicebus-sql"
NHIBERNATE: Final = "nservicebus-nhibernate"
SQL_TABLES: Final = ("*TimeoutData",)
NHIBERNATE_TABLES: Final = ("TimeoutEntity", "timeoutentity")
"""PostgreSQL folds names that are not quoted, and NHibernate quotes none."""
_SQL: Final = Layout()
_NHIBERNATE: Final = Layout(endpoint="Endpoint")


def sql_persistence(
    url: str,
    patterns: Sequence[str],
    meant: Meant,
    *,
    schema: str | None = None,
    rewrites: Sequence[Rewrite] = (),
    replies: Sequence[Rewrite] = (),
    overdue_too: bool = False,
) -> Tables:
    """Every table that matches a pattern. Raises ImportImpossible."""
    return Tables(
        SQL,
        database_url(url),
        patterns or SQL_TABLES,
        _SQL,
        meant,
        schema=schema,
        rewrites=rewrites,
        replies=replies,
        overdue_too=overdue_too,
    )


def nhibernate(
    url: str,
    patterns: Sequence[str],
    meant: Meant,
    *,
    schema: str | None = None,
    endpoint: str | None = None,
    rewrites: Sequence[Rewrite] = (),
    replies: Sequence[Rewrite] = (),
    overdue_too: bool = False,
) -> Tables:
    """The timeouts of one endpoint, or of all. Raises ImportImpossible."""
    return Tables(
        NHIBERNATE,
        database_url(url),
        patterns or NHIBERNATE_TABLES,
        _NHIBERNATE,
        meant,
        schema=schema,
        endpoint=endpoint,
        rewrites=rewrites,
        replies=replies,
        overdue_too=overdue_too,
    )
