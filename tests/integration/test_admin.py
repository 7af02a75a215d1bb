"""Declare, bind, look and remove on a real broker, and the errors of refusals."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Collection
from functools import partial
from typing import Any
from urllib.parse import quote, urlsplit

import aio_pika
import pytest

from delayer.amqp.errors import BrokerLost
from delayer.broker.admin import Admin
from delayer.broker.cascade_depths import cascade_depths
from delayer.broker.errors import BrokerRefused, BrokerUnreachable, TopologyMismatch
from delayer.broker.management_api import Management
from delayer.broker.pipelined_admin import QueueState, pipelined_admin
from delayer.core.cascade import CASCADE_KINDS, ONE_CONSUMER, Cascade, due_topology, intake_topology
from delayer.core.topology import Exchange, Queue, Topology, arguments
from delayer.format.refusal import EntryPoints, RetryEdits
from delayer.set_aside import queues
from tests.support.place import eventually
from tests.support.proxy import Proxy
from tests.support.servers import RabbitMQ
from tests.support.silent import silent
from tests.support.topology import bound, declare

CASCADE = Cascade()
PATIENCE = 100.0
"""For a cascade of quorum queues on a busy machine."""


def whole(cascade: Cascade) -> Topology:
    return cascade.topology() + intake_topology() + due_topology(cascade)


def inventory(rabbitmq: RabbitMQ, vhost: str) -> dict[str, Any]:
    """All durable objects of the vhost, without the broker's own exchanges."""
    name = quote(urlsplit(vhost).path[1:], safe="")
    exchanges = rabbitmq.api("GET", f"/api/exchanges/{name}")
    queues = rabbitmq.api("GET", f"/api/queues/{name}")
    bindings = rabbitmq.api("GET", f"/api/bindings/{name}")
    return {
        "exchanges": {e["name"]: (e["type"], e["arguments"]) for e in exchanges if not re.match("amq\\.|$", e["name"])},
        "queues": {q["name"]: q["arguments"] for q in queues},
        "bindings": sorted((b["source"], b["destination"], b["routing_key"]) for b in bindings if b["source"]),
    }


async def publish(vhost: str, queue: str, body: bytes = b"x") -> None:
    async with await aio_pika.connect(vhost) as connection, connection.channel() as channel:
        message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
        await channel.default_exchange.publish(message, queue)


async def ignore(message: aio_pika.abc.AbstractIncomingMessage) -> None:
    """Get the message without acknowledging it."""


@pytest.mark.parametrize("kind", CASCADE_KINDS)
async def test_the_declared_objects_match_the_topology(rabbitmq: RabbitMQ, vhost: str, kind: str) -> None:
    topology = whole(Cascade(kind))  # type: ignore[arg-type]
    await declare(vhost, topology)
    first = inventory(rabbitmq, vhost)
    await declare(vhost, topology)
    assert inventory(rabbitmq, vhost) == first
    assert first["exchanges"] == {e.name: (e.type, dict(e.arguments)) for e in topology.exchanges}
    filled_in = {"x-queue-type": "classic"} if rabbitmq.lists_queue_types else {}
    assert first["queues"] == {q.name: filled_in | dict(q.arguments) for q in topology.queues}
    assert first["bindings"] == sorted((b.source, b.destination, b.key) for b in topology.bindings)


async def test_every_mismatch_is_named_nothing_is_bound_and_the_connection_stays_usable(
    rabbitmq: RabbitMQ, vhost: str
) -> None:
    wrong = Queue(CASCADE.level(9), arguments({"x-queue-type": "quorum", "x-message-ttl": 511_000}))
    async with pipelined_admin(vhost, "test") as broker:
        await broker.declare(Topology((Exchange(CASCADE.delivery, "fanout"),), (wrong,)))
        with pytest.raises(TopologyMismatch) as caught:
            await broker.declare(CASCADE.topology())
        assert await broker.exists(CASCADE.level(0)), "matching parts are declared"
        assert inventory(rabbitmq, vhost)["bindings"] == []
        await broker.declare(intake_topology())
    kinds = [(finding.kind, finding.name) for finding in caught.value.findings]
    assert kinds == [("exchange", CASCADE.delivery), ("queue", wrong.name)]
    text = str(caught.value)
    assert "x-message-ttl=512000" in text, "the expected value"
    assert "received 'topic' but current is 'fanout'" in text, "the broker's words"


