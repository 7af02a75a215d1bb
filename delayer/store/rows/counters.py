"""The counters of a store's messages, by lane and kind. Each transaction adds to them once, last: see keys.py."""

from __future__ import annotations

from collections import Counter

from asyncpg import Connection

from delayer.store import statements

Changes = Counter[tuple[int, str]]
"""The changes of the counters in a transaction, by lane and kind."""


async def add_counts(connection: Connection, changes: Changes) -> None:
    """Add to the counters, as the last statement before the commit. Raises the driver's errors."""
    if changed := sorted((lane, kind, n) for (lane, kind), n in changes.items() if n):
        await connection.execute(statements.COUNT, *map(list, zip(*changed, strict=True)))
