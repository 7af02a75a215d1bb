"""The types that a connection knows by itself: they are what the server says, and nobody asks it."""

from __future__ import annotations

import asyncpg
import pytest

from delayer.core.filters import Filter
from delayer.store import pool
from delayer.store.admin import listing, stats
from delayer.store.upgrades import upgrade

VALUES = {
    "bytea[]": [b"a", None, b"\x00"],
    "smallint[]": [1, -2, None],
    "int[]": [1, -(1 << 31)],
    "bigint[]": [[1, 2], [3, 1 << 62]],
    "timestamptz[]": [1_795_434_299_758, None, pool.BEGINNING_MS],
}


def asks(text: str) -> bool:
    return "typeinfo_tree" in text


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements that connections of ours run from now on."""
    heard: list[str] = []

    async def prepare(connection: asyncpg.Connection) -> None:
        connection.add_query_logger(lambda query: heard.append(query.query))
        await original(connection)

    original = pool.prepare
    monkeypatch.setattr(pool, "prepare", prepare)
    return heard


async def test_known_types_are_those_of_the_server(database: str) -> None:
    connection = await asyncpg.connect(database)
    try:
        told, _ = await connection._introspect_types(list(pool.KNOWN), None)
    finally:
        await connection.close()
    answers = {one["oid"]: one for one in told}
    for oid, known in pool.KNOWN.items():
        assert known == {name: answers[oid][name] for name in known}


async def test_values_go_there_and_back(database: str, asked: list[str]) -> None:
    connection = await pool.connect(database, "test")
    try:
        for name, value in VALUES.items():
            assert await connection.fetchval(f"SELECT $1::{name}", value) == value
        assert await connection.fetchval("SELECT $1::text[]", ["a"]) == ["a"]
        assert not any(map(asks, asked))
        assert await connection.fetchval("SELECT $1::date[]", []) == []  # of which nothing is known
        assert any(map(asks, asked))
    finally:
        await pool.close(connection)


async def test_looking_asks_about_no_type(database: str, asked: list[str]) -> None:
    await upgrade(database)
    async with listing.looking(database, "test") as connection:
        await listing.entries(connection, await listing.find(connection, Filter(), None, 50))
    await stats.overview(database)
    assert len(asked) > 10
    assert not any(map(asks, asked))
