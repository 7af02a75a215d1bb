"""Transactions on a connection whose server does not answer."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import asyncpg
import pytest

from delayer.store import pool
from delayer.store.errors import REJECTED, NotificationsFull


class Silent:
    """A connection whose server does not answer ``statement``."""

    def __init__(self, statement: str, error: type[BaseException] | BaseException) -> None:
        self.said: list[str] = []
        self._statement, self._error = statement, error

    def is_in_transaction(self) -> bool:
        return "BEGIN" in self.said

    def is_closed(self) -> bool:
        return "cut" in self.said

    async def execute(self, statement: str, *_: Any) -> str:
        self.said.append(statement)
        if statement == self._statement:
            raise self._error
        return statement

    def terminate(self) -> None:
        self.said.append("cut")


@pytest.mark.parametrize("error", [TimeoutError, asyncio.CancelledError])
@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("BEGIN", ["BEGIN", "cut"]),
        ("SELECT 1", ["BEGIN", "SELECT 1", "cut"]),
        ("SAVEPOINT inner_one", ["BEGIN", "SELECT 1", "SAVEPOINT inner_one", "cut", "cut"]),
    ],
)
async def test_a_transaction_that_is_not_answered_is_cut_off(
    statement: str, said: list[str], error: type[BaseException]
) -> None:
    """Otherwise its connection would return to the pool, perhaps with an open transaction."""
    silent = Silent(statement, error)
    connection = cast(asyncpg.Connection, silent)
    with pytest.raises(error):
        async with pool.transaction(connection):
            await connection.execute("SELECT 1")
            async with pool.transaction(connection):
                await connection.execute("SELECT 2")
    assert silent.said == said


async def test_a_full_queue_of_notifications_is_no_rejection_and_is_freed_if_it_can_be() -> None:
    """Postgres does not look by itself whether the session that held it up has ended."""
    error = asyncpg.ProgramLimitExceededError("full")
    error.server_source_function = pool.NOTIFYING
    full = Silent("COMMIT", error)
    with pytest.raises(NotificationsFull):
        await pool.commit(cast(asyncpg.Connection, full))
    assert full.said == ["COMMIT", "SELECT pg_notification_queue_usage()"]
    assert not issubclass(NotificationsFull, REJECTED)
