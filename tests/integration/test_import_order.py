"""In which order queues are drained, what is not touched, and what can be said of them without looking inside."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

import aio_pika
import aio_pika.abc

from delayer.broker.admin import Admin
from delayer.core.cascade import Cascade, routing_key
from delayer.core.importing import CONSUMED, OWN, UNHELD
from delayer.core.topology import Exchange, Queue, Topology, arguments
from tests.integration.test_cli import Run, delayer
from tests.integration.test_import_queues import declared, now_ms, nservicebus, queues
from tests.integration.test_store_lane import sql
from tests.support.rabbitmq import RabbitMQ
from tests.support.raw import Message, Props, Raw

__all__ = ["delayer"]

CASCADE = Cascade("nservicebus-v2")
RUN = ("import", "cascade", "run", "--kind", "nservicebus-v2", "--yes", "--json")
LEFT = "due before the cutoff"


async def publish(vhost: str, *delays: int) -> int:
    """Messages with these delays, in this order; the body is the delay. When it was."""
    await declared(vhost, CASCADE.topology(), queues("Orders"))
    began = now_ms()
    async with await Raw.connect(vhost) as raw:
        await raw.publish(
            *(Message(CASCADE.entry(n), routing_key(n, b"Orders"), nservicebus(n, n, began), b"%d" % n) for n in delays)
        )
    return began


async def bodies(database: str) -> list[int]:
    """What is parked, in the order of its parking."""
    async with sql(database) as admin:
        return [int(body) for (body,) in await admin.fetch("SELECT body FROM message ORDER BY id")]


def instant(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat()


async def test_the_soonest_due_first(delayer: Run, vhost: str, database: str) -> None:
    """By the levels from the lowest up, and in a level by the bits below it."""
    delayer("db", "upgrade")
    delays = [5_000_000, 900, 2_000, 100_001, 800, 70, 100_000, 1_999]
    await publish(vhost, *delays)
    assert json.loads(delayer(*RUN, "--limit", "3").stdout)["parked"] == 3
    assert await bodies(database) == [70, 800, 900]
    assert json.loads(delayer(*RUN).stdout)["parked"] == 5
    assert await bodies(database) == sorted(delays)


async def test_levels_below_the_cutoff_are_not_touched(delayer: Run, vhost: str, database: str) -> None:
    """A level below the cutoff is not read; what is read and not meant is counted once, though it is met twice."""
    delayer("db", "upgrade")
    began = await publish(vhost, 40, 41, 5_000, 7_000, 200_000)
    cutoff = ("--cutoff", instant(began + 6_000_000))
    seen = json.loads(delayer("import", "cascade", "preview", "--kind", "nservicebus-v2", *cutoff, "--json").stdout)
    assert (seen["messages"], seen["left"]) == (3, {LEFT: 2})
    report = json.loads(delayer(*RUN, *cutoff).stdout)
    assert (report["parked"], report["left"]) == (2, {LEFT: 3})
    assert await bodies(database) == [7_000, 200_000]
    async with await aio_pika.connect(vhost) as connection:
        channel = await connection.channel()
        touched = {}
        for level in (5, 12):
            queue = await channel.get_queue(CASCADE.level(level))
            found = await queue.get()
            assert found is not None
            touched[level] = found.redelivered
    assert touched == {5: False, 12: True}


async def test_a_run_ends_while_somebody_publishes(delayer: Run, vhost: str, database: str) -> None:
    """A visit takes what stood there when it began; what came later stays, on time, for the next run."""
    delayer("db", "upgrade")
    await publish(vhost, 1_000, 1_001, 1_002)
    over, flowing = asyncio.Event(), asyncio.Event()
    late = 0

    async def go_on() -> None:
        nonlocal late
        async with await Raw.connect(vhost) as raw:
            while not over.is_set():
                late += 1
                key = routing_key(1_003, b"Orders")
                await raw.publish(Message(CASCADE.entry(1_003), key, nservicebus(late, 1_003, now_ms()), b"1003"))
                flowing.set()

    publishing = asyncio.create_task(go_on())
    await flowing.wait()
    report = json.loads((await asyncio.to_thread(delayer, *RUN)).stdout)
    over.set()
    await publishing
    assert 3 <= report["parked"] < late
    again = json.loads((await asyncio.to_thread(delayer, *RUN)).stdout)
    assert report["parked"] + again["parked"] == late + 3 == len(await bodies(database))


async def test_a_preview_tells_what_queues_tell(delayer: Run, vhost: str, rabbitmq: RabbitMQ, database: str) -> None:
    """Where all of a hold queue's messages go its arguments say, and what would be held is seen before it moves. Then
    the queue of the shortest time comes first."""
    delayer("db", "upgrade")
    holds: dict[str, dict[str, Any]] = {
        "work.delay.60000": {
            "x-message-ttl": 60_000, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "work@SERVER7",
        },
        "gone.delay.90000": {
            "x-message-ttl": 90_000, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "gone",
        },
        "any.delay.1000000": {"x-message-ttl": 1_000_000, "x-dead-letter-exchange": "any"},
    }  # fmt: skip
    made = tuple(Queue(name, arguments(of)) for name, of in holds.items())
    await declared(vhost, Topology((Exchange("any", "topic"),), made, ()), queues("work"))
    async with await Raw.connect(vhost) as raw:
        for n, name in enumerate(holds):
            await raw.publish(*[Message("", name.encode(), Props(), b"%d" % n)] * (n + 1))
    meant = ("--queue", "*.delay.*", "--rewrite-destination", "s/@.*//")
    words = ("import", "hold-queues", "preview", *meant)
    management = {"DELAYER_BROKER__MANAGEMENT_URL": rabbitmq.management_url}
    seen = json.loads(delayer(*words, "--json", expect=1, **management).stdout)
    assert (seen["messages"], seen["would_be_held"]) == (6, 2)
    told = {one["routing_key"]: (one["messages"], one["problem"]) for one in seen["destinations"]}
    assert told == {"work": (1, None), "gone": (2, "import: there is no such queue or exchange")}
    assert any(remark.startswith("any.delay.1000000: 3 messages, due ") for remark in seen["remarks"])
    table = delayer(*words, expect=1, **management).stdout
    assert "2 of them would be held" in table
    async with await aio_pika.connect(vhost) as connection:
        queue = await (await connection.channel()).get_queue("any.delay.1000000")
        found = await queue.get()
        assert found is not None
        assert not found.redelivered
    report = json.loads(
        delayer("import", "hold-queues", "run", *meant, "--yes", "--json", expect=1, **management).stdout
    )
    assert (report["parked"], report["held"]) == (1, 5)  # nothing is bound for them
    async with sql(database) as admin:
        held = [int(body) for (body,) in await admin.fetch("SELECT body FROM held ORDER BY id")]
        # Whence it came, which says nothing of where it goes.
        found = await admin.fetchrow("SELECT route, to_exchange, to_key FROM message")
        assert tuple(found) == (b"work.delay.60000", b"", b"work")
    assert (await bodies(database), held) == ([0], [1, 1, 2, 2, 2])


async def test_a_pattern_that_meets_work_queues_leaves_them(
    delayer: Run, vhost: str, rabbitmq: RabbitMQ, database: str
) -> None:
    """Of the pair of a work queue and its retries both are called alike and dead-letter; jobs are nobody's to hold."""
    delayer("db", "upgrade")
    retry: dict[str, Any] = {
        "x-message-ttl": 600_000, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "work",
    }  # fmt: skip
    work: dict[str, Any] = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "work.retry"}
    names = ("work", "work.retry", "work.mirror")
    made = tuple(Queue(name, arguments(of)) for name, of in zip(names, (work, retry, retry), strict=True))
    await declared(vhost, Topology(queues=made))
    management = {"DELAYER_BROKER__MANAGEMENT_URL": rabbitmq.management_url}

    async def keep(_message: aio_pika.abc.AbstractIncomingMessage) -> None:
        """Take one, and no more."""

    async with await Raw.connect(vhost) as raw, await aio_pika.connect(vhost) as connection:
        for n, name in enumerate(names):
            await raw.publish(*[Message("", name.encode(), Props(), b"%d" % n)] * (n + 1))
        channel = await connection.channel()
        await channel.set_qos(1)
        await (await channel.get_queue("work.mirror")).consume(keep)
        words = ("--queue", "work*", "--json")
        seen = json.loads(delayer("import", "hold-queues", "preview", *words, expect=1, **management).stdout)
        assert (seen["messages"], seen["left"]) == (2, {UNHELD: 1, CONSUMED: 2})
        report = json.loads(delayer("import", "hold-queues", "run", *words, "--yes", expect=1, **management).stdout)
        assert (report["parked"], report["held"], report["left"]) == (2, 0, {UNHELD: 1, CONSUMED: 2})
        assert await bodies(database) == [1, 1]
        told = delayer("import", "hold-queues", "preview", "--queue", "wor?", expect=1, **management).stderr
        assert "no queue matches wor?, but for queues that are passed over: work, in queues that delay nothing" in told
        named = delayer("import", "hold-queues", "preview", "--queue", "work", "--json", **management).stdout
        assert json.loads(named)["messages"] == 1