async def test_a_binding_to_nothing_is_no_mismatch(vhost: str) -> None:
    """The exchange was removed just now, and the next attempt declares it again."""
    with pytest.raises(BrokerRefused, match=r"no exchange 'delayer\.delay-delivery'"):
        await declare(vhost, due_topology(Cascade()))


async def test_existing_exchanges_and_queues_are_found(vhost: str) -> None:
    async with await Admin.connect(vhost) as admin:
        await declare(vhost, Topology((Exchange("here", "topic"),), (Queue("there"),)))
        assert await admin.exchange_exists("here")
        assert await admin.exchange_exists("")
        assert not await admin.exchange_exists("there")
        assert await admin.queue_exists("there")
        assert not await admin.queue_exists("here")


async def test_a_queue_that_another_connection_owns_exists_and_has_no_depth(vhost: str) -> None:
    async with await aio_pika.connect(vhost) as other, await Admin.connect(vhost) as admin:
        await (await other.channel()).declare_queue("theirs", exclusive=True)
        assert await admin.queue_exists("theirs")
        assert await admin.depths(["theirs"]) == {"theirs": None}


async def test_remove_leaves_nothing(rabbitmq: RabbitMQ, vhost: str) -> None:
    cascade = Cascade()
    async with await Admin.connect(vhost, management_url=rabbitmq.management_url) as admin:
        await declare(vhost, whole(cascade))
        removal = await admin.remove(whole(cascade))
        assert removal.left == {}
        assert len(removal.removed) == len(whole(cascade).exchanges) + len(whole(cascade).queues)
        again = await admin.remove(whole(cascade))
    assert (again.removed, again.left) == ([], {})
    assert inventory(rabbitmq, vhost) == {"exchanges": {}, "queues": {}, "bindings": []}


async def test_nothing_is_removed_while_messages_remain_unless_forced(rabbitmq: RabbitMQ, vhost: str) -> None:
    topology = whole(Cascade())
    async with await Admin.connect(vhost, management_url=rabbitmq.management_url) as admin:
        await declare(vhost, topology)
        before = inventory(rabbitmq, vhost)
        await publish(vhost, "delayer.delay-level-25")
        removal = await admin.remove(topology)
        assert removal.removed == []
        assert removal.left == {"queue delayer.delay-level-25": "holds 1 message"}
        assert inventory(rabbitmq, vhost) == before
        assert (await admin.remove(topology, force=True)).left == {}
    assert inventory(rabbitmq, vhost)["queues"] == {}


async def test_a_level_that_is_forwarding_a_message_is_not_removed(rabbitmq: RabbitMQ, vhost: str) -> None:
    """AMQP counts no message in it, and the broker keeps it until the next exchange has confirmed it."""
    cascade = Cascade()
    topology, name = cascade.topology(), cascade.level(0)
    await declare(vhost, topology)
    async with await aio_pika.connect(vhost) as connection, connection.channel() as channel:
        await channel.exchange_delete(cascade.delivery)
    await publish(vhost, name)
    by_api = Management(rabbitmq.management_url, urlsplit(vhost).path[1:])
    await eventually(lambda: by_api.delayed([name]), lambda counts: counts == {name: 1})
    async with await Admin.connect(vhost) as admin:
        assert await admin.depths([name]) == {name: 0}
        assert "broker.management_url is not set" in (await admin.remove(topology)).left[f"queue {name}"]
        assert await admin.queue_exists(name)
    async with await Admin.connect(vhost, management_url=rabbitmq.management_url) as admin:
        assert (await admin.remove(topology)).left == {
            f"queue {name}": "holds 1 message that the broker itself delays or forwards"
        }
        assert await admin.queue_exists(name)


async def test_a_queue_whose_members_do_not_run_is_not_removed(rabbitmq: RabbitMQ, vhost: str) -> None:
    """AMQP may answer that it is empty."""
    queues = tuple(Queue(name, arguments({"x-queue-type": "quorum"})) for name in ("delays", "down"))
    await declare(vhost, Topology((), queues))
    member = f"{{'{urlsplit(vhost).path[1:]}_down', node()}}"
    rabbitmq.ctl("eval", f"ra:stop_server(quorum_queues, {member}).")
    async with await Admin.connect(vhost, patience=2.0) as admin:

        async def state(name: str, **_: object) -> QueueState:
            return QueueState(0, 0)

        admin.state = state  # type: ignore[method-assign]
        removal = await admin.remove(Topology((), queues))
    rabbitmq.ctl("eval", f"ra:restart_server(quorum_queues, {member}).")
    assert removal.removed == []
    ((name, reason),) = removal.left.items()
    assert name == "queue down" and "does not answer what needs a majority of its members" in reason


