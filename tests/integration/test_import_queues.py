"""`delayer import cascade` and `hold-queues`: real queues of other systems, drained into a store, and delivered by a
daemon's own release: all in, all out, none early, bytes equal."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from delayer.amqp.edits import enveloped
from delayer.broker.admin import Admin
from delayer.config import Settings
from delayer.config.topology import topology_of
from delayer.core.cascade import Cascade, routing_key
from delayer.core.message import Parcel, Target
from delayer.core.nservicebus import wire_instant
from delayer.core.topology import Binding, Exchange, Queue, Topology, arguments
from tests.faults.place import eventually
from tests.integration.test_cli import Run, delayer
from tests.integration.test_store_lane import sql
from tests.support.rabbitmq import RabbitMQ
from tests.support.raw import Message, Props, Raw, number, text
from tests.support.rows import conserved

__all__ = ["delayer"]

DELAY = b"NServiceBus.Transport.RabbitMQ.DelayInSeconds"
TIME_SENT = b"NServiceBus.TimeSent"


async def declared(url: str, *topologies: Topology) -> None:
    async with await Admin.connect(url) as admin:
        for one in topologies:
            await admin.declare(one)


def queues(*names: str) -> Topology:
    return Topology(queues=tuple(Queue(name, arguments({"x-queue-type": "quorum"})) for name in names))


async def rows_of(database: str) -> dict[bytes, Mapping[str, Any]]:
    async with sql(database) as admin:
        await conserved(admin)
        return {row["body"]: row for row in await admin.fetch("SELECT * FROM message")}


async def held_of(database: str) -> dict[bytes, Mapping[str, Any]]:
    async with sql(database) as admin:
        return {row["body"]: row for row in await admin.fetch("SELECT * FROM held")}


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def nservicebus(n: int, seconds: int, sent_ms: int, **more: Any) -> Props:
    """As its transport publishes: strings, and the delay as an int32."""
    headers = ((TIME_SENT, text(wire_instant(sent_ms))), (DELAY, number("I", seconds)), (b"n", number("l", n)))
    return Props(headers=headers, delivery_mode=2, message_id=b"m-%d" % n, **more)


@pytest.mark.parametrize("kind", ["nservicebus-v2", "nservicebus-v1"])
async def test_a_cascade_of_nservicebus(delayer: Run, vhost: str, rabbitmq: RabbitMQ, database: str, kind: Any) -> None:
    """Dotted addresses, one that is a suffix of another, one that does not exist, a delayed retry, no headers."""
    if kind == "nservicebus-v1" and rabbitmq.version >= (4, 3):
        pytest.skip("RabbitMQ 4.3 refuses x-queue-mode, and with it this cascade")
    cascade = Cascade(kind)
    await declared(vhost, cascade.topology(), queues("Orders", "Sales.Orders", "strange ☃"))
    delayer("db", "upgrade")
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
    # As the vendor's tool moves timeouts: a new delay, the TimeSent of their first sending, perhaps their expiry.
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
        # Never early, and not later than it could be known.
        assert began + seconds * 1000 <= row["due_at"] <= ended + seconds * 1000 + 1_000, body
    async with await Admin.connect(vhost) as admin:
        depths = await admin.depths(level.name for level in cascade.levels())
    assert set(depths.values()) == {0}
    assert json.loads(delayer(*args).stdout)["parked"] == 0


async def test_from_another_broker_and_a_resumed_drain(
    delayer: Run, vhost: str, rabbitmq: RabbitMQ, database: str
) -> None:
    """Killed between the commit and the acknowledgements: nothing is parked twice that has an identity."""
    other = rabbitmq.add_vhost()
    cascade = Cascade("nservicebus-v2")
    await declared(rabbitmq.url(other), cascade.topology())
    await declared(vhost, queues("Orders"))
    delayer("db", "upgrade")
    async with await Raw.connect(rabbitmq.url(other)) as raw:
        began = now_ms()
        for n in range(40):
            props = nservicebus(n, 50_000, began)
            await raw.publish(Message(cascade.entry(50_000), routing_key(50_000, b"Orders"), props, b"%d" % n))
        # Equal in every byte, and without an identity: they are two messages all the same.
        twins = Message(cascade.entry(50_000), routing_key(50_000, b"Orders"), Props(), b"twin")
        await raw.publish(twins, twins)
    arguments = ("import", "cascade", "run", "--kind", "nservicebus-v2", "--yes", "--json")
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("DELAYER_")},
        "DELAYER_CONFIG": os.devnull, "DELAYER_STORE__URL": database, "DELAYER_BROKER__URL": vhost,
        "DELAYER_IMPORT_URL": rabbitmq.url(other), "DELAYER_FAULT": "import.committed",
    }  # fmt: skip
    program = "from delayer.cli.main import main; main()"
    victim = await asyncio.create_subprocess_exec(sys.executable, "-c", program, *arguments, env=environ)
    assert await victim.wait() == -signal.SIGKILL
    assert len(await rows_of(database)) == 41

    async def back() -> int | None:
        async with await Admin.connect(rabbitmq.url(other)) as admin:
            return (await admin.depths([cascade.level(15)]))[cascade.level(15)]

    await eventually(back, lambda depth: depth == 42)
    refused = delayer(*arguments, expect=1).stderr
    assert "begun with other parameters (broker: begun with" in refused
    report = json.loads(delayer(*arguments, DELAYER_IMPORT_URL=rabbitmq.url(other)).stdout)
    assert report["this_time"] == {"parked": 2, "held": 0, "superseded": 0, "already_committed": 40}
    async with sql(database) as admin:
        bodies = [body for (body,) in await admin.fetch("SELECT body FROM message")]
    assert sorted(bodies) == sorted([*(b"%d" % n for n in range(40)), *[b"twin"] * 4])
    assert await back() == 0
    rabbitmq.drop_vhost(other)


async def test_our_own_cascade_moves_into_the_store(delayer: Run, vhost: str, database: str) -> None:
    """What native mode has on its way: carriers are opened."""
    settings = Settings.model_validate({"mode": "native", "broker": {"url": vhost}})
    await declared(vhost, topology_of(settings), Topology(exchanges=(Exchange("delayer.out", "topic"),)))
    delayer("db", "upgrade")
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
                cascade.entry(9_000), routing_key(9_000, b"delays.due"), enveloped(parcel, b"id-%d" % n), parcel.body
            )
            await raw.publish(carrier)
    report = json.loads(delayer("import", "cascade", "run", "--yes", "--json").stdout)
    assert report["parked"] == 5
    rows = await rows_of(database)
    assert {(row["due_at"], row["to_exchange"], row["properties"], body) for body, row in rows.items()} == {
        (one.due_ms, b"delayer.out", b"\0\0", one.body) for one in parcels
    }


async def test_hold_queues(delayer: Run, vhost: str, rabbitmq: RabbitMQ, database: str) -> None:
    """The families of the field, by their own names and arguments."""
    delayer("db", "upgrade")
    retry = {"x-message-ttl": 600_000, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "work"}
    families = {
        # Symfony, Laravel, enqueue, MailerQ's powers of two, the retry pair with its time in a policy or the message.
        "delay_messages__600000_delay": {**retry, "x-dead-letter-exchange": "messages"},
        "default.delay.900000": {**retry, "x-message-ttl": 900_000, "x-dead-letter-routing-key": "default"},
        "enqueue.mail.60000.delayed": {
            "x-message-ttl": 60_000,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": "enqueue.mail",
        },
        "mailerq-512": {**retry, "x-message-ttl": 512_000},
        "work.retry": {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "work"},
    }
    made = tuple(Queue(name, arguments(of)) for name, of in families.items())
    await declared(
        vhost,
        Topology((Exchange("messages", "direct"),), made, ()),
        queues("work", "default"),
        Topology(bindings=(Binding("messages", "work", "queue", "work"),)),
    )
    began = now_ms()
    sent = {
        b"symfony": ("delay_messages__600000_delay", Props(message_id=b"1"), began + 600_000),
        b"laravel": ("default.delay.900000", Props(message_id=b"2", timestamp=began // 1000), began + 900_000),
        b"old stamp": ("default.delay.900000", Props(timestamp=began // 1000 - 7 * 86_400), began + 900_000),
        b"enqueue": ("enqueue.mail.60000.delayed", Props(), began + 60_000),
        b"mailerq": ("mailerq-512", Props(), began + 512_000),
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
    assert set(held) == {b"enqueue", b"for ever"}  # no queue stands behind it; nobody says how long
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


async def test_hold_queues_by_hand_and_what_is_left(delayer: Run, vhost: str, database: str) -> None:
    delayer("db", "upgrade")
    hold = {"x-message-ttl": 3_600_000, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "work"}
    await declared(vhost, Topology(queues=(Queue("hold", arguments(hold)),)), queues("work"))
    began = now_ms()
    half_an_hour_ago = began // 1000 - 1_800
    async with await Raw.connect(vhost) as raw:
        for n in range(5):
            props = Props(message_id=b"%d" % n, timestamp=half_an_hour_ago)
            await raw.publish(Message("", b"hold", props, b"%d" % n))
    by_hand = ("--queue", "hold", "--to-exchange", "", "--to-key", "work", "--yes", "--json")
    told = delayer("import", "hold-queues", "run", "--queue", "ho*", "--yes", expect=1).stderr
    assert "patterns need broker.management_url" in told
    told = delayer("import", "hold-queues", "run", "--queue", "hold", "--yes", expect=1).stderr
    assert "expected a dead-letter exchange" in told
    late = datetime.fromtimestamp(time.time() + 7_200, UTC).isoformat()
    report = json.loads(delayer("import", "hold-queues", "run", *by_hand, "--ttl", "1h", "--cutoff", late).stdout)
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
