"""Rejects servers that cannot hold a lane, and databases that cannot hold every text.

A lane is a lock of one session, and its owner writes rows. A hold reason contains the names of exchanges and queues, in
any script, and only the encoding UTF8 covers all of them. PgBouncer's transaction and statement modes spread a client's
statements over several sessions, and share sessions between clients. CockroachDB's advisory locks lock nothing.
YugabyteDB has no LOCK TABLE; its newest releases, with advisory locks, were not tried. A standby rejects writes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

import structlog
from asyncpg import Connection

from delayer.core.clocks import FOLLOW_TIME, ClockOffset, differences
from delayer.core.errors import StoreLost
from delayer.core.secret import SecretUrl
from delayer.store import hosts, pool
from delayer.store.errors import StoreUnfit, translate_errors

log = structlog.get_logger(__name__)

RELOAD: Final = "as Postgres's superuser: ALTER SYSTEM SET {} = on, and SELECT pg_reload_conf()"
_OTHER_DATABASES: Final = {"CockroachDB": "CockroachDB", "-YB-": "YugabyteDB"}
"""Other databases that speak PostgreSQL's protocol, by a part of their version's text."""
_IDENTITY: Final = "SELECT pg_backend_pid(), version(), pg_is_in_recovery(), current_setting('server_encoding')"


async def check(url: str) -> None:
    """Raises StoreUnfit for a server or database that cannot hold a store, StoreLost, BadStoreUrl."""
    async with _session(url) as first:
        pid, version, standby, encoding = await _identity(first)
        for part, name in _OTHER_DATABASES.items():
            if part in version:
                raise _unfit(url, "PostgreSQL", name, "point store.url at PostgreSQL itself")
        if standby == "t":
            advice = "point store.url at the primary; a URL of several hosts needs target_session_attrs=primary"
            raise StoreLost(f"{SecretUrl(url)}: expected a primary, found a standby", advice)
        if encoding != "UTF8":
            advice = "as Postgres's superuser: createdb -E UTF8 -T template0 --locale C -O ROLE DATABASE"
            raise _unfit(url, "a database with the encoding UTF8", encoding, advice)
        if pid != str(first.get_server_pid()):  # A pooler answered the login, with its own number.
            async with _session(url) as second:
                await _check_pooler(url, pid, first, second)


async def _check_pooler(url: str, pid: str, first: Connection, second: Connection) -> None:
    """Raise StoreUnfit if two clients share sessions. If a pooler hands out the latest idle session, both clients get
    one session; if it rotates, one client gets several. Other clients may hide this in one round."""
    for _ in range(3):
        of_second = {(await _identity(second))[0] for _ in range(2)}
        of_first = {pid, (await _identity(first))[0]}
        if len(of_first) > 1 or len(of_second) > 1 or of_first & of_second:
            found = "a connection pooler that shares sessions (PgBouncer in transaction or statement mode)"
            advice = "set pool_mode = session in the pooler, or point store.url at Postgres itself"
            raise _unfit(url, "a session for each connection", found, advice)


def _unfit(url: str, expected: str, found: str, advice: str) -> StoreUnfit:
    return StoreUnfit(f"{SecretUrl(url)}: expected {expected}, found {found}", advice)


class ServerState(NamedTuple):
    """``unsafe``: settings that are off, so that a crash of the machine loses or damages what was committed. Our
    sessions set ``synchronous_commit`` themselves (pool.py)."""

    unsafe: list[str]
    clock: ClockOffset

    @property
    def advice(self) -> str:
        return "; ".join(map(RELOAD.format, self.unsafe))


_STATE: Final = """
SELECT extract(epoch FROM clock_timestamp())::float8,
       ARRAY(SELECT name FROM pg_settings WHERE name IN ('fsync', 'full_page_writes') AND setting = 'off')
"""


async def state(connection: Connection) -> ServerState:
    """Raises the driver's errors."""
    asked = time.time()
    stated, unsafe = await connection.fetchrow(_STATE)
    return ServerState(unsafe, ClockOffset.of_answer(asked, stated, time.time()))


def warn(state: ServerState) -> None:
    """Log the settings that a daemon should not run with for long."""
    if state.unsafe:
        log.warning("store not durable", off=state.unsafe, next_step=state.advice)
    for different in differences({"this machine": ClockOffset(), "the database": state.clock}):
        log.warning("clocks differ", reason=different, next_step=FOLLOW_TIME)


@asynccontextmanager
async def _session(url: str) -> AsyncIterator[Connection]:
    """A connection without settings, because other clients of a pooler would get them too."""
    with pool.translate_connect_errors():
        connection = await hosts.connect(url, timeout=pool.CONNECT_SECONDS, command_timeout=pool.CONNECT_SECONDS)
    try:
        with translate_errors("look at the server"):
            yield connection
    finally:
        await pool.close(connection)


async def _identity(connection: Connection) -> list[str]:
    """The session's process, the server's version, "t" on a standby, the database's encoding. COPY needs no prepared
    statement, which a pooler may look for in another session."""
    told = bytearray()

    async def keep(data: bytes) -> None:
        told.extend(data)

    await connection.copy_from_query(_IDENTITY, output=keep)
    return told.decode().rstrip().split("\t")
