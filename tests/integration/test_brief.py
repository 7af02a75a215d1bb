"""Declaring and looking in one breath, on a real broker: the same answers as Admin's, whatever is there already."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import pytest

from delayer.broker.admin import Admin
from delayer.broker.brief import CHANNELS, briefly
from delayer.broker.errors import BrokerRefused
from delayer.core.cascade import Cascade, due_topology, intake_topology
from delayer.core.errors import BrokerLost
from delayer.core.topology import Exchange, Queue, Topology, arguments
from tests.integration.test_admin import inventory, publish, whole
from tests.support.proxy import Proxy
from tests.support.servers import RabbitMQ

CASCADE = Cascade()


async def test_declared_is_what_the_topology_says(rabbitmq: RabbitMQ, vhost: str) -> None:
    async with briefly(vhost, "test") as broker:
        assert await broker.declared(whole(CASCADE))
        first = inventory(rabbitmq, vhost)
        assert await broker.declared(whole(CASCADE)), "twice is once"
    assert inventory(rabbitmq, vhost) == first
    async with await Admin.connect(vhost) as admin:
        await admin.declare(whole(CASCADE))
    assert inventory(rabbitmq, vhost) == first


async def test_a_mismatch_prevents_every_binding(rabbitmq: RabbitMQ, vhost: str) -> None:
    wrong = Queue(CASCADE.level(9), arguments({"x-queue-type": "quorum", "x-message-ttl": 511_000}))
    async with briefly(vhost, "test") as broker:
        assert await broker.declared(Topology((), (wrong,)))
        assert not await broker.declared(CASCADE.topology())
        assert inventory(rabbitmq, vhost)["bindings"] == []
        assert await broker.declared(intake_topology()), "the connection goes on"


async def test_a_binding_to_nothing_is_a_no(vhost: str) -> None:
    async with briefly(vhost, "test") as broker:
        assert not await broker.declared(due_topology(CASCADE))


async def test_depths_are_those_of_the_admin(vhost: str) -> None:
    """More queues than channels, those that are there between those that are not: each question has its own answer."""
    there = [f"q{number}" for number in range(0, 3 * CHANNELS, 3)]
    asked = [f"q{number}" for number in range(3 * CHANNELS)]
    async with briefly(vhost, "test") as broker:
        assert await broker.declared(Topology((), tuple(map(Queue, there))))
        await publish(vhost, there[1])
        found = await broker.depths(asked)
        assert found == {name: (0 if name in there else None) for name in asked} | {there[1]: 1}
        assert await broker.exists(there[0])
        assert not await broker.exists("q1")
        drawn = await broker.picture(CASCADE, ["q0", "q1"])
        assert await broker.declared(whole(CASCADE))
        await publish(vhost, CASCADE.level(20))
        full = await broker.picture(CASCADE, ["q0", "q1"])
    assert {level.depth for level in drawn.levels} == {None}
    assert [level.level for level in full.levels if level.depth] == [20]
    async with await Admin.connect(vhost) as admin:
        assert await admin.depths(asked) == found


async def test_a_declaration_without_permission_is_refused(rabbitmq: RabbitMQ, vhost: str) -> None:
    rabbitmq.add_user("reader", "reader", vhost=urlsplit(vhost).path[1:], read=".*")
    async with briefly(vhost.replace("guest:guest", "reader:reader"), "test") as broker:
        assert not await broker.declared(Topology((Exchange("mine", "topic"),)))
        assert not await broker.exists("nowhere")


async def test_queues_without_permission_are_hidden(rabbitmq: RabbitMQ, vhost: str) -> None:
    """Unless that is everything."""
    async with briefly(vhost, "test") as broker:
        assert await broker.declared(whole(CASCADE) + Topology((), (Queue("q0"), Queue("q1"))))
    hidden = None if rabbitmq.hides_queues else 0
    for user, rights in (("q0-alone", "^q0$"), ("nothing", "^$")):
        rabbitmq.add_user(user, user, vhost=urlsplit(vhost).path[1:], configure=rights, read=rights)
    async with briefly(vhost.replace("guest:guest", "q0-alone:q0-alone"), "test") as broker:
        seen = await broker.picture(CASCADE, ["q0", "q1"])
    assert (seen.queues["q0"], seen.queues["q1"], seen.queues[CASCADE.strays]) == (0, hidden, hidden)
    assert {level.depth for level in seen.levels} == {hidden}
    levels = [level.name for level in CASCADE.levels()]
    assert set(seen.hidden) == ({"q1", CASCADE.strays, *levels} if hidden is None else set())
    async with briefly(vhost.replace("guest:guest", "nothing:nothing"), "test") as broker:
        if hidden is None:
            with pytest.raises(BrokerRefused, match="ACCESS_REFUSED"):
                await broker.picture(CASCADE, ["q0"])
        else:
            assert (await broker.picture(CASCADE, ["q0"])).queues["q0"] == 0


async def test_a_wrong_password_is_refused(vhost: str) -> None:
    with pytest.raises(BrokerRefused, match="ACCESS_REFUSED"):
        async with briefly(vhost.replace("guest:guest", "guest:wrong"), "test"):
            raise AssertionError("let in")


async def test_a_broker_that_falls_silent_is_out_of_reach(rabbitmq: RabbitMQ, vhost: str) -> None:
    async with Proxy(rabbitmq.port) as proxy:
        url = vhost.replace(f":{rabbitmq.port}", f":{proxy.port}")
        async with briefly(url, "test", patience=0.5) as broker:
            proxy.stall()
            with pytest.raises(BrokerLost, match=r"no answer within 0\.5 s"):
                await broker.declared(whole(CASCADE))
            proxy.cut()


async def test_a_connection_that_is_cut_ends_every_question(rabbitmq: RabbitMQ, vhost: str) -> None:
    async with Proxy(rabbitmq.port) as proxy:
        url = vhost.replace(f":{rabbitmq.port}", f":{proxy.port}")
        async with briefly(url, "test") as broker:
            proxy.stall(to_server=False)
            asking = asyncio.create_task(broker.depths(["a", "b"]))
            await asyncio.sleep(0)
            proxy.cut()
            with pytest.raises(BrokerLost):
                await asking
