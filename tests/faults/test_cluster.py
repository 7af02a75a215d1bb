"""Three brokers, any of which dies, hangs or leaves: nothing is lost or early, and the daemon fails over."""

from __future__ import annotations

import json

import pytest

from tests.faults.cluster_scene import FAULTS, Scene
from tests.support.rabbitmq_cluster import RabbitMQCluster

pytestmark = pytest.mark.deadline(600)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["store", "native"])
@pytest.mark.parametrize("name", FAULTS)
async def test_behind_a_proxy(cluster: RabbitMQCluster, cluster_vhost: str, store: str, mode: str, name: str) -> None:
    await keep_the_promises(cluster, cluster_vhost, mode, store, name, ())


@pytest.mark.long
@pytest.mark.parametrize("mode", ["store", "native"])
@pytest.mark.parametrize("name", FAULTS)
async def test_by_a_list(cluster: RabbitMQCluster, cluster_vhost: str, store: str, mode: str, name: str) -> None:
    await keep_the_promises(cluster, cluster_vhost, mode, store, name, cluster.urls(cluster_vhost))


async def test_the_daemons_node_dies(cluster: RabbitMQCluster, cluster_vhost: str, store: str) -> None:
    """The short case: the one of which operators are most afraid."""
    urls = cluster.urls(cluster_vhost)
    await keep_the_promises(cluster, cluster_vhost, "store", store, "daemon's node killed", urls)


async def keep_the_promises(
    cluster: RabbitMQCluster, vhost: str, mode: str, store: str, name: str, urls: list[str] | tuple[()]
) -> None:
    """Inject the fault, print a row of the report, and check that the daemon kept its promises."""
    fault = FAULTS[name]
    async with Scene.open(cluster, vhost, mode, store if mode == "store" else None, urls) as scene:
        figures = await scene.play(fault)
    way = "list" if urls else "proxy"
    print(json.dumps({"fault": name, "mode": mode, "way": way, **figures.row}), *figures.events, sep="\n")
    figures.verdict.assert_kept(repeats=True)
    assert figures.failed_over == fault.majority
