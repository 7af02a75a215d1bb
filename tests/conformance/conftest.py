"""The implementations under test: the real one of each port, and its fake."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conformance.broker_world import MemoryPlace, Place
from tests.conformance.stores import MemoryStores, PostgresStores, Stores
from tests.support.servers import RabbitMQ

REAL, MEMORY = "real", "memory"


@pytest.fixture
def place(rabbitmq: RabbitMQ, vhost: str) -> Place:
    return Place(rabbitmq, vhost)


@pytest.fixture(params=[REAL, MEMORY])
def either(request: pytest.FixtureRequest) -> Place | MemoryPlace:
    return MemoryPlace() if request.param == MEMORY else request.getfixturevalue("place")


@pytest.fixture(params=[REAL, MEMORY])
def stores(request: pytest.FixtureRequest) -> Callable[[int], Stores]:
    """Creates a store with this many lanes."""
    if request.param == MEMORY:
        return MemoryStores
    database = request.getfixturevalue("database")
    return lambda lanes: PostgresStores(database, lanes)
