"""The implementations under test: the real one of each port, its simulation, and its fake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.conformance.broker_world import MemoryPlace, Place
from tests.conformance.stores import MemoryStores, PostgresStores, Stores
from tests.support.brokers import REAL, SIMULATED, simulated

MEMORY = "memory"
BROKERS = {"real": REAL, SIMULATED: SIMULATED}


@contextmanager
def new_place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A fresh vhost of the broker that the test is for."""
    broker = request.getfixturevalue(BROKERS[request.param])
    name = broker.add_vhost()
    yield Place(broker, broker.url(name))
    broker.drop_vhost(name)


__all__ = ["either", "place", "simulated", "stores"]


@pytest.fixture(params=BROKERS)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with new_place(request) as found:
        yield found


@pytest.fixture(params=[*BROKERS, MEMORY])
def either(request: pytest.FixtureRequest) -> Iterator[Place | MemoryPlace]:
    if request.param == MEMORY:
        yield MemoryPlace()
        return
    with new_place(request) as found:
        yield found


@pytest.fixture(params=[REAL, MEMORY])
def stores(request: pytest.FixtureRequest) -> Callable[[int], Stores]:
    """Creates a store with this many lanes."""
    if request.param == MEMORY:
        return MemoryStores
    database = request.getfixturevalue("database")
    return lambda lanes: PostgresStores(database, lanes)
