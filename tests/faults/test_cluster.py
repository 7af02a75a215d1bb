"""Three brokers, any of which dies, hangs or leaves: nothing is lost or early, and the daemon fails over."""

from __future__ import annotations

import json

import pytest

from tests.faults.cluster_scene import FAULTS, Scene
from tests.support.rabbitmq_cluster import RabbitMQCluster

pytestmark = [pytest.mark.long, pytest.mark.deadline(600)]


@pytest.mark.parametrize("mode", ["store", "native"])
@pytest.mark.parametrize("name", FAULTS)
async def test_behind_a_proxy(cluster: RabbitMQCluster, cluster_vhost: str, store: str, mode: str, name: str) -> None:
    fault = FAULTS[name]
    async with Scene.open(cluster, cluster_vhost, mode, store if mode == "store" else None) as scene:
        figures = await scene.play(fault)
    print(json.dumps({"fault": name, "mode": mode, **figures.row}), *figures.events, sep="\n")
    figures.verdict.assert_kept(repeats=True)
    assert figures.failed_over == fault.majority
