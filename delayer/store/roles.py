"""Whose the store's tables are, where one role upgrades it and another one runs the daemon (docs/security.md)."""

from __future__ import annotations

from typing import Final, NamedTuple

from delayer.store import session
from delayer.store.errors import translated

_OWNERS: Final = """
SELECT tables.rolname, base.rolname
FROM pg_class AS c JOIN pg_roles AS tables ON tables.oid = c.relowner
CROSS JOIN pg_database AS d JOIN pg_roles AS base ON base.oid = d.datdba
WHERE c.oid = 'lane'::regclass AND d.datname = current_database() AND tables.oid <> base.oid
  AND NOT base.rolsuper AND pg_has_role(base.oid, tables.oid, 'MEMBER')
"""


class Mistaken(NamedTuple):
    """The role that owns the tables, and the one that should."""

    tables: str
    database: str


async def mistaken(url: str) -> Mistaken | None:
    """Both, where the daemon's role upgraded a store that has an owner: that of the database, a member of the other and
    no superuser. None where all is well. Raises StoreLost, BadStoreUrl."""
    connection = await session.connect(url, "delayer check")
    try:
        with translated("look at the owner"):
            row = await connection.fetchrow(_OWNERS)
    finally:
        await session.close(connection)
    return None if row is None else Mistaken(*row)
