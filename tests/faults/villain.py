"""Publishes hostile messages around a daemon, and reports where each of them ended."""

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

from delayer.amqp.errors import BrokerLost
from delayer.core.cascade import Cascade
from tests.faults.hostile import EMPTY, FORGED_LINE, IMPERSONATOR, NATIVE, STORE, End, Hostile
from tests.support import reworded
from tests.support.place import Place, eventually
from tests.support.raw import Arrival, Header, Inbox, Message, Props, Raw, content, number
from tests.support.servers import RabbitMQ
from tests.support.store import sql

USER = "delayer-hostile"
"""The daemon's user, who may not write to h.closed.out. The password is its name."""
STRAYS, REFUSED, INBOX, MUTE = "delayer.delay-strays", "delays.refused", "h.inbox", "h.mute"
ATTEMPTS, RETRY_LEVEL = "h.attempts", "delayer.delay-level-03"
"""A queue that gets a copy of each message in the level of 8 s: the first retry, after 8 to 10 s, enters it."""
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
CONTENT_CLASS = 60
_OURS = (b"x-delay", b"x-deliver-at", b"x-delay-routing-key", b"x-delay-exchange", b"x-delayer-id", b"x-delayer-due")
_OF_THE_BROKER = (b"x-delivery-count", b"x-delayer-user-id")


class Found(NamedTuple):
    """The end of one copy of a message."""

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
    """Made by :meth:`at`. ``sent``: the published messages and their names, by body."""

    rabbitmq: RabbitMQ
    vhost: str
    place: Place
    raw: Raw
    impersonator: Raw
    inbox: Inbox
    refused: Inbox
    attempts: Inbox | None
    """In native mode, copies of the messages that go back into the broker after a failed attempt, among others."""
    strays: Inbox | None
    sent: dict[bytes, tuple[str, Hostile]] = field(default_factory=dict)
    away: set[bytes] = field(default_factory=set)
    empty: int = 0
    witnesses: int = 0

    @classmethod
    @asynccontextmanager
    async def at(cls, rabbitmq: RabbitMQ, vhost: str, place: Place) -> AsyncIterator[Villain]:
        """The queues and exchanges of ``place`` must exist."""
        async with AsyncExitStack() as stack:
            raw = await stack.enter_async_context(await Raw.connect(place.broker))
            url = rabbitmq.url(unquote(vhost), user=f"{IMPERSONATOR}:{IMPERSONATOR}")
            impersonator = await stack.enter_async_context(await Raw.connect(url))
            await raw.publish(Message("h.full.out", b"", Props(), b"to the brim"))
            attempts = strays = None
            if place.mode == NATIVE:
                rabbitmq.api("PUT", f"/api/queues/{vhost}/{ATTEMPTS}", {"durable": True})
                # A delaying broker has attempts in the due queue, along with every other envelope.
                way = Cascade().delivery if rabbitmq.delays_messages else RETRY_LEVEL
                rabbitmq.api("POST", f"/api/bindings/{vhost}/e/{way}/q/{ATTEMPTS}", {"routing_key": "#"})
                attempts, strays = await raw.inbox(ATTEMPTS), await raw.inbox(STRAYS)
            inbox, refused = await raw.inbox(INBOX), await raw.inbox(REFUSED)
            yield cls(rabbitmq, vhost, place, raw, impersonator, inbox, refused, attempts, strays)

    async def publish(self, name: str, case: Hostile, copy: int = 0) -> None:
        """Publish one. Fails unless the broker accepts or rejects it, as the case says."""
        message = case.message(b"" if name == EMPTY else b"hostile %d: %b" % (copy, name.encode()))
        body = message.body
        case = case.at(self.rabbitmq)
        self.sent[body] = name, case
        self.empty += name == EMPTY
        if case.end is End.TURNED_AWAY:
            assert not await self._try(message, case.content_class), f"{name}: the broker took it"
            self.away.add(body)
        else:
            await (self.impersonator if case.impersonated else self.raw).publish(message)

    async def _try(self, message: Message, content_class: int) -> bool:
        """Publish on a new connection, which may be closed. Return whether the broker accepted the message."""
        raw = await Raw.connect(self.place.broker)
        try:
            if content_class != CONTENT_CLASS:
                return not await turned_away(raw, message, content_class)
            await raw.publish(message)
        except ValueError:
            return not await turned_away(raw, message)
        except BrokerLost:
            return False
        finally:
            await raw.connection.close()
        return True

    async def witness(self) -> None:
        """Publish a good message without a delay, and wait for it."""
        body = b"witness %d" % self.witnesses
        self.witnesses += 1
        await self.raw.publish(Message("h.in", b"witness", Props(headers=((b"x-delay", number("I", 0)),)), body))
        await self.inbox.got([body], timeout=60)

    async def found(self) -> dict[bytes, list[Found]]:
        """The ends of all messages so far, by body."""
        ends: dict[bytes, list[Found]] = defaultdict(list)
        for body in self.away:
            ends[body].append(Found(End.TURNED_AWAY, ""))
        for one in self.inbox.arrivals:
            ends[one.delivery.body].append(Found(End.DELIVERED, "", one))
        for one in self.refused.arrivals:
            ends[one.delivery.body].append(Found(End.REFUSED, _said(one, b"x-delayer-refused"), one))
        for one in self.strays.arrivals if self.strays else ():
            ends[one.delivery.body].append(Found(End.HELD, _said(one, b"x-delayer-held-text"), one))
        for one in self.attempts.arrivals if self.attempts else ():
            if one.props.all(b"x-delayer-attempts") == [number("l", 1)]:
                ends[one.delivery.body].append(Found(End.HELD, _said(one, b"x-delayer-held-text"), one))
        if self.place.mode == STORE:
            for body, reason in await held_rows(self.place):
                ends[body].append(Found(End.HELD, reason))
        return ends

    async def all_found(self, *, timeout: float = 60.0) -> dict[bytes, list[Found]]:
        """Wait until each has ended."""

        def everywhere(ends: dict[bytes, list[Found]]) -> bool:
            return not self._missing(ends)

        try:
            return await eventually(self.found, everywhere, timeout=timeout)
        except AssertionError:
            missing = [self.sent[body][0] for body in self._missing(await self.found())]
            raise AssertionError(f"{len(missing)} have not ended anywhere: {missing}") from None

    def _missing(self, ends: dict[bytes, list[Found]]) -> list[bytes]:
        return [body for body in self.sent if len(ends.get(body, ())) < self._copies(body)]

    def _copies(self, body: bytes) -> int:
        """How many were sent with this body: several for the empty body."""
        return 1 if body else self.empty

    def verify(self, ends: dict[bytes, list[Found]], *, redelivered: bool = False) -> None:
        """Check that each ended up in the right place once, with the right headers, and that nothing else arrived.
        ``redelivered``: a queue may have redelivered it, and RabbitMQ 3.10 sorts the headers then."""
        sorts = self.rabbitmq.sorts_headers
        for body, (name, case) in self.sent.items():
            verify(name, case, ends[body], self._copies(body), sorts=sorts, redelivered=redelivered)
        came, sent = sum(map(len, ends.values())), sum(map(self._copies, self.sent))
        assert came == sent + self.witnesses, "the villain sent fewer messages than came"


