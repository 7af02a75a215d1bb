"""The id of a store, and whether it has a broker.

A store belongs to one broker and virtual host: the one with the exchange ``delayer.store.<id>``, which the first daemon
declares. Any other broker would deliver due messages to the wrong place.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from asyncpg import Connection

from delayer.core.errors import StoreLost
from delayer.core.topology import Exchange
from delayer.store import pool, statements

ONE_BROKER: Final = "give each broker and virtual host a database of its own: correct broker.url or store.url"
ACCEPT: Final = "if the broker was rebuilt, run `delayer topology apply --accept-broker`; otherwise {}"


class StoreIdentity(NamedTuple):
    """``has_broker``: whether a daemon has declared the exchange on some broker. ``daemons``: other live daemons."""

    id: str
    has_broker: bool
    daemons: int

    @property
    def exchange(self) -> Exchange:
        return Exchange(f"delayer.store.{self.id}", "fanout")

    async def check_broker(self, exists: Callable[[str], Awaitable[bool]]) -> None:
        """Ask a broker by ``exists``, which takes an exchange's name. Raises StoreLost if the store belongs to another
        broker, and what ``exists`` raises."""
        if self.has_broker and not await exists(self.exchange.name):
            raise self._wrong_broker()

    def _wrong_broker(self) -> StoreLost:
        text = f"this broker has no exchange {self.exchange.name}, so the store belongs to another broker"
        if self.daemons:
            daemons = "1 other daemon works" if self.daemons == 1 else f"{self.daemons} other daemons work"
            return StoreLost(f"{text}, for which {daemons}", ONE_BROKER)
        return StoreLost(f"{text}, or to this one before it was rebuilt", ACCEPT.format(ONE_BROKER))


_READ: Final = f"""
SELECT id, has_broker, (SELECT count(*) FROM ({statements.DAEMONS}) AS daemons WHERE pid <> $1) FROM store
"""


async def read_identity(connection: Connection, presence: int = 0) -> StoreIdentity:
    """``presence``: the server process of this daemon's presence. Raises the driver's errors."""
    return StoreIdentity(*await connection.fetchrow(_READ, presence))


async def give_new_broker(connection: Connection, declare: Callable[[StoreIdentity], Awaitable[None]]) -> None:
    """Give the store a new id, so that it leaves its last broker, and declare the new id's exchange. Raises what
    ``declare`` raises, and the driver's errors."""
    async with pool.transaction(connection):
        await connection.execute("UPDATE store SET id = replace(gen_random_uuid()::text, '-', ''), has_broker = true")
        await declare(await read_identity(connection))
