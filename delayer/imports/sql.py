"""Sources `nservicebus-sql` (SQL Persistence: a table for each endpoint) and `nservicebus-nhibernate` (one for all).

*Staging* moves the chosen rows of each table into a staging table beside it, in one transaction. From then on no
timeout manager sees them. The run reads the staging tables in the order of due instants. It deletes the rows of a batch
after the store has committed them, and drops the empty tables at the end.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from itertools import chain, islice
from typing import Any, Final

from sqlalchemy import Connection, MetaData, Select, Table, delete, func, inspect, literal_column, select
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.schema import DropTable

from delayer.core.importing import (
    REPLIES,
    SOON_MS,
    ImportBatch,
    ImportItem,
    ImportSelection,
    Left,
    Phase,
    Rewrite,
    Run,
    Survey,
    given,
    rewriting,
)
from delayer.core.message import Target
from delayer.imports.databases import Database, database_url
from delayer.imports.state_machine import CountMismatch, ImportImpossible
from delayer.imports.timeout_table import DuePlace, RowFilter, TimeoutTable, staged_beside, staged_token
from delayer.imports.timeouts import StoredTimeout, epoch_ms, item_of, moment_of, problem_of

TABLES: Final[Mapping[str, Sequence[str]]] = {
    "nservicebus-sql": ("*TimeoutData",),
    # NHibernate quotes no name, so PostgreSQL folds these to lower case.
    "nservicebus-nhibernate": ("TimeoutEntity", "timeoutentity"),
}
"""The sources, and the patterns of their tables."""
CLOCKS: Final = {"postgresql": "timezone('UTC', clock_timestamp())", "mssql": "sysutcdatetime()"}
"""By dialect: the clock of the database, in UTC without a zone."""
MYSQL_CLOCK: Final = "utc_timestamp(3)"
BATCH: Final = 2_000
BATCH_BYTES: Final = 8 << 20
READ_BYTES: Final = 32 << 20
"""Bytes of the rows that are in memory, of all tables together; more only where a single row is larger."""
SOON: Final = "due within a minute, or overdue: a timeout manager may have them in hand (--overdue-too takes them)"
NO_TIME: Final = "without a due time"


def write_places(places: Mapping[str, DuePlace]) -> str:
    """The places as JSON, by the names of the tables. A uuid becomes an object, because JSON has no uuids."""
    said = {
        name: [due.isoformat(), {"uuid": str(id_)} if isinstance(id_, uuid.UUID) else id_]
        for name, (due, id_) in places.items()
    }
    return json.dumps(said, sort_keys=True)


def read_places(text: str | None) -> dict[str, DuePlace]:
    """Read the text of :func:`write_places`; None means no places."""
    return {
        name: (datetime.fromisoformat(due), uuid.UUID(id_["uuid"]) if isinstance(id_, dict) else id_)
        for name, (due, id_) in json.loads(text or "{}").items()
    }


async def merged(streams: Sequence[AsyncIterator[Any]]) -> AsyncIterator[tuple[int, Any]]:
    """The rows of several streams in the order of their due instants (column 3), each with its stream's number."""
    heads = []
    for number, stream in enumerate(streams):
        if (row := await anext(stream, None)) is not None:
            heads.append((row[3], number, row))
    heapq.heapify(heads)
    while heads:
        _, number, row = heads[0]
        yield number, row
        if (row := await anext(streams[number], None)) is None:
            heapq.heappop(heads)
        else:
            heapq.heapreplace(heads, (row[3], number, row))


