"""Upgrades of the store's schema (`delayer db upgrade`). Each file of migrations/ is one upgrade, and its name is the
revision. The files define the tables, and say what each table is for. schema.py tells which schema a store has."""

from __future__ import annotations

from importlib.resources import files
from pathlib import PurePath

from delayer.store import pool, schema
from delayer.store.admin.setup import raise_lanes
from delayer.store.errors import translated


async def upgrade(url: str, lanes: int = 4) -> None:
    """Bring the schema up to schema.HEAD, in one transaction; then make ``lanes`` lanes, if there are less. A store of
    a newer revision stays as it is. Raises StoreLost, BadStoreUrl."""
    scripts = {PurePath(one.name).stem: one for one in (files("delayer.store") / "migrations").iterdir()}
    # An upgrade of a large store takes as long as it takes.
    connection = await pool.connect_plain(url, "delayer schema", {"statement_timeout": "0"}, command_seconds=None)
    try:
        with translated("schema upgrade"):
            async with pool.transaction(connection):
                # Two daemons or operators that upgrade at once take turns.
                await connection.execute("SELECT pg_advisory_xact_lock(hashtext('delayer schema upgrade'))")
                found = await schema.current_of(connection) or ""
                for revision in sorted(one for one in scripts if one > found):
                    await connection.execute(scripts[revision].read_text(encoding="utf-8"))
                    await connection.execute(f"DELETE FROM {schema.VERSION_TABLE}")
                    await connection.execute(f"INSERT INTO {schema.VERSION_TABLE} VALUES ($1)", revision)
    finally:
        await pool.close(connection)
    await raise_lanes(url, lanes)
