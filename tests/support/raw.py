"""Property bytes built and parsed by hand, and a client that sends and receives them verbatim.

`Props` uses nothing of delayer.amqp, so tests can compare that code with it. The client uses the connection of
delayer.amqp, but only to move bytes, because every other client changes them.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, Self

from delayer.amqp.address import Address
from delayer.amqp.connection import Connection
from delayer.amqp.values import CONFIRMED, Delivery, Outgoing
from delayer.core.marks import ID

# ---- field values


class Value(NamedTuple):
    """A typed value of a header table: its type byte, and the bytes after that."""

    kind: bytes
    raw: bytes


Header = tuple[bytes, Value]

_NUMBERS = {
    "b": ">b", "B": ">B", "s": ">h", "u": ">H", "I": ">i", "i": ">I", "l": ">q", "f": ">f", "d": ">d", "T": ">Q",
    "t": ">?",
}  # fmt: skip
_WIDTHS = {kind.encode(): struct.calcsize(code) for kind, code in _NUMBERS.items()} | {b"D": 5, b"V": 0}
VOID = Value(b"V", b"")


def number(kind: str, value: float) -> Value:
    """b B s u I i l integers, f d floats, T timestamp, t bool."""
    return Value(kind.encode(), struct.pack(_NUMBERS[kind], value))


def decimal(scale: int, unscaled: int) -> Value:
    return Value(b"D", struct.pack(">Bi", scale, unscaled))


def text(content: bytes | str) -> Value:
    return _sized(b"S", content.encode() if isinstance(content, str) else content)


def octets(content: bytes) -> Value:
    return _sized(b"x", content)


def array(*values: Value) -> Value:
    return _sized(b"A", b"".join(kind + raw for kind, raw in values))


def table(*headers: Header) -> Value:
    return _sized(b"F", entries(headers))


def nested(levels: int) -> Value:
    """A table with so many nested tables."""
    value = table()
    for _ in range(levels):
        value = table((b"t", value))
    return value


def entries(headers: Iterable[Header]) -> bytes:
    return b"".join(bytes((len(name),)) + name + kind + raw for name, (kind, raw) in headers)


def _sized(kind: bytes, content: bytes) -> Value:
    return Value(kind, struct.pack(">I", len(content)) + content)


def content(value: Value) -> bytes:
    """The bytes of a string or byte array."""
    assert value.kind in (b"S", b"x"), value
    return value.raw[4:]


def integer(value: Value) -> int:
    assert value.kind == b"l", value
    return int(struct.unpack(">q", value.raw)[0])


TYPES: tuple[Header, ...] = (
    (b"string", text("gr\u00fc\u00df")),
    (b"string, empty", text("")),
    (b"string, not UTF-8", text(b"\xff\xfe\x00\x80")),
    (b"int32, small", number("I", 5)),
    (b"int32, least", number("I", -(2**31))),
    (b"int64, small", number("l", 5)),
    (b"int64, greatest", number("l", 2**63 - 1)),
    (b"int16, small", number("s", 5)),
    (b"int16, least", number("s", -(2**15))),
    (b"int8", number("b", -128)),
    (b"uint8", number("B", 255)),
    (b"uint16", number("u", 65_535)),
    (b"uint16, small", number("u", 5)),
    (b"uint32", number("i", 2**32 - 1)),
    (b"uint32, small", number("i", 5)),
    (b"float", number("f", 0.1)),
    (b"double", number("d", 0.1)),
    (b"decimal", decimal(3, 12_345)),
    (b"decimal, high bit", Value(b"D", b"\x02\xff\xff\xff\xfe")),
    (b"bool", number("t", True)),
    (b"bool, false", number("t", False)),
    (b"timestamp", number("T", 1_700_000_000)),
    (b"timestamp beyond 2^32", number("T", 2**40)),
    (b"void", VOID),
    (b"bytes", octets(bytes(range(256)))),
    (b"bytes, empty", octets(b"")),
    (b"array", array(number("b", 1), number("I", 1), number("l", 1), text("x"), VOID, array())),
    (b"array, empty", array()),
    (b"table", table((b"inner", number("I", 1)), (b"inner", number("l", 2)), (b"x-delay", text("mine")))),
    (b"table, empty", table()),
)
"""Every kind of value, at its limits and at values for which a client or broker might choose another width."""

# ---- properties


@dataclass(frozen=True)
class Props:
    """A content header's properties, in wire order; None if absent."""

    content_type: bytes | None = None
    content_encoding: bytes | None = None
    headers: tuple[Header, ...] | None = None
    delivery_mode: int | None = None
    priority: int | None = None
    correlation_id: bytes | None = None
    reply_to: bytes | None = None
    expiration: bytes | None = None
    message_id: bytes | None = None
    timestamp: int | None = None
    type: bytes | None = None
    user_id: bytes | None = None
    app_id: bytes | None = None
    cluster_id: bytes | None = None

    def encode(self) -> bytes:
        flags, parts = 0, []
        for position, field in enumerate(fields(self)):
            value = getattr(self, field.name)
            if value is None:
                continue
            flags |= 1 << (15 - position)
            if field.name == "headers":
                table = entries(value)
                parts.append(struct.pack(">I", len(table)) + table)
            elif field.name == "timestamp":
                parts.append(struct.pack(">Q", value))
            elif isinstance(value, int):
                parts.append(bytes((value,)))
            else:
                parts.append(bytes((len(value),)) + value)
        return struct.pack(">H", flags) + b"".join(parts)

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        flags = int.from_bytes(raw[:2], "big")
        found: dict[str, object] = {}
        at = 2
        for position, field in enumerate(fields(cls)):
            if not flags & 1 << (15 - position):
                continue
            width = {"headers": 4, "timestamp": 8}.get(field.name, 1)
            head = int.from_bytes(raw[at : at + width], "big")
            at += width
            if field.name == "headers":
                found["headers"] = _decode_headers(raw[at : at + head])
                at += head
            elif field.name in ("timestamp", "delivery_mode", "priority"):
                found[field.name] = head
            else:
                found[field.name] = raw[at : at + head]
                at += head
        assert at == len(raw), (at, raw)
        return cls(**found)  # type: ignore[arg-type]

    def all(self, name: bytes) -> list[Value]:
        """The values of every header of that name."""
        return [value for found, value in self.headers or () if found == name]

    def one(self, name: bytes) -> Value:
        (value,) = self.all(name)
        return value

    def without(self, *names: bytes, prefixes: tuple[bytes, ...] = ()) -> Self:
        """The properties without the headers of these names; the table stays, perhaps empty."""
        if self.headers is None:
            return self
        kept = [header for header in self.headers if header[0] not in names and not header[0].startswith(prefixes)]
        return replace(self, headers=tuple(kept))

    def sorted_if(self, sorts: bool) -> Self:
        """The properties as a broker that ``sorts`` delivers them: by name, the first of each; nested tables stay."""
        if not sorts or self.headers is None:
            return self
        first: dict[bytes, Value] = {}
        for name, value in self.headers:
            first.setdefault(name, value)
        return replace(self, headers=tuple(sorted(first.items(), key=lambda header: header[0])))

    def adding(self, *headers: Header) -> Self:
        return replace(self, headers=(*(self.headers or ()), *headers))


