"""Handing over: a daemon that begins asks the living for lanes that they only look after.

A lane is adopted from the dead, and given back when nothing in it is due soon. In a dense backlog something always is:
such lanes stayed with whoever adopted them, a daemon that came back found none to own and made new ones, and each
restart beside a living daemon cost a lane, that is a connection, until the backlog had run dry.

So who adopts a lane says that it is *spare*, and who finds no free lane to own asks for spare ones before making new
ones. Both are said by advisory locks beside that of the lane itself: they need no table, and go with their connection.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import asyncpg

from delayer.store import statements

SPARE: Final = 100_000
"""Added to a lane's number (at most 32,767): the second key of the lock that says that it is spare."""
WANTED: Final = 200_000
"""The same for the lock that says that somebody asks for it. sql/lanes_due.sql knows this number as well."""
SECONDS: Final = 4.0
"""How long the asker waits: a look of the owner, a slice of its rest, and the portion that it is releasing."""
LOOK_SECONDS: Final = 0.1

_TRY = "SELECT pg_try_advisory_lock('lane'::regclass::oid::int, $1)"


async def say_spare(connection: asyncpg.Connection, number: int) -> None:
    """``connection`` has just adopted lane ``number``. Raises the driver's errors."""
    await connection.fetchval(_TRY, SPARE + number)


async def keep(connection: asyncpg.Connection, number: int) -> None:
    """``connection`` looks after lane ``number`` no longer, but owns it. Raises the driver's errors."""
    await connection.fetchval("SELECT pg_advisory_unlock('lane'::regclass::oid::int, $1)", SPARE + number)


async def wanted(connection: asyncpg.Connection, numbers: Collection[int]) -> set[int]:
    """Which of the lanes ``numbers`` somebody asks for. Raises the driver's errors."""
    return set(numbers) & await _said(connection, WANTED)


async def free(connection: asyncpg.Connection, numbers: Collection[int]) -> set[int]:
    """Which of the lanes ``numbers`` nobody owns. Raises the driver's errors."""
    return set(numbers) - await _said(connection, 0)


async def ask(connection: asyncpg.Connection, count: int) -> set[int]:
    """Ask for up to ``count`` spare lanes, for as long as ``connection`` lives: their numbers, perhaps none.

    Raises the driver's errors.
    """
    mine: set[int] = set()
    for number in await _said(connection, SPARE):
        if len(mine) < count and await connection.fetchval(_TRY, WANTED + number):
            mine.add(number)
    return mine


async def _said(connection: asyncpg.Connection, offset: int) -> set[int]:
    """The lanes of which the locks at ``offset`` are held."""
    return {number for (number,) in await connection.fetch(statements.LANES_SAID, offset)}
