"""Stores with the schema in them, by copying one that has it: many tests here want one each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from delayer.store import upgrades
from tests.rig.servers import Postgres

TEMPLATE = "delayer_template"


def add_template(server: Postgres) -> None:
    """A database with the schema, to which nobody is connected."""
    asyncio.run(upgrades.upgrade(server.url(server.add_database(TEMPLATE))))


@pytest.fixture(scope="session")
def template(postgres: Postgres) -> str:
    add_template(postgres)
    return TEMPLATE


@pytest.fixture
def store(postgres: Postgres, template: str) -> Iterator[str]:
    """The URL of a fresh store."""
    name = postgres.add_database(template=template)
    yield postgres.url(name)
    postgres.drop_database(name)
