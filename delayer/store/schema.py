"""The store's schema and the revision needed, without Alembic: a daemon starts in half the time with a third less
memory."""

from __future__ import annotations

from typing import Final

from asyncpg import Connection

from delayer.store.errors import SchemaOutdated

VERSION_TABLE: Final = "delayer_schema_version"
HEAD: Final = "0002"
"""The revision this program works with: the newest of migrations/."""

# Storage options of all tables that messages pass through. For the reasons see migrations/versions/0001.
CHURN_OPTIONS = "autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 50000, vacuum_truncate = off"


async def current_of(connection: Connection) -> str | None:
    """The revision of the store of ``connection``. Raises the driver's errors."""
    if not await connection.fetchval("SELECT to_regclass($1)", VERSION_TABLE):
        return None
    revision: str | None = await connection.fetchval(f"SELECT version_num FROM {VERSION_TABLE}")
    return revision


async def check(connection: Connection) -> None:
    """Raise SchemaOutdated unless the store has exactly our schema."""
    if wrong := find_mismatch(await current_of(connection)):
        raise wrong


def find_mismatch(found: str | None) -> SchemaOutdated | None:
    """The error for a store of this revision, with the next step; None if the revision is ours."""
    if found == HEAD:
        return None
    return SchemaOutdated(found, HEAD, newer=found is not None)
