"""Databases with a schema, and one world for each mode."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.acceptance.place import Place
from tests.acceptance.world import MODES, World, secret_store_url, upgrade, world
from tests.integration.cli import delayer
from tests.support.servers import Postgres, RabbitMQ

__all__ = ["delayer"]


@pytest.fixture(scope="session")
def template(postgres: Postgres) -> str:
    """The name of a database with our schema, to copy."""
    name = postgres.add_database()
    upgrade(postgres.url(name))
    return name


@pytest.fixture
def schema(postgres: Postgres, template: str) -> Iterator[str]:
    """The name of a fresh database with our schema."""
    name = postgres.add_database(template=template)
    yield name
    postgres.drop_database(name)


@pytest.fixture
def store(postgres: Postgres, schema: str) -> str:
    """The URL of a fresh store, with a password to recognise."""
    return secret_store_url(postgres, schema)


@pytest.fixture(scope="session", params=MODES)
def any_world(request: pytest.FixtureRequest, rabbitmq: RabbitMQ, postgres: Postgres, template: str) -> Iterator[World]:
    """Each mode in turn."""
    with world(request.param, rabbitmq, postgres, template) as this:
        yield this


@pytest.fixture
def place(rabbitmq: RabbitMQ) -> Iterator[Place]:
    """A fresh vhost with a destination, for a daemon of the test's own."""
    vhost = rabbitmq.add_vhost()
    yield Place.furnished(rabbitmq, vhost)
    rabbitmq.drop_vhost(vhost)
