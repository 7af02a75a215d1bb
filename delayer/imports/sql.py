"""Sources `nservicebus-sql` (SQL Persistence: a table per endpoint) and `nservicebus-nhibernate` (one for all).

*Staging* moves each table's chosen rows into a staging table, in one transaction, which hides them from timeout
managers. The run reads the staging tables in order of due instants, deletes a batch's rows once the store has committed
them, and finally drops the empty tables.
"""

from __future__ import annotations

import heapq
import json
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from itertools import chain, islice
from operator import itemgetter
from typing import Any, Final

from sqlalchemy import MetaData, Select, Table, delete, func, inspect, literal_column, select
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.schema import DropTable

from delayer.core.importing import SOON_MS, ImportBatch, ImportSelection, Left, Phase, Run, Survey, given
from delayer.core.message import Target
from delayer.imports.databases import Database, database_url
from delayer.imports.state_machine import CountMismatch, ImportImpossible
from delayer.imports.timeout_table import DuePlace, RowFilter, TimeoutTable, staged_beside, staged_token
from delayer.imports.timeouts import StoredTimeout, epoch_ms, item_of, misnamed, moment_of

TABLES: Final[Mapping[str, Sequence[str]]] = {
    "nservicebus-sql": ("*TimeoutData",),
    # NHibernate does not quote names, so PostgreSQL folds these to lower case.
    "nservicebus-nhibernate": ("TimeoutEntity", "timeoutentity"),
}
"""The sources, and the patterns of their tables."""
CLOCKS: Final = {"postgresql": "timezone('UTC', clock_timestamp())", "mssql": "sysutcdatetime()"}
"""By dialect: the database's clock, in UTC without a zone."""
MYSQL_CLOCK: Final = "utc_timestamp(3)"
BATCH: Final = 2_000
BATCH_BYTES: Final = 8 << 20


def write_places(places: Mapping[str, DuePlace]) -> str:
    """Format the places as JSON, by table name. A uuid becomes an object, because JSON has no uuids."""
    said = {
        name: [due.isoformat(), {"uuid": str(id_)} if isinstance(id_, uuid.UUID) else id_]
        for name, (due, id_) in places.items()
    }
    return json.dumps(said, sort_keys=True)


def read_places(text: str | None) -> dict[str, DuePlace]:
    """Parse the result of :func:`write_places`; None means no places."""
    return {
        name: (datetime.fromisoformat(due), uuid.UUID(id_["uuid"]) if isinstance(id_, dict) else id_)
        for name, (due, id_) in json.loads(text or "{}").items()
    }


