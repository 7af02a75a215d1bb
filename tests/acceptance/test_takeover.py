"""Unchanged applications: NServiceBus endpoints and Celery, whose long delays the daemon takes over."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import pytest

from delayer.broker.admin import Admin
from delayer.core.cascade import LEVELS, Cascade, Kind, routing_key
from delayer.core.topology import Binding, Exchange, Queue, Topology, arguments
from tests.support.daemon import DaemonProcess
from tests.support.place import eventually
from tests.support.raw import Inbox, Message, Props, Raw, now_ms, number, text, wire_instant
from tests.support.servers import Postgres, RabbitMQ
from tests.support.store import sql
from tests.support.topology import declare

ENDPOINTS = ("Sales.Orders", "Orders", "Billing")
DAY_MS = 86_400_000
LATE_MS = 3_000
"""The time of a dead-letter hop, on a busy machine."""
HELD = "SELECT count(*) FROM held"
DUES = "SELECT extract(epoch FROM due_at) * 1000 FROM message ORDER BY due_at"


def endpoints(cascade: Cascade) -> Topology:
    """The declarations of NServiceBus endpoints at their start: the cascade, and for each an exchange with a queue."""
    return cascade.topology() + Topology(
        tuple(Exchange(name, "fanout") for name in ENDPOINTS),
        tuple(Queue(name, arguments({"x-queue-type": "quorum"})) for name in ENDPOINTS),
        tuple(Binding(name, name, "queue", "") for name in ENDPOINTS)
        + tuple(Binding(cascade.delivery, name, "exchange", f"#.{name}") for name in ENDPOINTS),
    )


def nservicebus_message(cascade: Cascade, seconds: int, address: str, body: str, **more: str) -> Message:
    """A message as the transport publishes it: to the level of the highest bit, with a 32-bit delay and the time of
    sending. It has the headers by which versions 9 and 10 recognise a confirm."""
    said = {
        "NServiceBus.MessageId": body,
        "NServiceBus.MessageIntent": "Send",
        "NServiceBus.EnclosedMessageTypes": "Shop.Remind, Shop, Version=1.0.0.0",
        "NServiceBus.TimeSent": wire_instant(now_ms()),
        "NServiceBus.DeliverAt": wire_instant(now_ms() + seconds * 1000),
        "NServiceBus.Transport.RabbitMQ.ConfirmationId": "7",
        **more,
    }
    headers = (
        *((name.encode(), text(value)) for name, value in said.items()),
        (b"NServiceBus.Transport.RabbitMQ.DelayInSeconds", number("I", seconds)),
        (b"x-dotnet-pub-seq-no", number("l", 7)),
    )
    props = Props(
        content_type=b"text/xml", headers=headers, delivery_mode=2, correlation_id=b"c-1", reply_to=b"Billing",
        message_id=body.encode(), type=b"Shop.Remind",
    )  # fmt: skip
    return Message(cascade.entry(seconds), routing_key(seconds, address.encode()), props, body.encode())


@dataclass
class Shop:
    """A vhost, a store, and the consumers of the queues."""

    rabbitmq: RabbitMQ
    vhost: str
    postgres: Postgres
    database: str
    raw: Raw
    inboxes: dict[str, Inbox]

    async def numbers(self, statement: str) -> list[int]:
        """The first column of the store's answer."""
        async with sql(self.postgres.url(self.database)) as connection:
            return [int(row[0]) for row in await connection.fetch(statement)]

    def topology(self) -> Any:
        """The other system's exchanges, queues and bindings; the daemon may not change, add or remove any."""
        found: dict[str, object] = {}
        for kind in ("exchanges", "queues", "bindings"):
            rows = self.rabbitmq.api("GET", f"/api/{kind}/{quote(self.vhost, safe='')}")
            keys = ("source", "destination", "routing_key", "name", "type", "durable", "arguments")
            facts = [{key: row[key] for key in keys if key in row} for row in rows]
            ours = ("delays", "delayer.")
            found[kind] = sorted(
                json.dumps(fact, sort_keys=True)
                for fact in facts
                if not any(str(fact.get(key, "")).startswith(ours) for key in ("name", "source", "destination"))
            )
        return found

    @asynccontextmanager
    async def daemon(
        self, kind: Kind, levels_from: int, *, prefix: str = "", ends: int = 0
    ) -> AsyncIterator[DaemonProcess]:
        """A daemon with the rights of docs/security.md: it cannot declare, bind or delete anything of the owner."""
        cascade, own = Cascade(kind, owner=prefix), r"delays|delays\.refused|delayer\.in"
        levels = "|".join(re.escape(cascade.level(level)) for level in range(levels_from, LEVELS))
        self.rabbitmq.add_user(
            "taker", "sesame", vhost=self.vhost,
            configure=rf"^({own}|delayer\.store\..*)$",
            write=f"^({own}|{re.escape(cascade.delivery)})$", read=f"^({own}|{levels})$",
        )  # fmt: skip
        environ = {
            "BROKER__URL": self.rabbitmq.url(self.vhost, user="taker:sesame"),
            "STORE__URL": self.postgres.url(self.database),
            "TAKEOVER": json.dumps([{"cascade": kind, "levels_from": levels_from, "prefix": prefix}]),
        }
        async with DaemonProcess(environ) as daemon:
            await daemon.ready()
            yield daemon
            assert await (daemon.wait() if ends else daemon.stop()) == ends, daemon.tail()
            assert not daemon.stray_lines


