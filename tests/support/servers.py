"""Private servers for tests, the demo and development."""

from __future__ import annotations

from tests.support.postgres import Postgres
from tests.support.processes import StartFailed
from tests.support.rabbitmq import Certificates, RabbitMQ

__all__ = ["Certificates", "Postgres", "RabbitMQ", "StartFailed"]
