"""Publishes hostile messages around a daemon, and says where each of them ended."""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from urllib.parse import unquote

from delayer.core.errors import BrokerLost
from delayer.store import session
from delayer.wire.errors import HeaderTooLarge
from tests.faults.hostile import EMPTY, FORGED_LINE, IMPERSONATOR, NATIVE, STORE, End, Hostile
from tests.faults.place import Place, eventually
from tests.rig.raw import Arrival, Header, Inbox, Message, Props, Raw, content, number
from tests.rig.servers import RabbitMQ

USER = "delayer-hostile"
"""The daemon's user, who may not write to h.closed.out. The password is its name."""
STRAYS, REFUSED, INBOX, MUTE = "delayer.delay-strays", "delays.refused", "h.inbox", "h.mute"
ROUTES = [
    {"from": "delayer.in", "to": "delayer.out"},
    {"from": "h.in", "to": "h.out"},
    {"from": "h.any", "to": "h.out", "allow_exchanges": ["*"]},
    {"from": "h.queue", "to": ""},
    *({"from": f"h.{bad}", "to": f"h.{bad}.out"} for bad in ("missing", "internal", "headers", "unbound")),
    *({"from": f"h.{bad}", "to": f"h.{bad}.out"} for bad in ("full", "closed", "silent")),
    {"from": "h.retry", "retry": {"first": "1s", "attempts": 3, "exhausted": "h.parked"}},
    {"from": "", "to": "h.out"},
]
_OURS = (b"x-delay", b"x-deliver-at", b"x-delay-routing-key", b"x-delay-exchange", b"x-delayer-id", b"x-delayer-due")
_OF_THE_BROKER = (b"x-delivery-count", b"x-delayer-user-id")


class Found(NamedTuple):
    """Where a copy of a message ended."""

    end: End
    reason: str
    arrival: Arrival | None = None


def furnish(rabbitmq: RabbitMQ, vhost: str) -> str:
    """The destinations, good and bad, and the users; returns the URL for the daemon. ``vhost`` as URLs have it."""
    at = f"/api/exchanges/{vhost}"
    for name, kind, internal in (
        ("h.out", "topic", False),
        ("h.private", "topic", False),
        ("h.internal.out", "topic", True),
        ("h.headers.out", "headers", False),
        ("h.unbound.out", "topic", False),
        ("h.full.out", "topic", False),
        ("h.closed.out", "topic", False),
        ("h.silent.out", "topic", False),
    ):
        rabbitmq.api("PUT", f"{at}/{name}", {"type": kind, "durable": True, "internal": internal})
    full = {"x-max-length": 1, "x-overflow": "reject-publish"}
    for name, arguments in ((INBOX, {}), ("h.stolen", {}), ("h.brim", full), (MUTE, {})):
        rabbitmq.api("PUT", f"/api/queues/{vhost}/{name}", {"durable": True, "arguments": arguments})
    for exchange, queue in (
        ("h.out", INBOX), ("h.closed.out", INBOX), ("h.private", "h.stolen"), ("h.full.out", "h.brim"),
        ("h.silent.out", MUTE),
    ):  # fmt: skip
        rabbitmq.api("POST", f"/api/bindings/{vhost}/e/{exchange}/q/{queue}", {"routing_key": "#"})
    rabbitmq.api("POST", f"/api/bindings/{vhost}/e/h.headers.out/q/{INBOX}", {
        "routing_key": "", "arguments": {"x-match": "all", "nobody": "has this"},
    })  # fmt: skip
    rabbitmq.add_user(USER, USER, vhost=unquote(vhost), configure=".*", read=".*", write=r"^(?!h\.closed\.out$).*")
    rabbitmq.add_user(IMPERSONATOR, IMPERSONATOR, vhost=unquote(vhost), configure=".*", read=".*", write=".*")
    rabbitmq.api("PUT", f"/api/users/{IMPERSONATOR}", {"password": IMPERSONATOR, "tags": "impersonator"})
    return rabbitmq.url(unquote(vhost), user=f"{USER}:{USER}")


