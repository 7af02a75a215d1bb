"""Keeps the answer to each HTTP request with an Idempotency-Key for a day, so that repeats do not take effect again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from asyncpg import Connection, Pool

from delayer.core.faultpoint import reach
from delayer.store import pool, schema
from delayer.store.errors import translate_errors

KEPT: Final = "1 day"
MOST_ATTEMPTS: Final = 4
"""Maximum number of concurrent attempts of one HTTP server."""
_LOCK: Final = "SELECT pg_try_advisory_xact_lock('request'::regclass::oid::int, $1)"
_READ: Final = "SELECT content, answer FROM request WHERE key = $1"
_WRITE: Final = (
    "INSERT INTO request (key, content, answer) VALUES ($1, $2, $3)"
    " ON CONFLICT (key) DO UPDATE SET answer = excluded.answer, at = statement_timestamp()"
)
_FORGET: Final = f"DELETE FROM request WHERE at < statement_timestamp() - interval '{KEPT}'"


class RequestUnderWay(Exception):
    """Another attempt at this request is still running."""


class OtherRequest(Exception):
    """The key was used for a request with another content."""


@dataclass(slots=True)
class Attempt:
    """``before``: the stored answer of the last attempt, or None. ``answer``: this attempt's answer, to be stored."""

    connection: Connection
    before: str | None
    answer: str | None = None

    async def go_on(self) -> None:
        """Query the server, so that it does not end the attempt as idle. Raises the driver's errors."""
        await self.connection.fetchval("SELECT 1")


class Requests:
    """The requests of one HTTP server. ``url`` returns the store's current URL. Each attempt uses a connection of a
    pool, which opens with the first attempt. After ``idle_seconds`` without a query Postgres ends an attempt, and
    another one may begin."""

    def __init__(self, url: Callable[[], str], idle_seconds: float) -> None:
        self._url, self._idle = url, f"{idle_seconds * 1000:.0f}ms"
        self._server = pool.SameServer()
        self._opening = asyncio.Lock()
        self._pool: Pool | None = None

    @asynccontextmanager
    async def attempt(self, key: bytes, content: bytes) -> AsyncIterator[Attempt]:
        """Make one attempt at a request. ``key`` and ``content``: 32 bytes each. Only one attempt at a key runs at a
        time, and a crash ends it. Raises RequestUnderWay, OtherRequest, StoreLost, BadStoreUrl, SchemaOutdated."""
        opened = await self._opened()
        with translate_errors("keep an answer"):
            async with pool.borrow(opened) as connection, pool.transaction(connection):
                await schema.check(connection)
                if not await connection.fetchval(_LOCK, int.from_bytes(key[:4], "big", signed=True)):
                    raise RequestUnderWay
                row = await connection.fetchrow(_READ, key)
                if row is not None and row["content"] != content:
                    raise OtherRequest
                made = Attempt(connection, None if row is None else row["answer"])
                yield made
                reach("request.published")
                if made.answer is not None:
                    await connection.execute(_WRITE, key, content, made.answer)

    async def _opened(self) -> Pool:
        async with self._opening:
            if self._pool is None:
                settings = {**pool.INDEX_ONLY, "idle_in_transaction_session_timeout": self._idle}
                self._pool = await pool.open_pool(self._url, "delayer act", MOST_ATTEMPTS, settings, self._server)
            return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.terminate()


async def run_upkeep(connection: Connection) -> None:
    """Delete requests that are older than a day. Raises the driver's errors."""
    await connection.execute(_FORGET)