@asynccontextmanager
async def shop(rabbitmq: RabbitMQ, postgres: Postgres, database: str) -> AsyncIterator[Shop]:
    vhost = rabbitmq.add_vhost()
    async with await Raw.connect(rabbitmq.url(vhost)) as raw:
        yield Shop(rabbitmq, vhost, postgres, database, raw, {})
    rabbitmq.drop_vhost(vhost)


def judged(sent: Mapping[str, tuple[Message, int]], inbox: Inbox, names: Sequence[str]) -> None:
    """Check that each came once, neither early nor late, with unchanged bytes but for our two headers."""
    for name in names:
        message, due_ms = sent[name]
        arrival = inbox.only(name.encode())
        assert due_ms <= arrival.at_ms <= due_ms + LATE_MS, (name, arrival.at_ms - due_ms)
        assert arrival.delivery.routing_key == message.routing_key
        assert isinstance(message.props, Props)
        left = arrival.props.without(
            b"x-delayer-id", b"x-delayer-due", b"x-death", prefixes=(b"x-first-death-", b"x-last-death-")
        )
        assert sorted(left.headers or ()) == sorted(message.props.headers or ())
        assert Props.encode(left)[:2] == message.props.encode()[:2]
        assert left.message_id == message.props.message_id


@pytest.mark.parametrize("kind", ["nservicebus-v2", "nservicebus-v1"])
async def test_endpoints_of_nservicebus_do_not_notice(
    kind: Kind, rabbitmq: RabbitMQ, postgres: Postgres, schema: str
) -> None:
    """From level 1 up: the broker keeps delays of a second, the daemon takes over the rest. Both arrive alike."""
    cascade = Cascade(kind)
    async with shop(rabbitmq, postgres, schema) as it:
        await declare(rabbitmq.url(it.vhost), endpoints(cascade))
        before = it.topology()
        for name in ENDPOINTS:
            it.inboxes[name] = await it.raw.inbox(name)
        async with it.daemon(kind, 1) as daemon:
            sent: dict[str, tuple[Message, int]] = {}
            for address in (*ENDPOINTS, "Missing.Endpoint"):
                for seconds in (0, 1, 2, 3, 5) if address != "Missing.Endpoint" else (2, 3):
                    body = f"{address} after {seconds}"
                    due_ms = now_ms() + seconds * 1000  # Before the message, which carries its due instant.
                    sent[body] = (nservicebus_message(cascade, seconds, address, body), due_ms)
            # A delayed retry: all headers except the time of the failure are from an earlier sending, long ago.
            retry = "Billing retried after 4"
            old = dict.fromkeys(("NServiceBus.TimeSent", "NServiceBus.DeliverAt"), wire_instant(now_ms() - 86_400_000))
            old["NServiceBus.Retries"] = "2"
            failed_ms = now_ms()
            old["NServiceBus.Retries.Timestamp"] = wire_instant(failed_ms)
            sent[retry] = (nservicebus_message(cascade, 4, "Billing", retry, **old), failed_ms + 4_000)
            await it.raw.publish(*(message for message, _ in sent.values()))
            await declare(rabbitmq.url(it.vhost), endpoints(cascade))  # like an endpoint that has just started
            wanted = [name for name in sent if not name.startswith("Missing")]
            for name in ENDPOINTS:
                # A queue bound with #.Orders also gets the messages for Sales.Orders: its owner bound it so.
                own = [one for one in wanted if one.startswith(name) or (name == "Orders" and "Orders" in one)]
                await it.inboxes[name].got([one.encode() for one in own])
                judged(sent, it.inboxes[name], own)
                assert set(it.inboxes[name].counts) == {one.encode() for one in own}
            held = await daemon.event("message held")
            assert held["exchange"] == cascade.delivery
            await eventually(lambda: it.numbers(HELD), lambda found: found == [2])
            assert sum(await it.numbers("SELECT n FROM counter WHERE kind = 'parked'")) == 3 * 3 + 2 + 1
            assert it.topology() == before
            async with await Admin.connect(rabbitmq.url(it.vhost)) as admin:
                assert set((await admin.depths(one.name for one in cascade.levels())).values()) == {0}


