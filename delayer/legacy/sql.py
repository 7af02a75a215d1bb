"""Sources that are tables of timeouts in a database: PostgreSQL, MySQL and MariaDB, SQL Server, by SQLAlchemy.

*Staging* moves what is meant out of reach of any timeout manager (staging.py), in one transaction, into tables that no
other run has, of whatever store; a batch is read from there, and removed when it is committed here. *put_back* moves
the rest back. So a row is at any time where it was, or staged, or in our store; after a kill between our commit and the
removal it is in both of these, and the next run removes it, by the place that was committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import URL, text

from delayer.core.importing import REPLIES, Batch, Item, Meant, Rewrite, Run, Survey, renamed, rewriting
from delayer.core.message import Target
from delayer.legacy import places
from delayer.legacy.ahead import Ahead
from delayer.legacy.databases import Database
from delayer.legacy.layout import Layout, Place
from delayer.legacy.meant import MeantTables, Wanted
from delayer.legacy.merging import Merge
from delayer.legacy.ports import CountMismatch
from delayer.legacy.staging import Staging
from delayer.legacy.surveying import Surveying, leave_others
from delayer.legacy.timeouts import Timeout, epoch_ms, item_of

BATCH: Final = 2_000
BATCH_BYTES: Final = 8 << 20
MOST_TARGETS: Final = 10_000
AT_A_STRETCH: Final = 250
"""Rows that are made messages before the loop gets its turn."""
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
            for name, place in places.read(run.progress).items():
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
