"""What a broker still has after its node was killed: the simulated broker and RabbitMQ agree."""

from __future__ import annotations

from typing import Any

import pytest
from pamqp.commands import Basic, Exchange, Queue

from tests.conformance.broker_scene import Scene
from tests.simulation.broker.threaded import ThreadedBroker
from tests.support.brokers import PACE
from tests.support.raw import Props
from tests.support.servers import RabbitMQ

KINDS = ("quorum", "classic")


async def before(it: Scene) -> None:
    """Queues with ready and unsettled messages; the scene ends in the middle of its work."""
    await it.exchange("end", "topic")
    await it.ask(Exchange.Declare(exchange="transient", exchange_type="fanout"))
    await it.ask(Queue.Declare(queue="exclusive", exclusive=True))
    await it.ask(Queue.Declare(queue="transient", durable=False))
    level = {"message_ttl": 8_000, "dead_letter_exchange": "end"}
    await it.queue("forwarded", **level, dead_letter_strategy="at-least-once", overflow="reject-publish")
    await it.queue("forwarded end")
    await it.bind("forwarded end", "end", "forwarded")
    for kind in KINDS:
        await it.queue(kind, kind, **({"delivery_limit": 3} if kind == "quorum" else {}))
        await it.queue(f"{kind} level", kind, **level)
        await it.queue(f"{kind} end", kind)
        await it.bind(f"{kind} end", "end", f"{kind} level")
        for mode in (2, 1):
            texts = [b"%d of mode %d" % (number, mode) for number in range(4)]
            await it.sent(kind, *texts, props=Props(delivery_mode=mode))
        await it.consume(kind, kind, 5, channel=2)
        tags = await it.take(kind, 5, channel=2)
        it.ack(tags[0], channel=2)
        it.nack(tags[1], channel=2)
        await it.take(kind, 2, channel=2)
    await it.ask(Basic.Qos(0, 0), 2)


async def just_before(it: Scene) -> None:
    """Messages that expire while the broker is down, or later."""
    await it.sent("forwarded", b"1", b"2", props=Props(delivery_mode=2))
    for kind in KINDS:
        await it.sent(f"{kind} level", b"to expire", props=Props(delivery_mode=2))


async def after(it: Scene) -> None:
    for name in ("exclusive", "transient"):
        await it.ask(Queue.Declare(queue=name, passive=True))
    await it.ask(Exchange.Declare(exchange="transient", passive=True))
    await it.count("forwarded end", 2)
    for _ in range(2):
        await it.get("forwarded end")
    for kind, left in (("quorum", 7), ("classic", 3)):
        await it.count(kind, left, 0)
        await it.consume(kind, kind, channel=2)
        await it.take(kind, left, channel=2)
        if kind == "classic":  # a quorum queue may lose what it forwards at most once
            await it.count(f"{kind} end", 1)
            await it.get(f"{kind} end")


async def transcripts(broker: RabbitMQ) -> tuple[list[Any], list[Any]]:
    name = broker.add_vhost()
    async with Scene.open(broker.url(name)) as first:
        await before(first)
        broker.settle()  # A command of the broker, which may take longer than messages take to expire.
        await just_before(first)
        broker.kill()
    broker.start()
    async with Scene.open(broker.url(name)) as second:
        await after(second)
    return first.transcript, second.transcript


async def test_both_brokers_have_the_same_after_a_kill() -> None:
    with RabbitMQ() as real, ThreadedBroker(PACE) as simulated:
        if real.version[:2] != simulated.version[:2]:
            pytest.skip(f"the simulated broker is RabbitMQ {'.'.join(map(str, simulated.version))}")
        (ours, ours_after), (theirs, theirs_after) = await transcripts(simulated), await transcripts(real)
    assert ours == theirs
    assert ours_after == theirs_after
