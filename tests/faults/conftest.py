"""Stores with the schema in them, by copying one that has it: many tests here want one each. And the crash scenes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.scenes import Scenes, add_template
from tests.faults.tables import NATIVE, RESTORE, STORE
from tests.support.servers import Postgres, RabbitMQ

TEMPLATE = "delayer_template"


@pytest.fixture(scope="session")
def template(postgres: Postgres) -> str:
    """The name of a database with the schema."""
    add_template(postgres, TEMPLATE)
    return TEMPLATE


@pytest.fixture
def store(postgres: Postgres, template: str) -> Iterator[str]:
    """The URL of a fresh store."""
    name = postgres.add_database(template=template)
    yield postgres.url(name)
    postgres.drop_database(name)


@pytest.fixture(scope="session")
def scenes(rabbitmq: RabbitMQ, postgres: Postgres, template: str) -> Scenes:
    """All rows of both crash tables, played together for each way to die."""
    return Scenes({**NATIVE, **STORE}, rabbitmq, postgres, template)


@pytest.fixture(scope="session")
def restore_scenes(rabbitmq: RabbitMQ, postgres: Postgres, template: str) -> Scenes:
    """The rows of restoring, which begin with messages that are in segments."""
    return Scenes(RESTORE, rabbitmq, postgres, template)