@pytest.mark.parametrize("one_consumer", [False, True])
async def test_a_message_that_the_first_count_misses_stops_the_removal(vhost: str, one_consumer: bool) -> None:
    more = {ONE_CONSUMER: True} if one_consumer else {}
    queue = Queue("delays", arguments({"x-queue-type": "quorum", **more}))
    await declare(vhost, Topology((), (queue,)))
    await publish(vhost, "delays")
    async with await Admin.connect(vhost) as admin:
        truth, answers = admin.state, [QueueState(0, 0)]

        async def state(name: str, **_: object) -> QueueState | None:
            return answers.pop() if answers else await truth(name)

        admin.state = state  # type: ignore[method-assign]
        removal = await admin.remove(Topology((), (queue,)))
    assert removal.left == {"queue delays": "holds 1 message" if one_consumer else "holds a message"}
    async with await Admin.connect(vhost) as admin:
        await eventually(lambda: admin.depths(["delays"]), lambda depths: depths == {"delays": 1})


async def test_a_message_that_arrives_during_the_removal_stops_it_there(
    rabbitmq: RabbitMQ, vhost: str, vhost_name: str
) -> None:
    """The message arrives between the first check and the level's turn. The lower levels remain, so it reaches the
    end."""
    cascade = Cascade()
    message = {"properties": {}, "routing_key": cascade.level(10), "payload": "x", "payload_encoding": "string"}
    top = cascade.level(27).encode()

    def slip_in(data: bytes) -> None:
        if b"\0\x28\0\x14\0\0%c%s" % (len(top), top) in data:  # exchange.delete
            rabbitmq.api("POST", f"/api/exchanges/{vhost_name}/amq.default/publish", message)

    await declare(vhost, cascade.topology())
    async with Proxy(rabbitmq.port) as proxy:
        proxy.overhears = slip_in
        url = rabbitmq.url(vhost_name, port=proxy.port)
        async with await Admin.connect(url, management_url=rabbitmq.management_url) as admin:
            removal = await admin.remove(cascade.topology())
            assert removal.left == {f"queue {cascade.level(10)}": "holds 1 message"}
            assert await admin.depths([cascade.level(10)]) == {cascade.level(10): 1}
    left = inventory(rabbitmq, vhost)
    assert set(left["queues"]) == {cascade.level(n) for n in range(11)} | {cascade.strays}
    assert set(left["exchanges"]) == {cascade.level(n) for n in range(10)} | {cascade.delivery, cascade.strays}


