"""The delays of other systems' messages, said as those systems say them, in both modes. Never early, and once each."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import pytest

from delayer.core.cascade import routing_key
from delayer.core.nservicebus import wire_instant
from tests.acceptance.world import Things
from tests.support.daemon import DaemonProcess
from tests.support.raw import Header, Message, Props, Raw, Value, now_ms, number, text
from tests.support.servers import Postgres, RabbitMQ

ROUTES = [
    {"from": "nsb", "to": "out", "delay_from": ["nservicebus"]},
    {"from": "timeouts", "delay_from": ["nservicebus-timeout"]},
    {"from": "bits", "to": "out", "delay_from": ["routing-key-bits"]},
    {"from": "celery", "to": "out", "delay_from": ["celery-eta"]},
    {"from": "json", "to": "out", "delay_from": ["json:/nextattempt/time"]},
]
LATE_MS = 3_000


@dataclass(frozen=True)
class Said:
    """``due_ms``: not before, and not ``LATE_MS`` after it. ``refused``: the reason begins so."""

    through: str
    due_ms: int
    headers: tuple[Header, ...] = ()
    key: bytes = b"inbox"
    body: bytes = b""
    encoding: bytes | None = None
    refused: str = ""


def nsb(now: int, seconds: int, sent_ago_ms: int, *more: Header) -> tuple[Header, ...]:
    delay = (b"NServiceBus.Transport.RabbitMQ.DelayInSeconds", number("I", seconds))
    return (delay, (b"NServiceBus.TimeSent", text(wire_instant(now - sent_ago_ms))), *more)


def timeout(due_ms: int, name: str = "RouteExpiredTimeoutTo") -> tuple[Header, ...]:
    expire = (b"NServiceBus.Timeout.Expire", text(wire_instant(due_ms)))
    to = b"NServiceBus.ReplyToAddress" if name == "ReplyToAddress" else b"NServiceBus.Timeout." + name.encode()
    return (expire, (to, text("inbox")))


def eta(value: Value) -> tuple[Header, ...]:
    return ((b"eta", value),)


def cases(now: int) -> Mapping[str, Said]:
    soon = datetime.fromtimestamp(now // 1000 + 2, UTC)
    soon_ms = (now // 1000 + 2) * 1000
    told = json.dumps({"nextattempt": {"time": f"{soon:%Y-%m-%d %H:%M:%S}"}}).encode()
    retried = (b"NServiceBus.Retries.Timestamp", text(wire_instant(now)))
    return {
        "nservicebus": Said("nsb", now + 2_000, nsb(now, 2, 0)),
        "nservicebus, sent a while ago": Said("nsb", now + 1_500, nsb(now, 30, 28_500)),
        "nservicebus, long due": Said("nsb", now, nsb(now, 30, 60_000)),
        "nservicebus, retried": Said("nsb", now + 2_000, nsb(now, 2, 86_400_000, retried)),
        "nservicebus, no delay": Said("nsb", now, nsb(now, 0, 0)[1:]),
        "nservicebus, unreadable": Said(
            "nsb", 0, (*nsb(now, 2, 0)[:1], (b"NServiceBus.TimeSent", text("x"))), refused="nservicebus: "
        ),
        "timeout": Said("timeouts", now + 2_000, timeout(now + 2_000), b"elsewhere"),
        "timeout, reply to": Said("timeouts", now + 2_000, timeout(now + 2_000, "ReplyToAddress"), b"elsewhere"),
        "timeout, past": Said("timeouts", now, timeout(now - 5_000), b""),
        "timeout, no address": Said(
            "timeouts", 0, timeout(now + 2_000, "Other"), refused="nservicebus-timeout: expected the address"
        ),
        "bits": Said("bits", now + 3_000, key=routing_key(3, b"inbox")),
        "bits, none": Said("bits", now),
        "eta": Said("celery", soon_ms, eta(text(soon.isoformat()))),
        "eta without a zone": Said("celery", soon_ms, eta(text(soon.replace(tzinfo=None).isoformat()))),
        "eta, void": Said("celery", now, eta(Value(b"V", b""))),
        "json": Said("json", soon_ms, body=told),
        "json in gzip": Said("json", soon_ms, body=gzip.compress(told), encoding=b"gzip"),
        "json without it": Said("json", now, body=b"{}"),
        "no json": Said("json", 0, body=b"mail", refused="json:/nextattempt/time: expected a JSON body"),
    }


@pytest.mark.parametrize("mode", ["store", "native"])
async def test_the_forms_of_other_systems(mode: str, rabbitmq: RabbitMQ, postgres: Postgres, schema: str) -> None:
    vhost = rabbitmq.add_vhost()
    things = Things(rabbitmq, vhost)
    things.exchange("out")
    things.queue("inbox")
    things.bind("out", "inbox")
    environ = {"MODE": mode, "BROKER__URL": rabbitmq.url(vhost), "ROUTE": json.dumps(ROUTES)}
    environ |= {"STORE__URL": postgres.url(schema)} if mode == "store" else {}
    async with DaemonProcess(environ) as daemon, await Raw.connect(rabbitmq.url(vhost)) as raw:
        await daemon.ready()
        inbox, refused = await raw.inbox("inbox"), await raw.inbox("delays.refused")
        said = {name.encode(): one for name, one in cases(now_ms()).items()}
        await raw.publish(
            *(
                Message(
                    one.through,
                    one.key,
                    Props(headers=one.headers or None, delivery_mode=2, message_id=name, content_encoding=one.encoding),
                    one.body,
                )
                for name, one in said.items()
            )
        )
        wanted = sum(not one.refused for one in said.values())
        assert await inbox.until(lambda: len(inbox.arrivals) >= wanted), daemon.tail()
        assert await refused.until(lambda: len(refused.arrivals) >= len(said) - wanted), daemon.tail()
        arrived = {arrival.props.message_id: arrival for arrival in (*inbox.arrivals, *refused.arrivals)}
        assert len(arrived) == len(inbox.arrivals) + len(refused.arrivals) == len(said)
        for name, one in said.items():
            arrival = arrived[name]
            assert arrival.delivery.body == one.body
            if one.refused:
                reason = arrival.props.one(b"x-delayer-refused").raw[4:]
                assert reason.startswith(one.refused.encode()), (name, reason)
            else:
                assert one.due_ms <= arrival.at_ms <= one.due_ms + LATE_MS, (name, arrival.at_ms - one.due_ms)
                assert arrival.delivery.routing_key.endswith(b"inbox"), name
                kept = set(arrival.props.headers or ()) & set(one.headers)
                assert kept == set(one.headers), name
        assert await daemon.stop() == 0, daemon.tail()
    rabbitmq.drop_vhost(vhost)
