"""Whose a damaged file is: Postgres names the file of a page that it cannot read, and people know tables and indexes.

An index holds nothing of its own: it is made anew from its table, so its damage is mended in a minute. That is said.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import asyncpg

from delayer.core.errors import StoreLost
from delayer.store import pool
from delayer.store.errors import DAMAGED, DRIVER_ERRORS, describe

_FILE: Final = re.compile(r"(?:base/\d+|pg_tblspc/(\d+)/[^/\s\"]+/\d+)/(\d+)")
_INDEX: Final = re.compile(r'index "([^"]+)"')
_NAMES: Final = """
SELECT c.oid::regclass::text, i.indrelid::regclass::text
FROM pg_class AS c LEFT JOIN pg_index AS i ON i.indexrelid = c.oid
WHERE c.oid = {}
"""
SEE: Final = 'see "Damage" in docs/backlog.md'


class Named(NamedTuple):
    """A relation with damage. ``table`` is that of an index, and None for a table."""

    name: str
    table: str | None

    def __str__(self) -> str:
        return f"table {self.name}" if self.table is None else f"index {self.name} of table {self.table}"

    @property
    def advice(self) -> str:
        """What to do about it."""
        return SEE if self.table is None else f"REINDEX INDEX {self.name} makes it anew and loses nothing; {SEE}"


def question(text: str) -> str | None:
    """The SQL that gives name and table of what an error's text is about (a :class:`Named`); None where it does not
    say. Pure."""
    if file := _FILE.search(text):
        return _NAMES.format(f"pg_filenode_relation({int(file[1] or 0)}, {int(file[2])})")
    if index := _INDEX.search(text):
        quoted = index[1].replace("'", "''")
        return _NAMES.format(f"""to_regclass('"{quoted}"')""")
    return None


async def said(connection: asyncpg.Connection, error: BaseException) -> str:
    """An error that is about damage, with the name of what is damaged and what to do about that. The transaction of
    ``connection`` must be one that goes on."""
    asked = question(str(error))
    try:
        async with pool.transaction(connection):
            row = await connection.fetchrow(asked) if asked else None
    except DAMAGED:  # the catalogs are damaged as well
        row = None
    if row is None:
        return f"{describe(error)}; {SEE}"
    named = Named(*row)
    return f"{named}: {describe(error)}; {named.advice}"


async def lost(url: str, doing: str, error: BaseException) -> StoreLost:
    """The StoreLost for damage that was met, with the name of what is damaged; asked on a connection of its own."""
    found = await _named(url, str(error))
    if found is None:
        return StoreLost(f"{doing}: {describe(error)}", SEE)
    return StoreLost(f"{doing}: {found} cannot be read: {describe(error)}", found.advice)


async def _named(url: str, text: str) -> Named | None:
    asked = question(text)
    if asked is None:
        return None
    try:
        connection = await pool.connect_plain(url, "delayer damage")
    except StoreLost:
        return None
    try:
        row = await connection.fetchrow(asked)
    except DRIVER_ERRORS:  # the catalogs are damaged as well
        return None
    finally:
        await pool.close(connection)
    return None if row is None else Named(*row)
