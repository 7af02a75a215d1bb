"""Requests over HTTP that are to take effect once, however often they come: each with its answer, for a day."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from asyncpg import Connection

from delayer.core.faultpoint import reach
from delayer.store import pool
from delayer.store.admin.actions import change_connection

KEPT: Final = "1 day"
_LOCK: Final = "SELECT pg_try_advisory_xact_lock('request'::regclass::oid::int, $1)"
_READ: Final = "SELECT content, answer FROM request WHERE key = $1"
_WRITE: Final = (
    "INSERT INTO request (key, content, answer) VALUES ($1, $2, $3)"
    " ON CONFLICT (key) DO UPDATE SET answer = excluded.answer, at = statement_timestamp()"
)
_FORGET: Final = f"DELETE FROM request WHERE at < statement_timestamp() - interval '{KEPT}'"


class RequestUnderWay(Exception):
    """Another attempt at this request is not over."""


class OtherRequest(Exception):
    """The key stands for a request with another content."""


@dataclass(slots=True)
class Attempt:
    """``before``: the answer of the last attempt, if there was one. ``answer``: this attempt's, to be kept."""

    before: str | None
    answer: str | None = None


@asynccontextmanager
async def attempt(url: str, key: bytes, content: bytes) -> AsyncIterator[Attempt]:
    """Make one attempt at a request. ``key`` and ``content``: 32 bytes each. Nobody else makes one meanwhile, and a
    crash ends it. Raises RequestUnderWay, OtherRequest, StoreLost, BadStoreUrl, SchemaOutdated."""
    async with change_connection(url, "keep an answer") as connection, pool.transaction(connection):
        if not await connection.fetchval(_LOCK, int.from_bytes(key[:4], "big", signed=True)):
            raise RequestUnderWay
        row = await connection.fetchrow(_READ, key)
        if row is not None and row["content"] != content:
            raise OtherRequest
        made = Attempt(None if row is None else row["answer"])
        yield made
        reach("request.published")
        if made.answer is not None:
            await connection.execute(_WRITE, key, content, made.answer)


async def run_upkeep(connection: Connection) -> None:
    """Forget the requests of more than a day ago. Raises the driver's errors."""
    await connection.execute(_FORGET)
