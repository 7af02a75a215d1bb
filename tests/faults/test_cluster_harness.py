"""The cluster of the fault tests itself: its verbs, its waits, and the proxy before it."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from delayer.amqp.errors import BrokerLost
from tests.support import reaper
from tests.support.place import eventually
from tests.support.proxy import Proxy
from tests.support.rabbitmq_cluster import Node, RabbitMQCluster
from tests.support.raw import Message, Props, Raw

pytestmark = [pytest.mark.long, pytest.mark.deadline(240)]

QUEUE = "replicated"
RUN = """
import signal
from tests.support.rabbitmq_cluster import RabbitMQCluster
with RabbitMQCluster():
    print("started", flush=True)
    signal.pause()
"""
"""A test run that keeps a cluster until it is killed."""
NOT_CONFIRMED = (BrokerLost, AssertionError)
"""The errors of a publish in vain: the connection is refused or lost, or the broker rejects the message."""
MESSAGES = 500


def declare(cluster: RabbitMQCluster, vhost: str) -> Node:
    """Declare a quorum queue with a member on each node, and return its leader."""
    arguments = {"x-queue-type": "quorum", "x-quorum-initial-group-size": 3}
    cluster.api("PUT", f"/api/queues/{vhost}/{QUEUE}", {"durable": True, "arguments": arguments})
    cluster.settle()
    cluster.wait_whole()
    return cluster.wait_for_leader(QUEUE, vhost)


def bodies(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


async def publish_once(url: str, *contents: bytes) -> None:
    """Publish persistent messages to the queue. Raises AssertionError or BrokerLost unless the broker confirms them."""
    async with await Raw.connect(url) as raw:
        await raw.publish(*(Message("", QUEUE.encode(), Props(delivery_mode=2), body) for body in contents))


async def publish(url: str, *contents: bytes) -> None:
    """Publish until the broker confirms. A new channel's first message is rejected while the leader is down."""

    async def is_confirmed() -> bool:
        with suppress(*NOT_CONFIRMED):
            await publish_once(url, *contents)
            return True
        return False

    await eventually(is_confirmed, timeout=90)


async def consume(url: str, *contents: bytes) -> None:
    """Wait until these messages have arrived from the queue."""
    async with await Raw.connect(url) as raw:
        await (await raw.inbox(QUEUE)).got(contents)


async def test_the_new_leader_has_all_messages(cluster: RabbitMQCluster, cluster_vhost: str) -> None:
    leader = await asyncio.to_thread(declare, cluster, cluster_vhost)
    await publish(leader.url(cluster_vhost), *bodies(MESSAGES))
    await asyncio.to_thread(leader.kill)
    successor = await asyncio.to_thread(cluster.wait_for_leader, QUEUE, cluster_vhost, other_than=leader)
    assert successor in cluster.others(leader)
    (third,) = cluster.others(leader, successor)
    await publish(third.url(cluster_vhost), b"without one node")
    await consume(successor.url(cluster_vhost), *bodies(MESSAGES), b"without one node")
    await asyncio.to_thread(leader.start)
    await asyncio.to_thread(cluster.wait_whole)
    await publish(leader.url(cluster_vhost), b"with all nodes")
    await consume(third.url(cluster_vhost), b"with all nodes")


async def test_one_node_of_three_confirms_nothing(cluster: RabbitMQCluster, cluster_vhost: str) -> None:
    leader = await asyncio.to_thread(declare, cluster, cluster_vhost)
    await publish(leader.url(cluster_vhost), *bodies(MESSAGES))
    survivor, second = cluster.others(leader)
    async with await Raw.connect(survivor.url(cluster_vhost)) as raw:
        await asyncio.gather(asyncio.to_thread(leader.kill), asyncio.to_thread(second.kill))
        with pytest.raises(NOT_CONFIRMED):
            await raw.publish(Message("", QUEUE.encode(), Props(delivery_mode=2), b"without a majority"))
    with pytest.raises(NOT_CONFIRMED):
        await publish_once(survivor.url(cluster_vhost), b"without a majority")
    await asyncio.to_thread(cluster.heal)
    await publish(survivor.url(cluster_vhost), b"with all nodes")
    await consume(survivor.url(cluster_vhost), *bodies(MESSAGES), b"with all nodes")


