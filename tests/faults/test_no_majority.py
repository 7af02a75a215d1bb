"""Most nodes of a cluster die, and the daemon's node stays up, as with RabbitMQ's default partition handling. The
broker still accepts connections and passive declarations; only the queues' members show that nothing can be
enqueued."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.acceptance.own_vhost import OwnVhost
from tests.acceptance.test_drift import PROGRAM, reasons
from tests.acceptance.test_http import ANY_PORT
from tests.support.daemon import DaemonProcess, command
from tests.support.rabbitmq_cluster import Node, RabbitMQCluster
from tests.support.web import Web

pytestmark = [pytest.mark.deadline(600), pytest.mark.long]

IN_PLACE = "the topology is not in place: "
BY_API = f"{IN_PLACE}queue 'delays' has no majority: 1 of 3 members are online"
BY_AMQP = f"{IN_PLACE}queue 'delays' does not answer what needs a majority of its members"
STATUS = "rabbitmq-queues quorum_status QUEUE"


def handle_partitions(nodes: list[Node], how: str) -> None:
    for node in nodes:
        node.ctl("eval", f"application:set_env(rabbit, cluster_partition_handling, {how}).")


@pytest.fixture
def ignoring(cluster: RabbitMQCluster) -> Iterator[RabbitMQCluster]:
    """The cluster with RabbitMQ's default, by which a node without a majority stays up."""
    handle_partitions(cluster.nodes, "ignore")
    yield cluster
    cluster.heal()
    handle_partitions(cluster.nodes, "pause_minority")


async def checked(environ: Mapping[str, str]) -> tuple[bool, list[dict[str, Any]]]:
    """Whether `delayer check` finds all well, and the rows that are off."""
    try:
        answer = json.loads(await command(None, "check", "--json", environ=environ))
    except RuntimeError as failed:
        assert ": exit 1\n" in str(failed)
        answer = json.loads(str(failed).partition("\n")[2].rpartition("}")[0] + "}")
    return answer["ok"], [row for row in answer["checks"] if row["result"] == "off"]


async def test_a_daemon_is_unready_while_its_queues_have_no_majority(
    ignoring: RabbitMQCluster, cluster_vhost: str
) -> None:
    cluster, first = ignoring, ignoring.nodes[0]
    place = OwnVhost.furnished(first, cluster_vhost)
    plain = place.environ("native") | {"ROUTE": json.dumps([{"from": "in", "to": "out"}])}
    managed = plain | {"BROKER__MANAGEMENT_URL": first.management_url}
    async with AsyncExitStack() as stack:
        told: dict[str, tuple[DaemonProcess, Web, dict[str, str]]] = {}
        for reason, environ in {BY_API: managed, BY_AMQP: plain}.items():
            daemon = await stack.enter_async_context(DaemonProcess(environ | ANY_PORT, program=PROGRAM))
            web = await Web.of(await daemon.ready())
            told[reason] = daemon, web, environ | {"HTTP__LISTEN": web.address}
        for _, web, environ in told.values():
            assert await reasons(web, 200) == []
            assert await checked(environ) == (True, [])
        await asyncio.to_thread(cluster.settle)
        for node in cluster.nodes[1:]:
            await asyncio.to_thread(node.kill)
        for reason, (daemon, web, environ) in told.items():
            event = await daemon.event(
                "topology not in place", where=lambda event, reason=reason: reason in event["reason"], timeout=60
            )
            assert STATUS in event["next_step"]
            found = await reasons(web, 503)
            assert [one for one in found if one.startswith(reason)], found
            is_well, off = await checked(environ)
            assert not is_well
            assert any(row["what"] == "topology" and STATUS in row["advice"] for row in off), off
            assert any(row["what"] == "daemon" and reason in row["found"] for row in off), off
        late = await stack.enter_async_context(DaemonProcess(plain))
        assert STATUS in (await late.event("broker connection lost", timeout=60))["next_step"]
        await asyncio.to_thread(cluster.heal)
        for daemon, web, environ in told.values():
            assert await reasons(web, 200) == []
            assert await checked(environ) == (True, [])
            assert await daemon.stop() == 0