@dataclass
class Villain:
    """``sent`` is what was published, by body. Made by :meth:`at`."""

    rabbitmq: RabbitMQ
    vhost: str
    place: Place
    raw: Raw
    impersonator: Raw
    inbox: Inbox
    refused: Inbox
    strays: Inbox | None
    sent: dict[bytes, str] = field(default_factory=dict)
    away: set[bytes] = field(default_factory=set)
    empty: int = 0

    @classmethod
    @asynccontextmanager
    async def at(cls, rabbitmq: RabbitMQ, vhost: str, place: Place) -> AsyncIterator[Villain]:
        """``place`` is declared already."""
        async with AsyncExitStack() as stack:
            raw = await stack.enter_async_context(await Raw.connect(place.broker))
            url = rabbitmq.url(unquote(vhost), user=f"{IMPERSONATOR}:{IMPERSONATOR}")
            impersonator = await stack.enter_async_context(await Raw.connect(url))
            await raw.publish(Message("h.full.out", b"", Props(), b"to the brim"))
            strays = await raw.inbox(STRAYS) if place.mode == NATIVE else None
            yield cls(
                rabbitmq, vhost, place, raw, impersonator, await raw.inbox(INBOX), await raw.inbox(REFUSED), strays
            )

    async def publish(self, name: str, case: Hostile, copy: int = 0) -> bytes:
        """Publish one, and return its body. Fails unless the broker takes it where it has to."""
        body = b"" if name == EMPTY else b"hostile %d: %b" % (copy, name.encode())
        message = case.message(body)
        body = message.body
        self.sent[body] = name
        self.empty += name == EMPTY
        if case.end in (End.TURNED_AWAY, End.SOMEWHERE):
            taken = await self._try(message)
            assert not (taken and case.end is End.TURNED_AWAY), f"{name}: the broker took it"
            if not taken:
                self.away.add(body)
        else:
            await (self.impersonator if case.impersonated else self.raw).publish(message)
        return body

    async def _try(self, message: Message) -> bool:
        """On a connection of its own, which may end. Whether the broker took it."""
        raw = await Raw.connect(self.place.broker)
        try:
            await raw.publish(message)
        except HeaderTooLarge:
            return not await turned_away(raw, message)
        except BrokerLost:
            return False
        finally:
            await raw.connection.close()
        return True

    async def witness(self, number_: int) -> None:
        """A good message at once, which must come through now."""
        body = b"witness %d" % number_
        await self.raw.publish(Message("h.in", b"witness", Props(headers=((b"x-delay", number("I", 0)),)), body))
        await self.inbox.got([body], timeout=20)

    async def found(self) -> dict[bytes, list[Found]]:
        """Where everything is by now, by body."""
        ends: dict[bytes, list[Found]] = defaultdict(list)
        for body in self.away:
            ends[body].append(Found(End.TURNED_AWAY, ""))
        for one in self.inbox.arrivals:
            ends[one.delivery.body].append(Found(End.DELIVERED, "", one))
        for one in self.refused.arrivals:
            ends[one.delivery.body].append(Found(End.REFUSED, _said(one, b"x-delayer-refused"), one))
        for one in self.strays.arrivals if self.strays else ():
            ends[one.delivery.body].append(Found(End.HELD, _said(one, b"x-delayer-held"), one))
        if self.place.mode == STORE:
            for body, reason in await held_rows(self.place):
                ends[body].append(Found(End.HELD, reason))
        return ends

    async def all_found(self, *, timeout: float = 45.0) -> dict[bytes, list[Found]]:
        """Wait until each has ended."""

        def everywhere(ends: dict[bytes, list[Found]]) -> bool:
            return not self._missing(ends)

        try:
            return await eventually(self.found, everywhere, timeout=timeout)
        except AssertionError:
            missing = [self.sent[body] for body in self._missing(await self.found())]
            raise AssertionError(f"{len(missing)} have not ended anywhere: {missing}") from None

    def _missing(self, ends: dict[bytes, list[Found]]) -> list[bytes]:
        return [body for body in self.sent if len(ends.get(body, ())) < (self.empty if body == b"" else 1)]