@dataclass(eq=False, repr=False, kw_only=True)
class SqlTimeouts:
    """Satisfies ImportSource for the tables that match ``patterns``. ``overdue_too``: also choose rows overdue or due
    within ``soon_ms`` from now, because no timeout manager runs any more."""

    name: str
    url: str
    patterns: Sequence[str]
    meant: ImportSelection
    schema: str | None = None
    endpoint: str | None = None
    overdue_too: bool = False
    soon_ms: int = SOON_MS

    def __post_init__(self) -> None:
        self.patterns = self.patterns or TABLES[self.name]
        self._database = Database(database_url(self.url))
        self._staged: list[TimeoutTable] = []
        self._removed: dict[str, DuePlace] = {}

    @property
    def parameters(self) -> dict[str, object]:
        database, tables = self._database.shown, list(self.patterns)
        said = given(
            database=database, tables=tables, overdue_too=self.overdue_too, schema=self.schema, endpoint=self.endpoint
        )
        return said | self.meant.as_dict()

    async def survey(self, unfinished: Run | None = None) -> Survey:
        """See ImportSource. Counts rows by destination, without reading headers or bodies."""
        survey = Survey()
        async with self._database.connected() as connection:
            tables, there = await self._tables(connection, "" if unfinished is None else unfinished.token)
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
                        await self._look(connection, one.goals(one.staged), survey)
                if survey.messages:  # The move is one transaction, so either all rows are staged or none.
                    survey.remarks.append("these are messages that the interrupted run staged and did not remove yet")
                if survey.messages or unfinished.phase is Phase.RUNNING:
                    return survey
            pick = await self._pick(connection, self.soon_ms)
            shares = await self._shares(connection, tables, pick)
            meant = 0
            for one in tables:
                goals = one.goals(one.source, *one.meant(pick), limit=shares[one.name])
                await self._look(connection, goals, survey)
                meant += await self._leave_others(connection, one, pick, survey)
            if self.meant.limit is not None:
                survey.leave(Left.BEYOND_LIMIT, max(meant - self.meant.limit, 0))
        survey.remarks.append(f"tables: {', '.join(one.name for one in tables)}")
        return survey

    async def stage(self, run: Run) -> int:
        async with self._database.connected() as connection:
            # Otherwise MySQL would lock every index to its end, and timeout managers could not store timeouts.
            await connection.execution_options(isolation_level="READ COMMITTED")
            tables, there = await self._tables(connection, run.token)
            for one in tables:
                if one.staged.name not in there:
                    for statement in one.create(connection.dialect):
                        await connection.exec_driver_sql(statement)
            await connection.commit()
            staged = await self._count(connection, tables)
            await connection.commit()
            return staged or await self._move(connection, tables)

    async def resume(self, run: Run) -> None:
        """See ImportSource. A table without a staging table is read to its end, or did not exist when the run began."""
        async with self._database.connected() as connection:
            tables, there = await self._tables(connection, run.token)
        self._staged = [one for one in tables if one.staged.name in there]
        self._removed = {}
        await self._remove(read_places(run.progress))

    async def next_batch(self) -> ImportBatch | None:
        """See ImportSource. The sizes of each table's soonest rows decide which of them fit one batch."""
        places = dict(self._removed)
        rows: list[Any] = []
        async with self._database.connected() as connection:
            sizes = {one.name: one.sizes(connection.dialect, BATCH, places.get(one.name)) for one in self._staged}
            shares: Counter[str] = Counter()
            size = 0
            for _, name, row_size in islice(await self._soonest(connection, sizes), BATCH):
                shares[name] += 1
                size += row_size
                if size >= BATCH_BYTES:
                    break
            for one in self._staged:
                if shares[one.name]:
                    rows += await connection.execute(one.batch(shares[one.name], places.get(one.name)))
                    places[one.name] = (rows[-1][3], rows[-1][0])
        if not rows:
            return None
        rows.sort(key=lambda row: row[3])
        timeouts = [
            StoredTimeout(str(id_), destination or "", epoch_ms(due), headers, bytes(state or b""))
            for id_, destination, state, due, headers in rows
        ]
        items = [item_of(one, self.name.encode(), self.meant) for one in timeouts]
        return ImportBatch(items, write_places(places))

    async def remove(self, batch: ImportBatch) -> int:
        return await self._remove(read_places(batch.progress))

    async def _remove(self, upto: dict[str, DuePlace]) -> int:
        """Delete the staged rows up to these places. Returns their number."""
        removed = 0
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
            tables, _ = await self._tables(connection, "")
            for one in tables:
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
        await self._database.close()

    async def _tables(self, connection: AsyncConnection, token: str) -> tuple[list[TimeoutTable], list[str]]:
        """Return the matching tables as defined, and all table names. Raises ImportImpossible if none matches."""
        names = sorted(await connection.run_sync(lambda sync: inspect(sync).get_table_names(schema=self.schema)))
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
        return [TimeoutTable(one, token, self.endpoint) for one in tables], names

    async def _count(self, connection: AsyncConnection, tables: Sequence[TimeoutTable]) -> int:
        """Count the staged rows."""
        counts = [select(func.count()).select_from(one.staged) for one in tables]
        return sum([(await connection.execute(one)).scalar_one() for one in counts])

    async def _drop(self, connection: AsyncConnection) -> None:
        for one in self._staged:
            await connection.execute(DropTable(one.staged))
        await connection.commit()

    async def _pick(self, connection: AsyncConnection, ahead_ms: int) -> RowFilter:
        """Build the filter of chosen rows: by the database's clock, none of them is due within ``ahead_ms``."""
        after = None
        if not self.overdue_too:
            clock: Select[Any] = select(literal_column(CLOCKS.get(connection.dialect.name, MYSQL_CLOCK)))
            now: datetime = (await connection.execute(clock)).scalar_one()
            after = now + timedelta(milliseconds=ahead_ms)
        cutoff_ms = self.meant.cutoff_ms
        return RowFilter(after, None if cutoff_ms is None else moment_of(cutoff_ms))

    async def _shares(
        self, connection: AsyncConnection, tables: Sequence[TimeoutTable], pick: RowFilter
    ) -> Mapping[str, int | None]:
        """Count each table's rows among the ``limit`` soonest; None without a limit."""
        limit = self.meant.limit
        if limit is None:
            return dict.fromkeys([one.name for one in tables])
        dues = await self._soonest(connection, {one.name: one.dues(pick, limit) for one in tables})
        return Counter(name for _, name in islice(dues, limit))

    async def _soonest(self, connection: AsyncConnection, queries: Mapping[str, Select[Any]]) -> Iterator[Any]:
        """Merge the queries' rows by their first column, the due instant, and insert the table's name as the second."""
        found = [
            [(due, name, *more) for due, *more in await connection.execute(query)] for name, query in queries.items()
        ]
        return heapq.merge(*found, key=itemgetter(0))

    async def _move(self, connection: AsyncConnection, tables: Sequence[TimeoutTable]) -> int:
        """Move the chosen rows in one transaction. A timeout manager reads without locks and sees them until the
        commit, so none of them may be due by then."""
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
            "moved. Next: take fewer at a time (--limit, --table), or stop the timeout managers and use --overdue-too"
        )

    async def _moved(self, connection: AsyncConnection, tables: Sequence[TimeoutTable], pick: RowFilter) -> int:
        """Move the rows without committing. Returns their number. Raises CountMismatch."""
        shares = await self._shares(connection, tables, pick)
        moved = 0
        for one in tables:
            copied = (await connection.execute(one.take(pick, shares[one.name]))).rowcount
            deleted = (await connection.exec_driver_sql(one.forget(connection.dialect))).rowcount
            if copied != deleted:
                raise CountMismatch(
                    f"table {one.name}: {copied} timeouts were copied, but {deleted} deleted: nothing is moved"
                )
            moved += copied
        return moved

    async def _look(self, connection: AsyncConnection, goals: Select[Any], survey: Survey) -> None:
        """Count the rows of each destination in ``survey``."""
        async with connection.stream(goals) as found:
            async for destination, messages, first_due, last_due in found:
                target = self.meant.retargeted(Target(b"", (destination or "").encode("utf-8", "surrogateescape")))
                hold = misnamed(target.routing_key)
                problem = "" if hold is None else hold.text
                survey.add(target, epoch_ms(first_due), problem, messages=messages, last_due_ms=epoch_ms(last_due))

    async def _leave_others(
        self, connection: AsyncConnection, one: TimeoutTable, pick: RowFilter, survey: Survey
    ) -> int:
        """Count in ``survey`` the rows that stay, by reason. Returns the number of chosen rows."""
        meant = 0
        for why, count in await connection.execute(one.reasons(pick)):
            if why:
                survey.leave(why, count)
            else:
                meant = count
        return meant
