"""The command line for every test here, and the broker: some modules run with the real and the simulated one."""

from __future__ import annotations

import pytest

from tests.integration.cli import delayer
from tests.support.brokers import REAL, SIMULATED, simulated
from tests.support.servers import RabbitMQ

__all__ = ["delayer", "simulated"]

WITH_BOTH = ("test_admin", "test_admin_cascade", "test_admin_verify", "test_silent_queue", "test_wire")


@pytest.fixture(scope="session")
def rabbitmq(request: pytest.FixtureRequest) -> RabbitMQ:
    found: RabbitMQ = request.getfixturevalue(getattr(request, "param", REAL))
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] in WITH_BOTH and "rabbitmq" in metafunc.fixturenames:
        metafunc.parametrize("rabbitmq", [REAL, SIMULATED], indirect=True, scope="session")