@dataclass(eq=False, repr=False, kw_only=True)
class SqlTimeouts:
    """Satisfies ImportSource, for the tables that match ``patterns``. ``overdue_too``: choose soon and overdue
    rows too, because no timeout manager runs any more. ``replies`` rename reply addresses. Soon: due within
    ``soon_ms`` from now."""

    name: str
    url: str
    patterns: Sequence[str]
    meant: ImportSelection
    schema: str | None = None
    endpoint: str | None = None
    replies: Sequence[Rewrite] = ()
    overdue_too: bool = False
    soon_ms: int = SOON_MS

    def __post_init__(self) -> None:
        self.patterns = self.patterns or TABLES[self.name]
        self._database = Database(database_url(self.url))
        self._staged: list[TimeoutTable] = []
        self._removed: dict[str, DuePlace] = {}
        self._batches: AsyncGenerator[ImportBatch] | None = None

    @property
    def parameters(self) -> dict[str, object]:
        database, tables = self._database.shown, list(self.patterns)
        said = given(
            database=database, tables=tables, overdue_too=self.overdue_too, schema=self.schema, endpoint=self.endpoint
        )
        return said | rewriting(self.replies, REPLIES) | self.meant.as_dict()

    async def survey(self, unfinished: Run | None = None) -> Survey:
        """See Source. The survey reads every row, because only its headers tell whether it would be held."""
        survey = Survey()
        async with self._database.connected() as connection:
            tables = await self._tables(connection, "" if unfinished is None else unfinished.token)
            there = await connection.run_sync(self._names)
            if unfinished is None:
                for name in chain.from_iterable(staged_beside(one.name, there) for one in tables):
                    rows = select(func.count()).select_from(Table(name, MetaData(), schema=self.schema))
                    if (await connection.execute(rows)).scalar_one():
                        raise ImportImpossible(
                            f"table {name} holds timeouts of another store's import: finish or abort that one"
                        )
            else:
                for one in tables:
                    if one.staged.name in there:
                        await self._look(connection, one, one.staged, one.look_at(one.staged), survey)
                if survey.messages:  # The move is one transaction, so either all rows are staged or none.
                    survey.remarks.append("these are messages that the interrupted run staged and did not remove yet")
                if survey.messages or unfinished.phase is Phase.RUNNING:
                    return survey
            pick = await self._pick(connection, self.soon_ms)
            shares = await self._shares(connection, tables, pick)
            meant = 0
            for one in tables:
                await self._look(connection, one, one.source, one.looks(pick, shares.get(one.name)), survey)
                meant += await self._leave_others(connection, one, pick, survey)
            if self.meant.limit is not None:
                survey.leave(Left.BEYOND_LIMIT, max(meant - self.meant.limit, 0))
        survey.remarks.append(f"tables: {', '.join(one.name for one in tables)}")
        return survey

    async def stage(self, run: Run) -> int:
        async with self._database.connected() as connection:
            # Otherwise MySQL would lock every index to its end, and no timeout manager could store a timeout.
            await connection.execution_options(isolation_level="READ COMMITTED")
            tables = await self._tables(connection, run.token)
            there = await connection.run_sync(self._names)
            for one in tables:
                if one.staged.name not in there:
                    for statement in one.create(connection.dialect):
                        await connection.exec_driver_sql(statement)
            await connection.commit()
            staged = await self._count(connection, tables)
            await connection.commit()
            return staged or await self._move(connection, tables)

    async def resume(self, run: Run) -> None:
        """See Source. A table without a staging table is read to its end, or did not exist at the beginning."""
        async with self._database.connected() as connection:
            there = await connection.run_sync(self._names)
            tables = await self._tables(connection, run.token)
            self._staged = [one for one in tables if one.staged.name in there]
            places = read_places(run.progress)
            self._removed = {one.name: places[one.name] for one in self._staged if one.name in places}
            for one in self._staged:
                if one.name in places:
                    await connection.execute(one.remove(places[one.name]))
            await connection.commit()

    async def next_batch(self) -> ImportBatch | None:
        if self._batches is None:
            self._batches = self._read()
        return await anext(self._batches, None)

    async def _read(self) -> AsyncGenerator[ImportBatch]:
        """The staged rows, the soonest due first."""
        tables, upto = self._staged, dict(self._removed)
        items: list[ImportItem] = []
        size = 0
        async with self._database.connected() as connection:
            # Otherwise a transaction would stay open for the whole run.
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            streams = [self._rows(connection, one, upto.get(one.name)) for one in tables]
            async for number, row in merged(streams):
                items.append(self._item(row))
                upto[tables[number].name] = (row[3], row[0])
                size += len(row[2] or b"")
                if len(items) >= BATCH or size >= BATCH_BYTES:
                    yield ImportBatch(items, write_places(upto))
                    items, size = [], 0
        if items:
            yield ImportBatch(items, write_places(upto))

    async def _rows(self, connection: AsyncConnection, one: TimeoutTable, after: DuePlace | None) -> AsyncIterator[Any]:
        """The staged rows of one table behind ``after``, read by portions that fit into memory."""
        share = len(self._staged)
        limit = await self._fitting(connection, one, one.staged, "state", "headers", share=share)
        while found := (await connection.execute(one.batch(limit, after))).all():
            for row in found:
                yield row
            after = (found[-1][3], found[-1][0])

    async def remove(self, batch: ImportBatch) -> int:
        removed = 0
        upto = read_places(batch.progress)
        async with self._database.connected() as connection:
            for one in self._staged:
                place, before = upto.get(one.name), self._removed.get(one.name)
                if place is not None and place != before:
                    removed += (await connection.execute(one.remove(place, before))).rowcount
            await connection.commit()
        self._removed = upto
        return removed

    async def finish(self) -> dict[str, int]:
        left = Survey()
        async with self._database.connected() as connection:
            if count := await self._count(connection, self._staged):
                raise CountMismatch(f"{count} staged timeouts are left")
            await self._drop(connection)
            pick = await self._pick(connection, self.soon_ms)
            for one in await self._tables(connection, ""):
                await self._leave_others(connection, one, pick, left)
        return left.left

    async def put_back(self, run: Run) -> int:
        await self.resume(run)
        back = 0
        async with self._database.connected() as connection:
            for one in self._staged:
                back += (await connection.execute(one.give_back())).rowcount
                await connection.execute(delete(one.staged))
            await connection.commit()
            await self._drop(connection)
        return back

    async def close(self) -> None:
        if self._batches is not None:
            await self._batches.aclose()
        await self._database.close()

    def _names(self, connection: Connection) -> list[str]:
        return sorted(inspect(connection).get_table_names(schema=self.schema))

    async def _tables(self, connection: AsyncConnection, token: str) -> list[TimeoutTable]:
        """The tables that match, as the database has them. Raises ImportImpossible if there are none."""
        names = await connection.run_sync(self._names)
        found = [
            name
            for name in names
            if not staged_token(name) and any(fnmatchcase(name, pattern) for pattern in self.patterns)
        ]
        if not found:
            raise ImportImpossible(
                f"no table matches {', '.join(self.patterns)}: found {', '.join(names[:20]) or 'no table at all'}"
            )
        metadata = MetaData(schema=self.schema)
        await connection.run_sync(lambda sync: metadata.reflect(sync, only=found, resolve_fks=False))
        tables = sorted(metadata.tables.values(), key=lambda one: one.name)
        return [TimeoutTable(one, token, self.endpoint) for one in tables]

    async def _count(self, connection: AsyncConnection, tables: Sequence[TimeoutTable]) -> int:
        """The number of staged rows."""
        counts = [select(func.count()).select_from(one.staged) for one in tables]
        return sum([(await connection.execute(one)).scalar_one() for one in counts])

    async def _drop(self, connection: AsyncConnection) -> None:
        for one in self._staged:
            await connection.execute(DropTable(one.staged))
        await connection.commit()

    async def _pick(self, connection: AsyncConnection, ahead_ms: int) -> RowFilter:
        """The filter of the chosen rows. By the database's clock none of them is due within ``ahead_ms``."""
        after = None
        if not self.overdue_too:
            clock: Select[Any] = select(literal_column(CLOCKS.get(connection.dialect.name, MYSQL_CLOCK)))
            now: datetime = (await connection.execute(clock)).scalar_one()
            after = now + timedelta(milliseconds=ahead_ms)
        cutoff_ms = self.meant.cutoff_ms
        return RowFilter(after, None if cutoff_ms is None else moment_of(cutoff_ms))

    async def _shares(
        self, connection: AsyncConnection, tables: Sequence[TimeoutTable], pick: RowFilter
    ) -> dict[str, int]:
        """The numbers of rows in each table among the ``limit`` soonest; empty without a limit."""
        limit = self.meant.limit
        if limit is None:
            return {}
        dues = [[(due, one.name) for (due,) in await connection.execute(one.dues(pick, limit))] for one in tables]
        shares = dict.fromkeys((one.name for one in tables), 0)
        for _, name in islice(heapq.merge(*dues), limit):
            shares[name] += 1
        return shares

    async def _move(self, connection: AsyncConnection, tables: Sequence[TimeoutTable]) -> int:
        """Move the chosen rows in one transaction. A timeout manager reads without locks and sees all of them until the
        commit. So none of them may be due by then."""
        ahead_ms = self.soon_ms
        for _ in range(3):
            began = time.monotonic()
            moved = await self._moved(connection, tables, await self._pick(connection, ahead_ms))
            took_ms = int((time.monotonic() - began) * 1000)
            if self.overdue_too or took_ms <= ahead_ms - self.soon_ms // 2:
                await connection.commit()
                return moved
            await connection.rollback()
            ahead_ms = self.soon_ms + 3 * took_ms
        raise ImportImpossible(
            "the move of the timeouts took too long 3 times, because some would be due before its end: nothing is "
            "moved. Next: take fewer at a time (--limit, --table), or stop the timeout managers and say --overdue-too"
        )

    async def _moved(self, connection: AsyncConnection, tables: Sequence[TimeoutTable], pick: RowFilter) -> int:
        """Move the rows without a commit. Returns their number. Raises CountMismatch."""
        shares = await self._shares(connection, tables, pick)
        moved = 0
        for one in tables:
            copied = (await connection.execute(one.take(pick, shares.get(one.name)))).rowcount
            deleted = (await connection.exec_driver_sql(one.forget(connection.dialect))).rowcount
            if copied != deleted:
                raise CountMismatch(
                    f"table {one.name}: {copied} timeouts were copied, but {deleted} deleted: nothing is moved"
                )
            moved += copied
        return moved

    async def _look(
        self, connection: AsyncConnection, one: TimeoutTable, table: Table, rows: Select[Any], survey: Survey
    ) -> None:
        """Count these rows of ``table`` in ``survey``, with the reason if one would be held."""
        at_once = await self._fitting(connection, one, table, "headers")
        async with connection.stream(rows.execution_options(yield_per=at_once)) as found:
            async for some in found.partitions():
                for destination, due, headers in some:
                    target = self._target(destination or "")
                    survey.add(target, epoch_ms(due), problem=problem_of(headers, target.routing_key))
                await asyncio.sleep(0)  # Let heartbeats and signals be served.

    async def _fitting(
        self, connection: AsyncConnection, one: TimeoutTable, table: Table, *names: str, share: int = 1
    ) -> int:
        """The number of rows to read at once, so that these columns fit into a share of the memory for all tables."""
        largest = (await connection.execute(one.largest(connection.dialect, table, *names))).scalar_one() or 1
        return max(min(BATCH, READ_BYTES // share // largest), 1)

    async def _leave_others(
        self, connection: AsyncConnection, one: TimeoutTable, pick: RowFilter, survey: Survey
    ) -> int:
        """Count the rows that stay in ``survey``, with their reasons. Returns the number of chosen rows."""
        meant, *others = (await connection.execute(one.others(pick))).one()
        for why, count in zip((NO_TIME, Left.BEFORE_CUTOFF, SOON), others, strict=True):
            survey.leave(why, count)
        return int(meant)

    def _target(self, destination: str) -> Target:
        return self.meant.retargeted(Target(b"", destination.encode("utf-8", "surrogateescape")))

    def _item(self, row: Any) -> ImportItem:
        id_, destination, state, due, headers = row
        timeout = StoredTimeout(str(id_), destination or "", epoch_ms(due), headers, bytes(state or b""))
        return item_of(timeout, self.name.encode(), self._target(timeout.address).routing_key, self.replies)