def verify(name: str, case: Hostile, found: Sequence[Found], copies: int, *, sorts: bool, redelivered: bool) -> None:
    """Check that it ended once, in the right place, with the right headers. ``sorts``: see RabbitMQ.sorts_headers."""
    assert len(found) == copies, f"{name}: {found}"
    for end, reason, arrival in found:
        assert end is case.end, f"{name}: expected {case.end}, found {end} {reason}"
        assert reworded.EVERYWHERE or re.search(case.reason, reason), f"{name}: {reason}"
        if end is End.DELIVERED:
            assert arrival is not None
            check_delivered(name, case, arrival, sorts=sorts, redelivered=redelivered)


def check_delivered(name: str, case: Hostile, arrival: Arrival, *, sorts: bool, redelivered: bool) -> None:
    sent = case.message(b"").props
    assert isinstance(sent, Props)
    sent = sent.sorted_if(sorts)
    assert arrival.at_ms >= arrival.due_ms, f"{name}: early"
    assert arrival.delivery.routing_key == (case.key if case.arrives_as is None else case.arrives_as), name
    found = arrival.props
    kept = replace(sent, user_id=None, headers=sent.headers or ()).without(*_OURS)
    in_order = replace(kept, headers=tuple(sorted(kept.headers or (), key=lambda header: header[0])))
    assert found.without(*_OURS, *_OF_THE_BROKER) in ([kept, in_order] if redelivered else [kept]), name
    if sent.user_id is not None:
        assert content(found.one(b"x-delayer-user-id")) == sent.user_id
    for gained in (b"x-delayer-id", b"x-delayer-due"):
        assert len(found.all(gained)) == 1, name


def assert_no_forged_line(events: Sequence[dict[str, object]], stray_lines: Sequence[str]) -> None:
    """Every line is an event of the daemon; text from a message stands inside an event, escaped."""
    assert not stray_lines
    assert len([event for event in events if event["event"] == "ready"]) == 1
    told = json.dumps(events)
    assert "\\u001b" not in told, "an escape sequence came through as it was"
    assert FORGED_LINE.encode("unicode_escape").decode().replace("\\", "\\\\").replace('"', '\\"')[:40] in told


async def turned_away(raw: Raw, message: Message, content_class: int = CONTENT_CLASS) -> bool:
    """Send frames that no library produces: a content header of any length and class. Return whether the broker closed
    the connection."""
    properties = message.props if isinstance(message.props, bytes) else message.props.encode()
    address = b"".join(bytes((len(name),)) + name for name in (message.exchange.encode(), message.routing_key))
    method = b"\x00\x3c\x00\x28\0\0" + address + b"\0"
    header = content_class.to_bytes(2, "big") + b"\0\0" + len(message.body).to_bytes(8, "big") + properties
    for kind, payload in ((1, method), (2, header), (3, message.body)):
        frame = bytes((kind,)) + b"\0\x01" + len(payload).to_bytes(4, "big") + payload + b"\xce"
        raw.connection.write(frame)
    done, _ = await asyncio.wait([asyncio.shield(raw.connection.closed)], timeout=60)
    return bool(done)


async def held_rows(place: Place) -> list[tuple[bytes, str]]:
    """Body and reason of every held message in the store."""
    assert place.store
    async with sql(place.store) as connection:
        return [tuple(row) for row in await connection.fetch("SELECT body, reason FROM held")]


def _said(arrival: Arrival, header: bytes) -> str:
    try:
        values = arrival.props.all(header)
    except (AssertionError, IndexError):  # broken bytes, refused unchanged
        return ""
    return content(values[0]).decode() if values else ""


def delay_header(milliseconds: int) -> Header:
    return (b"x-delay", number("I", milliseconds))
