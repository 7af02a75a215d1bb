"""A fresh store, the crash scenes, and a cluster of brokers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.scenes import WORKER, Scenes
from tests.faults.tables import INBOX, NATIVE, RESTORE, STORE
from tests.support.rabbitmq_cluster import RabbitMQCluster
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


@pytest.fixture(scope="session")
def inbox_scenes(rabbitmq: RabbitMQ, postgres: Postgres, template: str) -> Scenes:
    """The rows of messages that are sent by SQL."""
    return Scenes(INBOX, rabbitmq, postgres, template)


@pytest.fixture(scope="session")
def three_nodes() -> Iterator[RabbitMQCluster]:
    with RabbitMQCluster(hidden=WORKER) as cluster:
        yield cluster


@pytest.fixture
def cluster(three_nodes: RabbitMQCluster) -> Iterator[RabbitMQCluster]:
    """A whole cluster. The test may break it, and need not repair it."""
    yield three_nodes
    three_nodes.heal()


@pytest.fixture
def cluster_vhost(cluster: RabbitMQCluster) -> Iterator[str]:
    """The name of a fresh vhost of the cluster."""
    name = cluster.nodes[0].add_vhost()
    yield name
    cluster.heal()
    cluster.nodes[0].drop_vhost(name)