def _decode_headers(raw: bytes) -> tuple[Header, ...]:
    found, at = [], 0
    while at < len(raw):
        start = at + 1 + raw[at]
        name, kind = raw[at + 1 : start], raw[start : start + 1]
        width = _WIDTHS[kind] if kind in _WIDTHS else 4 + int.from_bytes(raw[start + 1 : start + 5], "big")
        at = start + 1 + width
        found.append((name, Value(kind, raw[start + 1 : at])))
    assert at == len(raw)
    return tuple(found)


# ---- the client


class Message(NamedTuple):
    """Something to publish. Tests tell messages apart by their bodies."""

    exchange: str
    routing_key: bytes
    props: Props | bytes
    body: bytes


class Arrival(NamedTuple):
    delivery: Delivery
    at_ms: float

    @property
    def props(self) -> Props:
        return Props.decode(self.delivery.properties)

    @property
    def due_ms(self) -> int:
        """The value of ``x-delayer-due``."""
        return integer(self.props.one(b"x-delayer-due"))


class Inbox:
    """All arrivals of one queue with their times; each is acknowledged immediately."""

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.arrivals: list[Arrival] = []
        self.counts: Counter[bytes] = Counter()
        self._by_body: dict[bytes, list[Arrival]] = defaultdict(list)
        self._news = asyncio.Event()

    def arrived(self, delivery: Delivery, at_ms: float) -> None:
        arrival = Arrival(delivery, at_ms)
        self.arrivals.append(arrival)
        self.counts[delivery.body] += 1
        self._by_body[delivery.body].append(arrival)
        self._news.set()

    def of(self, body: bytes) -> list[Arrival]:
        return list(self._by_body.get(body, ()))

    def only(self, body: bytes) -> Arrival:
        """The one arrival with this body; fails where there is none, or a second."""
        found = self.of(body)
        assert len(found) == 1, f"{self.queue}: {body[:40]!r} arrived {len(found)} times"
        return found[0]

    async def until(self, done: Callable[[], bool], timeout: float = 60.0) -> bool:
        """Wait until ``done()``, which is called after every arrival. False at the timeout."""
        try:
            async with asyncio.timeout(timeout):
                while not done():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return False
        return True

    async def got(self, bodies: Iterable[bytes], timeout: float = 60.0) -> None:
        """Wait until each of them arrived; otherwise fail and name some missing ones."""
        missing = set(bodies)

        def done() -> bool:
            missing.difference_update(self.counts)
            return not missing

        if not await self.until(done, timeout):
            sample = sorted(missing)[:5]
            raise AssertionError(f"{self.queue}: {len(missing)} missing after {timeout:g} s, such as {sample!r}")


