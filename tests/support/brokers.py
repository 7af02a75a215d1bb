"""Which broker a test is for: the real one, or the simulated one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from tests.simulation.broker.broker import Pace
from tests.simulation.broker.threaded import ThreadedBroker

REAL: Final = "rabbitmq"
SIMULATED: Final = "simulated"
PACE: Final = Pace((0.0, 0.0005, 0.005))
"""The members of a queue agree at once, or take a while."""


@pytest.fixture(scope="session")
def simulated() -> Iterator[ThreadedBroker]:
    """One simulated broker for all tests."""
    with ThreadedBroker(PACE) as broker:
        yield broker