def verify(name: str, case: Hostile, found: Sequence[Found], copies: int = 1, *, sorts: bool = False) -> None:
    """That it ended once, where it should, with what it should have. ``sorts``: see RabbitMQ.sorts_headers."""
    assert len(found) == copies, f"{name}: {found}"
    for end, reason, arrival in found:
        if case.end is End.SOMEWHERE:
            continue
        assert end is case.end, f"{name}: expected {case.end}, found {end} {reason}"
        assert re.search(case.reason, reason), f"{name}: {reason}"
        if end is End.DELIVERED:
            assert arrival is not None
            check_delivered(name, case, arrival, sorts=sorts)


def check_delivered(name: str, case: Hostile, arrival: Arrival, *, sorts: bool) -> None:
    sent = case.message(b"").props
    assert isinstance(sent, Props)
    sent = sent.sorted_if(sorts)
    assert arrival.at_ms >= arrival.due_ms, f"{name}: early"
    assert arrival.delivery.routing_key == (case.key if case.arrives_as is None else case.arrives_as), name
    found = arrival.props
    assert found.without(*_OURS, *_OF_THE_BROKER) == replace(sent, user_id=None, headers=sent.headers or ()).without(
        *_OURS
    ), name
    if sent.user_id is not None:
        assert content(found.one(b"x-delayer-user-id")) == sent.user_id
    for gained in (b"x-delayer-id", b"x-delayer-due"):
        assert len(found.all(gained)) == 1, name


def assert_no_forged_line(events: Sequence[dict[str, object]], stray_lines: Sequence[str]) -> None:
    """Every line is an event of the daemon; what a message says stands inside of one, escaped."""
    assert not stray_lines
    assert len([event for event in events if event["event"] == "ready"]) == 1
    told = json.dumps(events)
    assert "\\u001b" not in told, "an escape sequence came through as it was"
    assert FORGED_LINE.encode("unicode_escape").decode().replace("\\", "\\\\").replace('"', '\\"')[:40] in told


async def turned_away(raw: Raw, message: Message, content_class: int = 60) -> bool:
    """Send frames that no library would make: a content header of any length and class. Whether the broker hung up."""
    properties = message.props if isinstance(message.props, bytes) else message.props.encode()
    address = b"".join(bytes((len(name),)) + name for name in (message.exchange.encode(), message.routing_key))
    method = b"\x00\x3c\x00\x28\0\0" + address + b"\0"
    header = content_class.to_bytes(2, "big") + b"\0\0" + len(message.body).to_bytes(8, "big") + properties
    for kind, payload in ((1, method), (2, header), (3, message.body)):
        frame = bytes((kind,)) + b"\0\x01" + len(payload).to_bytes(4, "big") + payload + b"\xce"
        raw.connection.write(frame)
    done, _ = await asyncio.wait([asyncio.shield(raw.connection.closed)], timeout=20)
    return bool(done)


async def held_rows(place: Place) -> list[tuple[bytes, str]]:
    """Body and reason of everything that is held in the store."""
    assert place.store
    connection = await session.connect(place.store, "test")
    try:
        return [tuple(row) for row in await connection.fetch("SELECT body, reason FROM held")]
    finally:
        await session.close(connection)


def _said(arrival: Arrival, header: bytes) -> str:
    try:
        values = arrival.props.all(header)
    except (AssertionError, IndexError):  # broken bytes, refused as they were
        return ""
    return content(values[0]).decode() if values else ""


def delay_header(milliseconds: int) -> Header:
    return (b"x-delay", number("I", milliseconds))