class Raw:
    """One connection, one channel. ``async with await Raw.connect(url) as raw:``"""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._inboxes: dict[str, Inbox] = {}

    @classmethod
    async def connect(cls, url: str) -> Self:
        # No heartbeat: the tests' loops do not run between tests.
        raw = cls(await Connection.open(Address.parse(url), name="test", heartbeat=0))
        raw.channel = await raw.connection.channel(token_header=ID)
        await raw.channel.qos(1000)
        return raw

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.connection.close()

    async def publish(self, *messages: Message) -> None:
        """Publish all at once and wait for the confirms. Fails unless the broker confirms and routes each message."""
        batch = [
            Outgoing(
                message.exchange.encode(),
                message.routing_key,
                message.props if isinstance(message.props, bytes) else message.props.encode(),
                message.body,
                b"%d" % index,
            )
            for index, message in enumerate(messages)
        ]
        outcomes = await self.channel.publish(batch, timeout=30.0)
        bad = [(one.routing_key, outcome) for one, outcome in zip(batch, outcomes, strict=True) if outcome != CONFIRMED]
        assert not bad, bad

    async def inbox(self, queue: str) -> Inbox:
        """Consume the queue from now on; the same inbox for the same queue."""
        if queue not in self._inboxes:
            inbox = self._inboxes[queue] = Inbox(queue)

            def on_delivery(delivery: Delivery) -> None:
                inbox.arrived(delivery, time.time_ns() / 1e6)
                self.channel.ack(delivery.tag)

            await self.channel.consume(queue, on_delivery, lambda: None)
        return self._inboxes[queue]

    async def round_trip(self) -> None:
        """Wait until every delivery that the broker sent before this call has arrived."""
        await self.channel.qos(1000)


def now_ms() -> int:
    """This host's clock, which the daemon and Postgres share; rounded down."""
    return time.time_ns() // 1_000_000


def wire_instant(epoch_ms: int) -> str:
    """A time in NServiceBus's format. The year must have four digits."""
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=epoch_ms)
    return f"{moment:%Y-%m-%d %H:%M:%S}:{moment.microsecond:06d} Z"
