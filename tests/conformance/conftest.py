"""The implementations under test: the real one of each port, its simulation, and its fake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.conformance.broker_world import MemoryPlace, Place
from tests.conformance.stores import MemoryStores, PostgresStores, Stores
from tests.simulation.store.process import ClockedPostgres
from tests.simulation.store.threaded import ThreadedStore
from tests.support.brokers import REAL, SIMULATED, simulated

MEMORY = "memory"
BROKERS = {"real": REAL, SIMULATED: SIMULATED}
STORES = {"real": "database", SIMULATED: "simulated_store", MEMORY: ""}


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


@pytest.fixture(scope="session")
def clocked() -> Iterator[ClockedPostgres]:
    """The Postgres behind all simulated stores."""
    with ClockedPostgres() as postgres:
        yield postgres


@pytest.fixture
def simulated_store(clocked: ClockedPostgres) -> Iterator[str]:
    """The URL of an empty simulated store."""
    with ThreadedStore(clocked) as store:
        yield store.url


@pytest.fixture(params=STORES)
def stores(request: pytest.FixtureRequest) -> Callable[[int], Stores]:
    """Creates a store with this many lanes."""
    if request.param == MEMORY:
        return MemoryStores
    url = request.getfixturevalue(STORES[request.param])
    return lambda lanes: PostgresStores(url, lanes)
