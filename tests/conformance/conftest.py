"""The broker of the tests of publishers and consumers."""

from __future__ import annotations

import pytest

from tests.conformance.broker_world import Place
from tests.support.servers import RabbitMQ


@pytest.fixture
def place(rabbitmq: RabbitMQ, vhost: str) -> Place:
    return Place(rabbitmq, vhost)
