"""The snapshot that every task reads, held by a connection of the driver for as long as the reading takes, no longer.

A snapshot that is held keeps the database from cleaning up what was deleted since, in the tables that releases live on.
So the job extracts first, lets go, and works on what it has.

Beside the snapshot the connection holds the weakest of locks on the tables, as pg_dump does: a partition that is
dropped in the middle, or a table that VACUUM FULL writes anew, would be missing from the extract or be in it twice.
Daemons are used to that: dropping and making partitions wait their turn and are tried again (store/partitions.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import asyncpg

from delayer.audit import libpq
from delayer.audit.frames import Facts
from delayer.core.secret import SecretUrl
from delayer.store import damaged, partitions, schema, session
from delayer.store.errors import DAMAGED, translated

_MORE: Final = {
    "statement_timeout": "0",
    "idle_session_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "lock_timeout": "30s",
}
_LOCK: Final = "LOCK TABLE message, held, message_key, lane, counter, segment, segment_cancelled IN ACCESS SHARE MODE"
_EXPORT: Final = """
SELECT pg_export_snapshot() AS id, clock_timestamp() AS now_ms, pg_is_in_recovery() AS replica,
       current_setting('server_version') AS server
"""
# While a replica streams, and has replayed all that it received, it is up to date. Otherwise it has come as far as the
# last commit that it replayed, or the checkpoint that it started from.
_COME_TO: Final = """
SELECT CASE
    WHEN pg_last_wal_receive_lsn() <= pg_last_wal_replay_lsn()
        AND (SELECT coalesce(status, 'streaming') = 'streaming' FROM pg_stat_wal_receiver)
    THEN clock_timestamp()
    ELSE coalesce(pg_last_xact_replay_timestamp(), (SELECT checkpoint_time FROM pg_control_checkpoint()))
END
"""
_LANES: Final = """
SELECT l.number, l.epoch, l.owner, l.watermark,
       CASE WHEN pg_is_in_recovery() THEN NULL ELSE EXISTS (
           SELECT FROM pg_locks AS k
           WHERE k.locktype = 'advisory' AND k.granted AND k.objsubid = 2
             AND k.database = (SELECT oid FROM pg_database WHERE datname = current_database())
             AND k.classid = 'lane'::regclass AND k.objid = l.number::int::oid
       ) END AS alive
FROM lane AS l
ORDER BY l.number
"""
_COUNTERS: Final = "SELECT lane, kind, n FROM counter ORDER BY lane, kind"
_PARTITIONS: Final = """
SELECT c.relname::text, pg_table_size(c.oid)
FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
WHERE i.inhparent = 'message'::regclass
ORDER BY c.relname
"""

Rows = list[tuple[Any, ...]]


class Snapshot:
    """An exported snapshot, and what the driver itself reads on it: tables of a few rows. Made by :func:`hold`."""

    def __init__(
        self, url: SecretUrl, connection: asyncpg.Connection, runner: asyncio.Runner, id_: str, facts: Facts
    ) -> None:
        self._url = url
        self._connection = connection
        self._runner = runner
        self.id = id_
        self.facts = facts

    def lanes(self) -> Rows:
        """The rows of frames.SCHEMAS["lanes"]. Raises StoreLost, as the others do."""
        return self._fetch("read the lanes", _LANES)

    def counters(self) -> Rows:
        """The rows of frames.SCHEMAS["counters"]."""
        return self._fetch("read the counters", _COUNTERS)

    def partitions(self) -> Rows:
        """The rows of frames.SCHEMAS["partitions"]."""
        return [(name, *_day(name), size) for name, size in self._fetch("list the partitions", _PARTITIONS)]

    def sizes(self, tables: Sequence[str]) -> dict[str, int]:
        """Bytes of these tables that rows may lie in; 0 is empty for certain."""
        sql = "SELECT name, pg_relation_size(name::regclass) FROM unnest($1::text[]) AS name"
        return dict(self._fetch("look at the tables' sizes", sql, list(tables)))

    def _fetch(self, doing: str, sql: str, *arguments: object) -> Rows:
        async def fetch() -> Rows:
            with translated(doing):
                try:
                    return [tuple(row) for row in await self._connection.fetch(sql, *arguments, timeout=None)]
                except DAMAGED as error:
                    raise await damaged.lost(self._url.reveal(), doing, error) from error

        return self._runner.run(fetch())


@contextmanager
def hold(url: SecretUrl) -> Iterator[Snapshot]:
    """Take the snapshot and keep it until the end of the block. Blocks; not for a thread with a running loop.

    Raises StoreLost, BadStoreUrl, SchemaOutdated.
    """
    with asyncio.Runner() as runner:
        connection = runner.run(_open(url))
        try:
            yield Snapshot(url, connection, runner, *runner.run(_take(connection)))
        finally:
            runner.run(session.close(connection))


async def _open(url: SecretUrl) -> asyncpg.Connection:
    return await session.connect(url.reveal(), "delayer audit snapshot", _MORE)


async def _take(connection: asyncpg.Connection) -> tuple[str, Facts]:
    with translated("take a snapshot"):
        await schema.check(connection)
        await connection.execute(libpq.NO_TIMEOUT.format("false"))
        await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        await connection.execute(_LOCK)  # before the snapshot, so that no partition goes in between
        id_, now_ms, replica, server = await connection.fetchrow(_EXPORT)
        at_ms = min(now_ms, await connection.fetchval(_COME_TO)) if replica else now_ms
    return id_, Facts(at_ms, replica=replica, server=server, behind_ms=now_ms - at_ms)


def _day(partition: str) -> tuple[int | None, int | None]:
    """The interval of due instants of a partition, epoch ms."""
    day = partitions.day_of(partition)
    return (None, None) if day is None else (day * partitions.DAY_MS, (day + 1) * partitions.DAY_MS)