async def test_a_queue_whose_leader_does_not_answer_does_not_count_as_empty(
    rabbitmq: RabbitMQ, vhost: str, vhost_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RabbitMQ counts 0 messages for it."""
    full = Queue("full", arguments({"x-queue-type": "quorum"}))
    topology = Topology((), (full, Queue("empty")), ())
    hasty = partial(pipelined_admin, patience=1.0)
    monkeypatch.setattr(queues, "pipelined_admin", hasty)
    refused = queues.refused_queue(vhost, None, "full", EntryPoints.of("full", []), RetryEdits())
    async with await Admin.connect(vhost, patience=1.0) as admin, hasty(vhost, "test") as broker:
        await declare(vhost, topology)
        await publish(vhost, "full")
        async with silent(rabbitmq, vhost_name, "full"):
            for asking in (
                admin.remove(topology), admin.depths(["empty", "full"]), broker.depths(["empty", "full"]),
                cascade_depths(vhost, "test", CASCADE, ["empty", "full"], patience=1.0), refused.find(),
            ):  # fmt: skip
                with pytest.raises(BrokerUnreachable, match=r"('empty', )?'full' did not answer within 250 ms"):
                    await asking
            assert await broker.exists("full")
        assert (await admin.remove(topology)).left["queue full"] == "holds 1 message"
        assert (await broker.depths(["full"]), await admin.depths(["full"])) == ({"full": 1}, {"full": 1})


async def test_a_slow_connection_is_not_mistaken_for_a_slow_leader(
    rabbitmq: RabbitMQ, vhost: str, vhost_name: str
) -> None:
    await declare(vhost, Topology((), (Queue("empty"),), ()))
    async with Proxy(rabbitmq.port) as proxy:
        url = rabbitmq.url(vhost_name, port=proxy.port)
        async with await Admin.connect(url) as admin, pipelined_admin(url, "test") as broker:
            proxy.slow(delay=0.3)
            assert await broker.depths(["empty"]) == {"empty": 0}
            assert await admin.depths(["empty"]) == {"empty": 0}


async def test_messages_that_the_broker_begins_to_delay_stop_the_removal(vhost: str) -> None:
    """They arrive between the first count and the removal of the exchanges, and no queue depth shows them."""
    topology = whole(Cascade())
    last = topology.queues[-1].name
    async with await Admin.connect(vhost) as admin:
        await declare(vhost, topology)
        answers = [{}, {last: 2}]

        async def delayed(queues: Collection[str], _levels: object, *, fresh: bool = True) -> dict[str, int | None]:
            return dict.fromkeys(queues, 0) | answers.pop(0)

        admin.delayed = delayed  # type: ignore[method-assign]
        removal = await admin.remove(topology)
        assert removal.left == {f"queue {last}": "holds 2 messages that the broker itself delays or forwards"}
        assert await admin.queue_exists(last)


async def test_nothing_is_removed_while_a_queue_has_a_consumer(rabbitmq: RabbitMQ, vhost: str) -> None:
    admin_too = Admin.connect(vhost, management_url=rabbitmq.management_url)
    async with await aio_pika.connect(vhost) as other, await admin_too as admin:
        await declare(vhost, intake_topology())
        queue = await (await other.channel()).get_queue("delays")
        await queue.consume(ignore)
        removal = await admin.remove(intake_topology())
    assert (removal.removed, removal.left) == ([], {"queue delays": "has 1 consumers"})


async def test_an_exchange_with_foreign_bindings_stays(rabbitmq: RabbitMQ, vhost: str) -> None:
    async with await Admin.connect(vhost, management_url=rabbitmq.management_url) as admin:
        await declare(vhost, intake_topology() + Topology(queues=(Queue("audit"),)))
        await declare(vhost, bound("audit", "delayer.in", "#"))
        removal = await admin.remove(intake_topology())
        assert list(removal.left) == ["exchange delayer.in"]
        assert "in use" in removal.left["exchange delayer.in"]
    assert inventory(rabbitmq, vhost)["exchanges"] == {"delayer.in": ("topic", {})}


@pytest.mark.parametrize("kind", [kind for kind in CASCADE_KINDS if kind != "delayer"])
@pytest.mark.parametrize("force", [False, True])
async def test_shared_parts_are_never_removed(rabbitmq: RabbitMQ, vhost: str, kind: str, force: bool) -> None:
    cascade = Cascade(kind)  # type: ignore[arg-type]
    async with await Admin.connect(vhost, management_url=rabbitmq.management_url) as admin:
        await declare(vhost, cascade.topology())
        before = inventory(rabbitmq, vhost)
        await declare(vhost, whole(cascade))
        removal = await admin.remove(whole(cascade), force=force)
    assert set(removal.left.values()) == {"shared with another system"}
    assert inventory(rabbitmq, vhost) == before, "our own queue and its binding went, nothing else"


async def test_a_wrong_password_is_refused_and_not_repeated(vhost: str) -> None:
    with pytest.raises(BrokerRefused, match="Login was refused") as caught:
        await Admin.connect(vhost.replace("guest:guest", "guest:s3cret"))
    assert "s3cret" not in str(caught.value)


async def test_a_vhost_that_does_not_exist_is_named(vhost: str) -> None:
    with pytest.raises(BrokerRefused, match=r"vhost .*-nope not found"):
        await Admin.connect(f"{vhost}-nope")


async def test_a_server_that_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"amqp://guest:s3cret@127.0.0.1:{silent.getsockname()[1]}/"
        with pytest.raises(BrokerUnreachable, match="no answer in time") as caught:
            await Admin.connect(url, patience=0.2)
    assert "s3cret" not in str(caught.value)


async def test_a_lost_connection_is_reported_as_lost(rabbitmq: RabbitMQ, vhost: str) -> None:
    async with await Admin.connect(vhost, name="to be lost") as admin:
        await admin.depths(["nowhere"])
        await asyncio.to_thread(rabbitmq.ctl, "close_all_connections", "--vhost", urlsplit(vhost).path[1:], "test")
        with pytest.raises(BrokerUnreachable):
            while True:  # the broker's close may still be on its way
                await admin.depths(["nowhere"])


async def test_depths_are_those_of_the_admin(vhost: str) -> None:
    """Many queues, existing and missing ones mixed: each question has its own answer."""
    there = [f"q{number}" for number in range(0, 96, 3)]
    asked = [f"q{number}" for number in range(96)]
    async with pipelined_admin(vhost, "test", patience=PATIENCE) as broker:
        await broker.declare(Topology((), tuple(map(Queue, there))))
        await publish(vhost, there[1])
        found = {name: one if isinstance(one, int) else None for name, one in (await broker.depths(asked)).items()}
        assert found == {name: (0 if name in there else None) for name in asked} | {there[1]: 1}
        assert await broker.exists(there[0])
        assert not await broker.exists("q1")
        drawn = await cascade_depths(vhost, "test", CASCADE, ["q0", "q1"], patience=PATIENCE)
        await broker.declare(whole(CASCADE))
        await publish(vhost, CASCADE.level(20))
        full = await cascade_depths(vhost, "test", CASCADE, ["q0", "q1"], patience=PATIENCE)
    assert {level.depth for level in drawn.levels} == {None}
    assert [level.level for level in full.levels if level.depth] == [20]
    async with await Admin.connect(vhost) as admin:
        assert await admin.depths(asked) == found


async def test_a_declaration_without_permission_is_refused(rabbitmq: RabbitMQ, vhost: str) -> None:
    rabbitmq.add_user("reader", "reader", vhost=urlsplit(vhost).path[1:], read=".*")
    async with pipelined_admin(vhost.replace("guest:guest", "reader:reader"), "test") as broker:
        with pytest.raises(BrokerRefused, match="ACCESS_REFUSED"):
            await broker.declare(Topology((Exchange("mine", "topic"),)))
        assert not await broker.exists("nowhere")


async def test_queues_without_permission_are_hidden(rabbitmq: RabbitMQ, vhost: str) -> None:
    """A user without any right gets an error instead."""
    async with pipelined_admin(vhost, "test") as broker:
        await broker.declare(whole(CASCADE) + Topology((), (Queue("q0"), Queue("q1"))))
    hidden = None if rabbitmq.hides_queues else 0
    for user, rights in (("q0-alone", "^q0$"), ("nothing", "^$")):
        rabbitmq.add_user(user, user, vhost=urlsplit(vhost).path[1:], configure=rights, read=rights)
    seen = await cascade_depths(vhost.replace("guest:guest", "q0-alone:q0-alone"), "test", CASCADE, ["q0", "q1"])
    assert (seen.queues["q0"], seen.queues["q1"], seen.queues[CASCADE.strays]) == (0, hidden, hidden)
    assert {level.depth for level in seen.levels} == {hidden}
    levels = [level.name for level in CASCADE.levels()]
    assert set(seen.hidden) == ({"q1", CASCADE.strays, *levels} if hidden is None else set())
    look = cascade_depths(vhost.replace("guest:guest", "nothing:nothing"), "test", CASCADE, ["q0"])
    if hidden is None:
        with pytest.raises(BrokerRefused, match="ACCESS_REFUSED"):
            await look
    else:
        assert (await look).queues["q0"] == 0


async def test_a_broker_that_falls_silent_is_out_of_reach(rabbitmq: RabbitMQ, vhost: str) -> None:
    async with Proxy(rabbitmq.port) as proxy:
        url = vhost.replace(f":{rabbitmq.port}", f":{proxy.port}")
        async with pipelined_admin(url, "test", patience=0.5) as broker:
            proxy.stall()
            with pytest.raises(BrokerLost, match=r"no answer within 0\.5 s"):
                await broker.declare(whole(CASCADE))
            proxy.cut()


async def test_a_cut_connection_fails_every_request(rabbitmq: RabbitMQ, vhost: str) -> None:
    async with Proxy(rabbitmq.port) as proxy:
        url = vhost.replace(f":{rabbitmq.port}", f":{proxy.port}")
        async with pipelined_admin(url, "test") as broker:
            proxy.stall(to_server=False)
            asking = asyncio.create_task(broker.depths(["a", "b"]))
            await asyncio.sleep(0)
            proxy.cut()
            with pytest.raises(BrokerLost):
                await asking