async def test_a_paused_leader_is_replaced(cluster: RabbitMQCluster, cluster_vhost: str) -> None:
    leader = await asyncio.to_thread(declare, cluster, cluster_vhost)
    await asyncio.to_thread(leader.pause)
    successor = await asyncio.to_thread(cluster.wait_for_leader, QUEUE, cluster_vhost, other_than=leader)
    await publish(successor.url(cluster_vhost), *bodies(MESSAGES))
    await asyncio.to_thread(cluster.heal)
    await consume(leader.url(cluster_vhost), *bodies(MESSAGES))


@pytest.mark.parametrize("verb", ["stop_app", "drain"])
async def test_a_node_leaves_in_an_orderly_way(cluster: RabbitMQCluster, cluster_vhost: str, verb: str) -> None:
    leave, come_back = {"stop_app": (Node.stop_app, Node.start_app), "drain": (Node.drain, Node.revive)}[verb]
    leader = await asyncio.to_thread(declare, cluster, cluster_vhost)
    raw = await Raw.connect(leader.url(cluster_vhost))
    await asyncio.to_thread(leave, leader)
    await raw.connection.closed
    with pytest.raises(BrokerLost):
        await Raw.connect(leader.url(cluster_vhost))
    successor = await asyncio.to_thread(cluster.wait_for_leader, QUEUE, cluster_vhost, other_than=leader)
    await publish(successor.url(cluster_vhost), *bodies(MESSAGES))
    await asyncio.to_thread(come_back, leader)
    await asyncio.to_thread(cluster.wait_whole)
    await consume(leader.url(cluster_vhost), *bodies(MESSAGES))


async def test_the_proxy_leads_to_a_live_node(cluster: RabbitMQCluster, cluster_vhost: str) -> None:
    first, second, third = cluster.nodes
    await asyncio.to_thread(declare, cluster, cluster_vhost)
    async with Proxy(*(node.port for node in cluster.nodes)) as proxy:
        url = first.url(cluster_vhost, port=proxy.port)
        await publish(url, b"1")
        assert cluster.node_at(proxy.target) is first
        await asyncio.to_thread(first.kill)
        await publish(url, b"2")
        assert cluster.node_at(proxy.target) is second
        await asyncio.to_thread(first.start)
        await asyncio.to_thread(cluster.wait_whole)
        await publish(url, b"3")
        assert cluster.node_at(proxy.target) is second
        await asyncio.to_thread(second.pause)
        with pytest.raises(BrokerLost):  # the kernel accepts the connection, and the node does not answer
            await publish_once(f"{url}?connection_timeout=2000", b"4")
        await publish(url, b"5")
        assert cluster.node_at(proxy.target) is first
        await consume(third.url(cluster_vhost), b"1", b"2", b"3", b"5")


async def test_a_killed_test_run_leaves_nothing() -> None:
    run = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUN,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        assert run.stdout is not None
        assert b"started" in await asyncio.wait_for(run.stdout.readline(), 180)
        processes = reaper.family(run.pid)
        brokers = [process for process in processes if "beam" in process.name()]
        directories = {Path(process.cwd()) for process in brokers}
    finally:
        run.send_signal(signal.SIGKILL)
        await run.wait()
    assert len(directories) == len(brokers) == 3
    await eventually(lambda: [one for one in processes if is_alive(one)], lambda left: not left, timeout=60)
    await eventually(lambda: [one for one in directories if one.exists()], lambda left: not left, timeout=60)
    await run.stdout.read()  # up to its end, which closes the pipe


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