async def test_long_delays_are_parked_with_their_due_instant(
    rabbitmq: RabbitMQ, postgres: Postgres, schema: str
) -> None:
    """From level 6, the default; the daemon also takes over messages that were in the levels before it started."""
    cascade = Cascade("nservicebus-v2")
    async with shop(rabbitmq, postgres, schema) as it:
        await declare(rabbitmq.url(it.vhost), endpoints(cascade))
        delays = (63, 64, 65, 3600, 86_400, 268_435_455)
        began = now_ms()
        await it.raw.publish(*(nservicebus_message(cascade, one, "Billing", f"{one}") for one in delays))
        async with it.daemon("nservicebus-v2", 6):
            dues = await eventually(lambda: it.numbers(DUES), lambda found: len(found) == len(delays) - 1)
            for due_ms, seconds in zip(dues, delays[1:], strict=True):
                assert 0 <= due_ms - began - seconds * 1000 <= 2_000
            async with await Admin.connect(rabbitmq.url(it.vhost)) as admin:
                depths = await admin.depths(one.name for one in cascade.levels())
            assert {name: depth for name, depth in depths.items() if depth} == {"nsb.v2.delay-level-05": 1}
            # The vendor's tool moves timeouts into the cascade so: a new delay, with an old TimeSent.
            published = now_ms()
            long_ago = wire_instant(published - 60 * DAY_MS)
            old = {"NServiceBus.TimeSent": long_ago, "NServiceBus.DeliverAt": long_ago}
            expire = {"NServiceBus.Timeout.Expire": wire_instant(published + 7_000_000)}
            await it.raw.publish(
                nservicebus_message(cascade, 5_000, "Billing", "moved", **old),
                nservicebus_message(cascade, 7_000, "Billing", "moved, and says so", **old, **expire),
            )
            after = published - began
            moved = await eventually(lambda: it.numbers(DUES), lambda found: len(found) == len(delays) + 1)
            waits = [due_ms - began for due_ms in moved if due_ms not in dues]
            assert 5_000_000 + after <= waits[0] <= 5_000_000 + after + LATE_MS
            assert waits[1] == 7_000_000 + after


def by_kombu(url: str, work: Callable[[Any], None]) -> None:
    import kombu

    with kombu.Connection(url, transport_options={"confirm_publish": True}) as connection:
        work(connection)


def tasks_of_celery(connection: Any, prefix: str = "") -> None:
    """Declare as a worker does at its start: the cascade, and a queue that is bound to it."""
    import kombu
    from kombu.transport import native_delayed_delivery as delayed

    delayed.declare_native_delayed_delivery_exchanges_and_queues(connection, "quorum", prefix)
    tasks = kombu.Queue(
        "tasks", kombu.Exchange("tasks", type="topic"), routing_key="tasks",
        queue_arguments={"x-queue-type": "quorum"},
    )  # fmt: skip
    tasks.bind(connection.default_channel).declare()
    delayed.bind_queue_to_native_delayed_delivery_exchange(connection, tasks, prefix)


@pytest.mark.parametrize("prefix", ["", pytest.param("shop", marks=pytest.mark.long)])
async def test_tasks_of_celery_by_kombu(rabbitmq: RabbitMQ, postgres: Postgres, schema: str, prefix: str) -> None:
    """Kombu itself declares, binds and publishes, also with a prefix before its names."""
    pytest.importorskip("kombu")
    from kombu.transport import native_delayed_delivery as delayed

    async with shop(rabbitmq, postgres, schema) as it:
        dues: dict[bytes, int] = {}

        def publish(connection: Any) -> None:
            producer = connection.Producer(connection.default_channel)
            for seconds in (1, 2, 3, 6):
                for key, expected in (("tasks", True), ("nobody", False)):
                    body, due_ms = f"{key} after {seconds}".encode(), now_ms() + seconds * 1000
                    producer.publish(
                        body,
                        exchange=delayed.level_name(delayed.MAX_LEVEL, prefix),
                        routing_key=delayed.calculate_routing_key(seconds, key),
                        headers={"task": "shop.remind", "id": body.decode(), "eta": None, "retries": 0},
                        content_type="application/octet-stream",
                        content_encoding="binary",
                    )
                    if expected:
                        dues[body] = due_ms

        url = rabbitmq.url(it.vhost)
        await asyncio.to_thread(by_kombu, url, lambda connection: tasks_of_celery(connection, prefix))
        inbox = await it.raw.inbox("tasks")
        before = it.topology()
        async with it.daemon("celery", 1, prefix=prefix):
            await asyncio.to_thread(by_kombu, url, publish)
            await inbox.got(list(dues))
            for body, due_ms in dues.items():
                arrival = inbox.only(body)
                # Neither kombu nor the broker records the time of entry: the message may be late by its level's time.
                assert due_ms <= arrival.at_ms <= due_ms + LATE_MS, (body, arrival.at_ms - due_ms)
                assert arrival.props.one(b"task") == text("shop.remind")
            assert set(inbox.counts) == set(dues)
            await eventually(lambda: it.numbers(HELD), lambda found: found == [3])
            assert it.topology() == before