async def test_delayers_own_queues_are_never_taken(delayer: Run, vhost: str, rabbitmq: RabbitMQ, database: str) -> None:
    """A pattern that is too short names them too; what they hold is on its way, or waits for a person."""
    delayer("db", "upgrade")
    delayer("topology", "apply", DELAYER_MODE="native")
    retry: dict[str, Any] = {
        "x-message-ttl": 600_000, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "work",
    }  # fmt: skip
    await declared(vhost, Topology(queues=(Queue("delay_work", arguments(retry)), Queue("work"))))
    own = ("delays", "delays.refused", "delays.due", "delayer.delay-level-27", "delayer.delay-strays")
    async with await Raw.connect(vhost) as raw:
        for name in (*own, "delay_work"):
            await raw.publish(Message("", name.encode(), Props(), name.encode()))
    management = {"DELAYER_BROKER__MANAGEMENT_URL": rabbitmq.management_url}
    words = ("--queue", "delay*", "--ttl", "5m")
    seen = json.loads(delayer("import", "hold-queues", "preview", *words, "--json", **management).stdout)
    assert seen["messages"] == 1
    keys = {"intake.queue": 1, "refused.queue": 1, "native.due_queue": 1, "native.prefix": 2}
    assert seen["left"] == {OWN.format(key): messages for key, messages in keys.items()}
    remark = "delays.refused: 1 messages, passed over: in queues of delayer's own (refused.queue): never taken"
    assert remark in seen["remarks"]
    report = json.loads(delayer("import", "hold-queues", "run", *words, "--yes", "--json", **management).stdout)
    assert (report["parked"], report["held"], report["left"]) == (1, 0, seen["left"])
    async with await Admin.connect(vhost) as admin:
        assert await admin.depths((*own, "delay_work")) == {**dict.fromkeys(own, 1), "delay_work": 0}
    told = delayer("import", "hold-queues", "run", "--queue", "delays*", "--yes", expect=1, **management).stderr
    assert "no queue matches delays*, but for queues that are passed over: delays, in queues of delayer's own" in told
    for name in own:
        for verb in (("preview",), ("run", "--yes")):
            told = delayer("import", "hold-queues", *verb, "--queue", name, expect=2, **management).stderr
            assert f"--queue {name}: expected a queue of another system, found delayer's own" in told
