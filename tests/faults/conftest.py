"""A fresh store, and the crash scenes."""

from __future__ import annotations

import pytest

from tests.faults.scenes import Scenes
from tests.faults.tables import NATIVE, RESTORE, STORE
from tests.support.servers import Postgres, RabbitMQ


@pytest.fixture
def store(database: str) -> str:
    """The URL of a fresh store."""
    return database


@pytest.fixture(scope="session")
def scenes(rabbitmq: RabbitMQ, postgres: Postgres, template: str) -> Scenes:
    """All rows of both crash tables, played together for each kind of death."""
    return Scenes({**NATIVE, **STORE}, rabbitmq, postgres, template)


@pytest.fixture(scope="session")
def restore_scenes(rabbitmq: RabbitMQ, postgres: Postgres, template: str) -> Scenes:
    """The rows of restoring, which begin with messages that are in segments."""
    return Scenes(RESTORE, rabbitmq, postgres, template)
