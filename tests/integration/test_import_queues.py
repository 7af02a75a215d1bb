"""`delayer import cascade` and `hold-queues`: real queues of other systems, drained into a store in the order of due
instants, and the messages left in them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import aio_pika
import aio_pika.abc
import pytest

from delayer.broker.admin import Admin
from delayer.config.model import Settings
from delayer.config.topology import topology_of
from delayer.core.cascade import Cascade, routing_key
from delayer.core.message import Parcel, Target
from delayer.core.topology import Binding, Exchange, Queue, Topology, arguments
from delayer.format.envelope import envelope_properties
from tests.integration.cli import Run
from tests.support.place import counted
from tests.support.rabbitmq import RabbitMQ
from tests.support.raw import Message, Props, Raw, now_ms, number, text, wire_instant
from tests.support.rows import conserved
from tests.support.store import sql
from tests.support.topology import declare

DELAY = b"NServiceBus.Transport.RabbitMQ.DelayInSeconds"
TIME_SENT = b"NServiceBus.TimeSent"
RETRY: dict[str, Any] = {
    "x-message-ttl": 600_000, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "work",
}  # fmt: skip
"""The arguments of a queue that holds messages for ten minutes."""


def queues(*names: str) -> Topology:
    return Topology(queues=tuple(Queue(name, arguments({"x-queue-type": "quorum"})) for name in names))


async def rows_of(database: str) -> dict[bytes, Mapping[str, Any]]:
    async with sql(database) as admin:
        await conserved(admin)
        return {row["body"]: row for row in await admin.fetch("SELECT * FROM message")}


async def held_of(database: str) -> dict[bytes, Mapping[str, Any]]:
    async with sql(database) as admin:
        return {row["body"]: row for row in await admin.fetch("SELECT * FROM held")}


def nservicebus(n: int, seconds: int, sent_ms: int, **more: Any) -> Props:
    """Properties as its transport publishes them: strings, and the delay as an int32."""
    headers = ((TIME_SENT, text(wire_instant(sent_ms))), (DELAY, number("I", seconds)), (b"n", number("l", n)))
    return Props(headers=headers, delivery_mode=2, message_id=b"m-%d" % n, **more)


@pytest.mark.parametrize("kind", ["nservicebus-v2", "nservicebus-v1"])
async def test_a_cascade_of_nservicebus(delayer: Run, vhost: str, rabbitmq: RabbitMQ, database: str, kind: Any) -> None:
    """Dotted addresses, an address that is a suffix of another, a missing address, a delayed retry, no headers."""
    if kind == "nservicebus-v1" and rabbitmq.version >= (4, 3):
        pytest.skip("RabbitMQ 4.3 refuses x-queue-mode, and with it this cascade")
    cascade = Cascade(kind)
    await declare(vhost, cascade.topology(), queues("Orders", "Sales.Orders", "strange ☃"))
    began = now_ms()
    sent = {
        b"plain": (3_600, b"Orders", nservicebus(1, 3_600, began)),
        b"dotted": (100_000, b"Sales.Orders", nservicebus(2, 100_000, began)),
        b"snowman": (5_000, "strange ☃".encode(), nservicebus(3, 5_000, began)),
        b"gone": (90_000, b"Nobody.Here", nservicebus(4, 90_000, began)),
        b"no headers": (70_000, b"Orders", Props(message_id=b"m-5")),
        b"no properties": (70_001, b"Orders", b"\0\0"),
        b"a long one": (200_000_000, b"Orders", nservicebus(6, 200_000_000, began)),
    }
    retry = nservicebus(7, 600, began - 86_400_000)
    headers = (*(retry.headers or ()), (b"NServiceBus.Retries.Timestamp", text(wire_instant(began))))
    sent[b"retry"] = (600, b"Orders", Props(headers=headers, message_id=b"m-7"))
    # The vendor's tool moves timeouts so: a new delay, the TimeSent of the first sending, perhaps the expiry.
    moved = nservicebus(8, 4_000, began - 60 * 86_400_000)
    sent[b"moved"] = (4_000, b"Orders", moved)
    headers = (*(moved.headers or ()), (b"NServiceBus.Timeout.Expire", text(wire_instant(began + 4_000_000))))
    sent[b"moved, and says so"] = (4_000, b"Orders", Props(headers=headers, message_id=b"m-9"))
    async with await Raw.connect(vhost) as raw:
        for body, (seconds, address, props) in sent.items():
            key = routing_key(seconds, address)
            await raw.publish(Message(cascade.entry(seconds), key, props, body))
    args = ("import", "cascade", "run", "--kind", kind, "--yes", "--json")
    report = json.loads(delayer(*args, expect=1).stdout)
    assert (report["parked"], report["held"]) == (9, 1)
    ended = now_ms()
    rows, held = await rows_of(database), await held_of(database)
    assert set(held) == {b"gone"}
    for body, (seconds, address, props) in sent.items():
        row = (held if body == b"gone" else rows)[body]
        assert (row["to_exchange"], row["to_key"]) == (b"", address)
        sent_as = Props() if isinstance(props, bytes) else props.sorted_if(rabbitmq.sorts_headers)
        assert row["properties"] == sent_as.encode()
        # Never early, and not later than the import could know.
        assert began + seconds * 1000 <= row["due_at"] <= ended + seconds * 1000 + 1_000, body
    async with await Admin.connect(vhost) as admin:
        depths = await admin.depths(level.name for level in cascade.levels())
    assert set(depths.values()) == {0}
    assert json.loads(delayer(*args).stdout)["parked"] == 0


async def test_a_cascade_of_celery(delayer: Run, vhost: str, database: str) -> None:
    """Every message enters at the highest level, without its time of entry."""
    cascade = Cascade("celery")
    bound = Topology(bindings=(Binding(cascade.delivery, "tasks", "queue", "#.tasks"),))
    await declare(vhost, queues("tasks"), cascade.topology() + bound)
    props = Props(headers=((b"id", text("task")),), delivery_mode=2)
    began = now_ms()
    async with await Raw.connect(vhost) as raw:
        for seconds in (1_000, 5_000, 200_000):
            await raw.publish(Message(cascade.level(27), routing_key(seconds, b"tasks"), props, b"%d" % seconds))
    report = json.loads(delayer("import", "cascade", "run", "--kind", "celery", "--yes", "--json").stdout)
    ended, rows = now_ms(), await rows_of(database)
    assert (report["parked"], report["held"], len(rows)) == (3, 0, 3)
    for body, row in rows.items():
        assert 0 <= row["due_at"] - began - int(body) * 1000 <= ended - began + 1_000
        assert row["properties"] == props.encode()


async def test_from_another_broker(delayer: Run, vhost: str, rabbitmq: RabbitMQ, database: str) -> None:
    """Two messages with equal bytes and no identity are still two messages."""
    other = rabbitmq.add_vhost()
    cascade = Cascade("nservicebus-v2")
    await declare(rabbitmq.url(other), cascade.topology())
    await declare(vhost, queues("Orders"))
    twin = Message(cascade.entry(50_000), routing_key(50_000, b"Orders"), Props(), b"twin")
    async with await Raw.connect(rabbitmq.url(other)) as raw:
        await raw.publish(twin, twin, twin._replace(props=nservicebus(1, 50_000, now_ms()), body=b"one"))
    report = json.loads(delayer(*RUN, DELAYER_IMPORT_URL=rabbitmq.url(other)).stdout)
    assert (report["parked"], report["held"]) == (3, 0)
    async with sql(database) as admin:
        assert sorted(body for (body,) in await admin.fetch("SELECT body FROM message")) == [b"one", b"twin", b"twin"]
    rabbitmq.drop_vhost(other)


async def test_our_own_cascade_moves_into_the_store(delayer: Run, vhost: str, database: str) -> None:
    """The import opens the envelopes of native mode."""
    settings = Settings.model_validate({"mode": "native", "broker": {"url": vhost}})
    await declare(vhost, topology_of(settings), Topology(exchanges=(Exchange("delayer.out", "topic"),)))
    cascade = Cascade()
    parcels = [
        Parcel(
            now_ms() + 9_000_000 + n,
            b"delayer.in",
            b"delayer.in",
            b"k",
            Target(b"delayer.out", b"k"),
            b"\0\0",
            b"%d" % n,
        )
        for n in range(5)
    ]
    async with await Raw.connect(vhost) as raw:
        for n, parcel in enumerate(parcels):
            carrier = Message(
                cascade.entry(9_000),
                routing_key(9_000, b"delays.due"),
                envelope_properties(parcel, b"id-%d" % n),
                parcel.body,
            )
            await raw.publish(carrier)
    report = json.loads(delayer("import", "cascade", "run", "--yes", "--json").stdout)
    assert report["parked"] == 5
    rows = await rows_of(database)
    assert {(row["due_at"], row["to_exchange"], row["properties"], body) for body, row in rows.items()} == {
        (one.due_ms, b"delayer.out", b"\0\0", one.body) for one in parcels
    }


EASYNETQ = "Shop.Remind, Shop"


async def test_hold_queues(delayer: Run, vhost: str, rabbitmq: RabbitMQ, database: str) -> None:
    """Hold queues of the usual libraries, with their own names and arguments."""
    families = {
        # Laravel, enqueue, MailerQ's powers of two, Symfony, EasyNetQ, the retry pair with its time in the message.
        "default.delay.900000": {**RETRY, "x-message-ttl": 900_000, "x-dead-letter-routing-key": "default"},
        "enqueue.mail.60000.delayed": {**RETRY, "x-message-ttl": 60_000, "x-dead-letter-routing-key": "enqueue.mail"},
        "mailerq-512": {**RETRY, "x-message-ttl": 512_000},
        "delay_messages_work_10000_delay": {**RETRY, "x-dead-letter-exchange": "messages", "x-expires": 1_200_000},
        f"{EASYNETQ}_00_00_10_00": {**RETRY, "x-dead-letter-exchange": EASYNETQ, "x-dead-letter-routing-key": "#"},
        "work.retry": {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "work"},
    }
    made = tuple(Queue(name, arguments(of)) for name, of in families.items())
    exchanges = Exchange("messages", "direct"), Exchange(EASYNETQ, "topic")
    bound = Binding("messages", "work", "queue", "work"), Binding(EASYNETQ, "work", "queue", "#")
    await declare(vhost, queues("work", "default"), Topology(exchanges, made, bound))
    began = now_ms()
    sent = {
        b"laravel": ("default.delay.900000", Props(message_id=b"2", timestamp=began // 1000), began + 900_000),
        b"old stamp": ("default.delay.900000", Props(timestamp=began // 1000 - 7 * 86_400), began + 900_000),
        b"enqueue": ("enqueue.mail.60000.delayed", Props(), began + 60_000),
        b"mailerq": ("mailerq-512", Props(), began + 512_000),
        b"symfony": ("delay_messages_work_10000_delay", Props(timestamp=began // 1000), began + 600_000),
        b"easynetq": (f"{EASYNETQ}_00_00_10_00", Props(), began + 600_000),
        b"expires": ("work.retry", Props(expiration=b"300000", message_id=b"3"), began + 300_000),
        b"for ever": ("work.retry", Props(message_id=b"4"), None),
    }
    async with await Raw.connect(vhost) as raw:
        for body, (queue, props, _) in sent.items():
            await raw.publish(Message("", queue.encode(), props, body))
    patterns = [word for name in families for word in ("--queue", name.replace("512", "*"))]
    management = {"DELAYER_BROKER__MANAGEMENT_URL": rabbitmq.management_url}
    args = ("import", "hold-queues", "run", *patterns, "--yes", "--json")
    report = json.loads(delayer(*args, expect=1, **management).stdout)
    ended = now_ms()
    rows, held = await rows_of(database), await held_of(database)
    assert (report["parked"], report["held"]) == (len(rows), len(held))
    assert set(held) == {b"enqueue", b"for ever"}  # one has no destination queue, the other no time
    for body, (queue, props, due_ms) in sent.items():
        row = (rows | held)[body]
        of = families[queue]
        own = of.get("x-dead-letter-routing-key", queue)
        assert (row["to_exchange"], row["to_key"]) == (str(of["x-dead-letter-exchange"]).encode(), str(own).encode())
        assert row["exchange"] == b""
        bare = Props(message_id=props.message_id, timestamp=props.timestamp)
        assert row["properties"] == bare.encode()
        if due_ms is not None:
            assert due_ms <= row["due_at"] <= due_ms + ended - began + 1_000, body
    async with await Admin.connect(vhost) as admin:
        assert set((await admin.depths(families)).values()) == {0}


async def test_hold_queues_are_emptied_by_hand(delayer: Run, rabbitmq: RabbitMQ, vhost: str, database: str) -> None:
    hold = {**RETRY, "x-message-ttl": 3_600_000}
    await declare(vhost, Topology(queues=(Queue("hold", arguments(hold)),)), queues("work"))
    began = now_ms()
    half_an_hour_ago = began // 1000 - 1_800
    async with await Raw.connect(vhost) as raw:
        for n in range(5):
            props = Props(message_id=b"%d" % n, timestamp=half_an_hour_ago)
            await raw.publish(Message("", b"hold", props, b"%d" % n))
    by_hand = ("--queue", "hold", "--exchange", "", "--routing-key", "work", "--yes", "--json")
    told = delayer("import", "hold-queues", "run", "--queue", "ho*", "--yes", expect=1).stderr
    assert "patterns need broker.management_url" in told
    told = delayer("import", "hold-queues", "run", "--queue", "hold", "--yes", expect=1).stderr
    assert "its dead-letter exchange cannot be seen without a management URL" in told
    assert "found none" not in told
    late = datetime.fromtimestamp(time.time() + 7_200, UTC).isoformat()
    management = {"DELAYER_BROKER__MANAGEMENT_URL": rabbitmq.management_url}
    meant = (*by_hand, "--ttl", "1h", "--cutoff", late)
    report = json.loads(delayer("import", "hold-queues", "run", *meant, **management).stdout)
    assert (report["parked"], report["left"]) == (0, {"due before the cutoff": 5})
    believing = (*by_hand, "--ttl", "1h", "--believe-timestamps")
    report = json.loads(delayer("import", "hold-queues", "run", *believing, "--limit", "2").stdout)
    assert report["parked"] == 2
    async with await Admin.connect(vhost) as admin:
        assert (await admin.depths(["hold"]))["hold"] == 3
    assert set(await rows_of(database)) == {b"0", b"1"}
    told = delayer("import", "hold-queues", "run", *by_hand, "--ttl", "1h")
    assert json.loads(told.stdout)["parked"] == 3
    half, ended = 1_800_000, now_ms()
    for n, row in sorted((await rows_of(database)).items()):
        waits = half if n in (b"0", b"1") else 2 * half
        assert began + waits - 1_000 <= row["due_at"] <= ended + waits + 1_000, n


CASCADE = Cascade("nservicebus-v2")
RUN = ("import", "cascade", "run", "--kind", "nservicebus-v2", "--yes", "--json")
LEFT = "due before the cutoff"


async def publish(vhost: str, *delays: int) -> int:
    """Publish messages with these delays, in this order; the body is the delay. Return the instant."""
    await declare(vhost, CASCADE.topology(), queues("Orders"))
    began = now_ms()
    async with await Raw.connect(vhost) as raw:
        await raw.publish(
            *(Message(CASCADE.entry(n), routing_key(n, b"Orders"), nservicebus(n, n, began), b"%d" % n) for n in delays)
        )
    return began


async def bodies(database: str) -> list[int]:
    """The parked bodies, in the order of their parking."""
    async with sql(database) as admin:
        return [int(body) for (body,) in await admin.fetch("SELECT body FROM message ORDER BY id")]


def instant(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat()


async def test_the_soonest_due_first(delayer: Run, vhost: str, database: str) -> None:
    """The order is by level from the lowest up, and in a level by the bits below it."""
    delays = [5_000_000, 900, 2_000, 100_001, 800, 70, 100_000, 1_999]
    await publish(vhost, *delays)
    assert json.loads(delayer(*RUN, "--limit", "3").stdout)["parked"] == 3
    assert await bodies(database) == [70, 800, 900]
    assert json.loads(delayer(*RUN).stdout)["parked"] == 5
    assert await bodies(database) == sorted(delays)


async def test_levels_below_the_cutoff_are_not_touched(
    delayer: Run, rabbitmq: RabbitMQ, vhost: str, database: str
) -> None:
    """The run does not read levels below the cutoff. It sees a message it leaves alone twice, and counts it once."""
    began = await publish(vhost, 40, 41, 5_000, 7_000, 200_000)
    cutoff = ("--cutoff", instant(began + 6_000_000))
    management = {"DELAYER_BROKER__MANAGEMENT_URL": rabbitmq.management_url}
    await counted(rabbitmq, vhost)
    words = ("import", "cascade", "preview", "--kind", "nservicebus-v2", *cutoff, "--json")
    seen = json.loads(delayer(*words, **management).stdout)
    assert (seen["messages"], seen["left"]) == (3, {LEFT: 2})
    report = json.loads(delayer(*RUN, *cutoff, **management).stdout)
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


async def test_a_run_ends_beside_a_publisher(delayer: Run, vhost: str, database: str) -> None:
    """A visit takes the messages present at its start; later messages stay, on time, for the next run."""
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


async def test_a_preview_reads_the_arguments_of_queues(
    delayer: Run, vhost: str, rabbitmq: RabbitMQ, database: str
) -> None:
    """A hold queue's arguments name the destination of all its messages, so the preview knows which would be held. The
    run begins with the queue of the shortest time."""
    holds: dict[str, dict[str, Any]] = {
        "work.delay.60000": {**RETRY, "x-message-ttl": 60_000, "x-dead-letter-routing-key": "work@SERVER7"},
        "gone.delay.90000": {**RETRY, "x-message-ttl": 90_000, "x-dead-letter-routing-key": "gone"},
        "any.delay.1000000": {"x-message-ttl": 1_000_000, "x-dead-letter-exchange": "any"},
    }
    made = tuple(Queue(name, arguments(of)) for name, of in holds.items())
    await declare(vhost, Topology((Exchange("any", "topic"),), made, ()), queues("work"))
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
        # The route is the source queue, not the destination.
        found = await admin.fetchrow("SELECT route, to_exchange, to_key FROM message")
        assert tuple(found) == (b"work.delay.60000", b"", b"work")
    assert (await bodies(database), held) == ([0], [1, 1, 2, 2, 2])


async def test_a_pattern_that_meets_work_queues_leaves_them(
    delayer: Run, vhost: str, rabbitmq: RabbitMQ, database: str
) -> None:
    """A work queue and its retry queue have similar names, and both dead-letter; the import must not take the jobs."""
    work: dict[str, Any] = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "work.retry"}
    names = ("work", "work.retry", "work.mirror")
    made = tuple(Queue(name, arguments(of)) for name, of in zip(names, (work, RETRY, RETRY), strict=True))
    await declare(vhost, Topology(queues=made))
    management = {"DELAYER_BROKER__MANAGEMENT_URL": rabbitmq.management_url}

    async def keep(_message: aio_pika.abc.AbstractIncomingMessage) -> None:
        """Keep one message without an acknowledgement."""

    async with await Raw.connect(vhost) as raw, await aio_pika.connect(vhost) as connection:
        for n, name in enumerate(names):
            await raw.publish(*[Message("", name.encode(), Props(), b"%d" % n)] * (n + 1))
        channel = await connection.channel()
        await channel.set_qos(1)
        await (await channel.get_queue("work.mirror")).consume(keep)
        await counted(rabbitmq, vhost)
        words = ("import", "hold-queues", "preview", "--queue", "work*", "--json")
        told = delayer(*words, expect=1, **management).stderr
        assert "queue work.mirror has consumers. Next: name each queue to read" in told
        words = ("--queue", "work.[!m]*", "--json")
        seen = json.loads(delayer("import", "hold-queues", "preview", *words, **management).stdout)
        assert (seen["messages"], seen["left"]) == (2, {})
        report = json.loads(delayer("import", "hold-queues", "run", *words, "--yes", **management).stdout)
        assert (report["parked"], report["held"], report["left"]) == (2, 0, {})
        assert await bodies(database) == [1, 1]
        told = delayer("import", "hold-queues", "preview", "--queue", "wor?", expect=1, **management).stderr
        assert "no queue with a time to live matches wor?" in told
        named = delayer("import", "hold-queues", "preview", "--queue", "work", "--json", **management).stdout
        assert json.loads(named)["messages"] == 1


async def test_delayers_own_queues_are_never_taken(delayer: Run, vhost: str, rabbitmq: RabbitMQ, database: str) -> None:
    """A short pattern matches them too; their messages are on their way, or wait for an operator."""
    delayer("topology", "apply", DELAYER_MODE="native")
    await declare(vhost, Topology(queues=(Queue("delay_work", arguments(RETRY)), Queue("work"))))
    own = ("delays", "delays.refused", "delays.due", "delayer.delay-level-27", "delayer.delay-strays")
    async with await Raw.connect(vhost) as raw:
        for name in (*own, "delay_work"):
            await raw.publish(Message("", name.encode(), Props(), name.encode()))
    management = {"DELAYER_BROKER__MANAGEMENT_URL": rabbitmq.management_url}
    await counted(rabbitmq, vhost)
    words = ("--queue", "delay*", "--ttl", "5m")
    seen = json.loads(delayer("import", "hold-queues", "preview", *words, "--json", **management).stdout)
    assert seen["messages"] == 1
    assert seen["left"] == {}
    report = json.loads(delayer("import", "hold-queues", "run", *words, "--yes", "--json", **management).stdout)
    assert (report["parked"], report["held"], report["left"]) == (1, 0, seen["left"])
    async with await Admin.connect(vhost) as admin:
        assert await admin.depths((*own, "delay_work")) == {**dict.fromkeys(own, 1), "delay_work": 0}
    told = delayer("import", "hold-queues", "run", "--queue", "delays*", "--yes", expect=1, **management).stderr
    assert "no queue with a time to live matches delays*" in told
    for name in own:
        for verb in (("preview",), ("run", "--yes")):
            told = delayer("import", "hold-queues", *verb, "--queue", name, expect=2, **management).stderr
            assert f"--queue {name}: expected a queue of another system, found delayer's own" in told
