"""The store port, over Postgres."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from delayer.broker.ports import Store
from delayer.store import pool, schema, upgrades
from delayer.store.postgres import PostgresStore
from tests.conformance.store_contract import StoreContract
from tests.faults.place import compact_all


class TestPostgresStore(StoreContract):
    @pytest.fixture
    def place(self, database: str) -> str:
        return database

    @asynccontextmanager
    async def daemon(self, place: str) -> AsyncIterator[Store]:
        if await schema.current(place) != schema.HEAD:
            await upgrades.upgrade(place)
        store = await PostgresStore.connect(place)
        try:
            yield store
        finally:
            await store.close()

    async def compact(self, place: str, messages: int) -> int:
        connection = await pool.connect(place, "test")
        try:
            return await compact_all(connection, messages)
        finally:
            await pool.close(connection)
