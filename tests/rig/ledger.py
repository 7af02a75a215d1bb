"""What was sent through delayer and what came out, to the message: nothing lost, early or changed; what came twice.

Publishes numbered messages over delayer's own wire, for speed, and consumes the destination. What a message must look
like when it comes back is worked out here, byte for byte, without the code that is under test: its headers in
their order, less the ones that said the delay, plus ``x-delayer-id`` and ``x-delayer-due``.

    async with Ledger.open(url, random.Random(7)) as ledger:
        await ledger.publish(20_000)
        await ledger.all_back()
        ledger.verdict().assert_kept()
"""

from __future__ import annotations

import asyncio
import random
import re
import struct
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple, Self

import aio_pika

from delayer.core.message import CONFIRMED, Delivery, Outgoing
from delayer.wire.channel import Channel
from delayer.wire.connection import Connection

LONGEST_MS = 5_000
BATCH = 1_000
PREFETCH = 2_000
_NUMBER = struct.Struct(">Q")
_GAINED = re.compile(rb"\x0cx-delayer-idS\0\0\0[\x01-\x20]([0-9a-f]{1,32})\x0dx-delayer-duel(.{8})", re.DOTALL)


def text(content: bytes) -> bytes:
    return b"S" + struct.pack(">I", len(content)) + content


def long(value: int) -> bytes:
    return b"l" + struct.pack(">q", value)


def entry(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + value


def short(content: bytes) -> bytes:
    return bytes((len(content),)) + content


# Shapes of header tables: every width and kind that a client may send, a string that is not UTF-8, tables in tables.
_TABLE = entry(b"inner", b"I" + struct.pack(">i", 7)) + entry(b"empty", b"F\0\0\0\0")
SHAPES: Sequence[Mapping[bytes, bytes]] = (
    {},
    {b"trace": text("größe".encode()), b"app": text(b"orders")},
    {b"i8": b"b\xff", b"u8": b"B\x01", b"i16": b"s\0\x05", b"u16": b"u\0\x05"},
    {b"i32": b"I\0\0\0\x05", b"u32": b"i\0\0\0\x05", b"i64": long(5), b"yes": b"t\x01"},
    {b"double": b"d" + struct.pack(">d", 0.1), b"float": b"f" + struct.pack(">f", 0.5)},
    {b"latin": text(b"caf\xe9"), b"raw": b"x\0\0\0\x03\0\xff\0", b"void": b"V"},
    {b"table": b"F" + struct.pack(">I", len(_TABLE)) + _TABLE, b"at": b"T" + struct.pack(">Q", 1 << 33)},
    {b"list": b"A\0\0\0\x09" + b"I\0\0\0\x01" + b"t\x01" + b"b\xff", b"price": b"D\x02\0\0\x04\xd2"},
)


def table_of(entries: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join(entry(name, value) for name, value in entries)


class Sent(NamedTuple):
    """A published message, and what is owed: not before ``due_ms``, these bytes before, in and after its headers.

    ``kept`` are the headers in their order, and sorted by name: a quorum queue that delivers a message again puts its
    ``x-delivery-count`` in, and sorts the table as it does so (seen on RabbitMQ 3.10). That is not our doing.
    """

    due_ms: float
    absolute: bool
    head: bytes
    kept: tuple[bytes, bytes]
    tail: bytes
    body: bytes


class Arrival(NamedTuple):
    """One message at the destination. ``due_ms`` and ``id`` are what its x-delayer headers say."""

    at_ms: float
    id: bytes
    due_ms: int
    redelivered: bool


@dataclass(frozen=True)
class Verdict:
    """The account. ``repeats``: by number, every arrival of the messages that came more than once."""

    sent: int
    missing: Sequence[int]
    early: Sequence[str]
    changed: Sequence[str]
    repeats: Mapping[int, Sequence[Arrival]]
    standing: Mapping[str, int] = field(default_factory=dict)

    @property
    def repeated_at_release(self) -> int:
        """Messages of which all copies have one ``x-delayer-id``: they were in the store, or in the cascade, once."""
        return sum(len({one.id for one in arrivals}) == 1 for arrivals in self.repeats.values())

    def assert_kept(self, *, repeats: bool = False) -> None:
        """Nothing lost, early or changed, nothing left standing; nothing twice unless there was a fault."""
        assert not self.missing, f"{len(self.missing)} of {self.sent} lost, the first: {self.missing[:10]}; {self}"
        assert not self.early, f"{len(self.early)} early, the first: {self.early[0]}"
        assert not self.changed, f"{len(self.changed)} changed, the first: {self.changed[0]}"
        assert not any(self.standing.values()), f"left standing: {self.standing}"
        assert repeats or not self.repeats, f"{len(self.repeats)} came more than once: {list(self.repeats.items())[:3]}"

    def __str__(self) -> str:
        return (
            f"sent {self.sent}, lost {len(self.missing)}, early {len(self.early)}, changed {len(self.changed)}, "
            f"more than once {len(self.repeats)} (at release {self.repeated_at_release}), "
            f"standing {dict(self.standing)}"
        )


class Ledger:
    """Made by :meth:`open`. One publishing and one consuming connection to the broker, no proxy between."""

    def __init__(self, url: str, chance: random.Random, *, into: bytes, exchange: str, queue: str) -> None:
        self._url = url
        self._chance = chance
        self._into = into
        self._exchange = exchange
        self.queue = queue
        self.sent: list[Sent] = []
        self.arrivals: dict[int, list[Arrival]] = defaultdict(list)
        self._early: list[str] = []
        self._changed: list[str] = []
        self._news = asyncio.Event()
        self._publisher: Connection | None = None
        self._consumer: Connection | None = None
        self._channel: Channel | None = None

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        url: str,
        chance: random.Random,
        *,
        into: bytes = b"delayer.in",
        exchange: str = "delayer.out",
        queue: str = "ledger",
        consume: bool = True,
    ) -> AsyncIterator[Self]:
        """Declare the destination, and begin to consume it unless told to do so later."""
        ledger = cls(url, chance, into=into, exchange=exchange, queue=queue)
        await ledger.declare()
        try:
            if consume:
                await ledger.consume()
            yield ledger
        finally:
            for connection in (ledger._publisher, ledger._consumer):
                if connection is not None:
                    await connection.close()

    async def declare(self) -> None:
        """The exchange that due messages go to, and a durable queue that takes them all."""
        async with await aio_pika.connect(self._url) as connection:
            channel = await connection.channel()
            exchange = await channel.declare_exchange(self._exchange, aio_pika.ExchangeType.TOPIC, durable=True)
            queue = await channel.declare_queue(self.queue, durable=True)
            await queue.bind(exchange, "#")

    async def publish(
        self, count: int, *, longest_ms: int = LONGEST_MS, delay_ms: int | None = None, absolute: bool | None = None
    ) -> None:
        """Publish ``count`` more messages, and wait for their confirms. Delays are random unless ``delay_ms`` is given.

        Raises BrokerLost: the ledger is then no use any more, since nobody knows what was published.
        """
        if self._publisher is None or self._publisher.closed.done():
            self._publisher = await Connection.open(self._url, name="ledger publish")
        channel = await self._publisher.channel()
        await channel.confirm_select()
        for start in range(0, count, BATCH):
            # The instant is taken before the batch is made: what is due is never later than we claim.
            now_ms = int(time.time() * 1000)
            batch = []
            for _ in range(min(BATCH, count - start)):
                delay = self._chance.randint(0, longest_ms) if delay_ms is None else delay_ms
                batch.append(self._compose(now_ms, delay, absolute))
            outcomes = await channel.publish(batch, timeout=60.0)
            assert all(outcome == CONFIRMED for outcome in outcomes), Counter(outcomes)
        await channel.close()

    def _compose(self, now_ms: int, delay_ms: int, absolute: bool | None) -> Outgoing:
        """The next message: its shape by chance, its expected return noted. Its number begins the body."""
        chance, number = self._chance, len(self.sent)
        said, turned, is_absolute = self._delay(now_ms, delay_ms, absolute)
        shape = chance.choice(SHAPES)
        said_first = chance.random() < 0.5
        message_id = (b"", b"the same", b"id-%d" % number, b"id-%d" % number)[number % 4]
        head, tail = self._around(message_id)
        size = chance.choices((0, 100, 2_000, 200_000), (30, 60, 9.9, 0.1))[0]
        body = _NUMBER.pack(number) + chance.randbytes(chance.randint(0, size))

        def table_with(delay: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
            return [*delay.items(), *shape.items()] if said_first else [*shape.items(), *delay.items()]

        kept = table_with(turned)
        self.sent.append(
            Sent(now_ms + delay_ms, is_absolute, head, (table_of(kept), table_of(sorted(kept))), tail, body)
        )
        table = table_of(table_with(said))
        properties = head + struct.pack(">I", len(table)) + table + tail
        return Outgoing(self._into, b"ledger.%d" % (number % 5), properties, body, b"ledger-%d" % number)

    def _delay(
        self, now_ms: int, delay_ms: int, absolute: bool | None
    ) -> tuple[Mapping[bytes, bytes], Mapping[bytes, bytes], bool]:
        """The header that says the delay, and what is left of it in the end: x-delay with its sign turned."""
        form = self._chance.randrange(*((0, 5) if absolute is None else (3, 5) if absolute else (0, 3)))
        if form == 3:
            return {b"x-deliver-at": long(now_ms + delay_ms)}, {}, True
        if form == 4:
            instant = datetime.fromtimestamp((now_ms + delay_ms) // 1000, UTC)
            written = f"{instant:%Y-%m-%dT%H:%M:%S}.{(now_ms + delay_ms) % 1000:03d}Z"
            return {b"x-deliver-at": text(written.encode())}, {}, True

        def x_delay(ms: int) -> Mapping[bytes, bytes]:
            return {b"x-delay": (b"I" + struct.pack(">i", ms), long(ms), text(b"%d" % ms))[form]}

        return x_delay(delay_ms), x_delay(-delay_ms), False

    def _around(self, message_id: bytes) -> tuple[bytes, bytes]:
        """Properties before and after the header table, flags included; always persistent, or a broker may lose it."""
        flags, before, after = 0x3000, b"", b"\x02"  # headers and delivery mode
        if self._chance.random() < 0.5:
            flags |= 0x8000
            before += short(b"application/x-ledger")
        if self._chance.random() < 0.5:
            flags |= 0x0800 | 0x0400 | 0x0100  # priority, correlation id, expiration
            after += b"\x04" + short(b"correlated") + short(b"3600000")
        if message_id:
            flags |= 0x0080
            after += short(message_id)
        if self._chance.random() < 0.5:
            flags |= 0x0040 | 0x0008  # timestamp, app id
            after += struct.pack(">Q", 1_700_000_000) + short(b"ledger")
        return struct.pack(">H", flags) + before, after

    async def consume(self) -> None:
        """Begin to consume the destination."""
        self._consumer = await Connection.open(self._url, name="ledger consume")
        self._channel = channel = await self._consumer.channel()
        await channel.qos(PREFETCH)
        loop = asyncio.get_running_loop()
        last = 0

        def flush() -> None:
            nonlocal last
            if not channel.closed.done():
                channel.ack(last, multiple=True)
            last = 0

        def on_delivery(delivery: Delivery) -> None:
            nonlocal last
            if not last:
                loop.call_soon(flush)
            last = delivery.tag
            self._arrived(delivery, time.time() * 1000)

        def on_cancelled() -> None:
            raise AssertionError("somebody deleted the ledger's queue")

        await channel.consume(self.queue, on_delivery, on_cancelled)

    def _arrived(self, delivery: Delivery, at_ms: float) -> None:
        self._news.set()
        number = _NUMBER.unpack_from(delivery.body)[0] if len(delivery.body) >= 8 else -1
        if not 0 <= number < len(self.sent):
            self._changed.append(f"not a message of ours: {delivery}")
            return
        sent = self.sent[number]
        added = _added(sent, delivery)
        if added is None or delivery.routing_key != b"ledger.%d" % (number % 5):
            self._changed.append(f"message {number}: sent {sent}, received {delivery}")
            return
        id, due_ms = added
        self.arrivals[number].append(Arrival(at_ms, id, due_ms, delivery.redelivered))
        if at_ms < due_ms or at_ms < sent.due_ms or due_ms < sent.due_ms or (sent.absolute and due_ms != sent.due_ms):
            self._early.append(f"message {number}: owed at {sent.due_ms}, header {due_ms}, received {at_ms}")

    async def until(self, done: Callable[[], bool], *, timeout: float = 45.0) -> None:
        """Wait until ``done`` says so; it is asked whenever something arrived."""
        try:
            async with asyncio.timeout(timeout):
                while not done():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"not within {timeout:g} s: {self.verdict()}") from None

    async def all_back(self, *, timeout: float = 45.0) -> None:
        """Wait until every message sent so far has arrived at least once."""
        await self.until(lambda: len(self.arrivals) >= len(self.sent), timeout=timeout)

    def total(self) -> int:
        """Arrivals, copies included."""
        return sum(map(len, self.arrivals.values()))

    async def drained(self) -> None:
        """Wait until everything that the destination queue has had is here."""
        assert self._channel is not None, "consume first"
        while (await self.depths(self.queue))[self.queue]:
            self._news.clear()
            await self._news.wait()
        await self._channel.qos(PREFETCH)  # its answer comes behind the last delivery

    async def depths(self, *queues: str) -> dict[str, int]:
        """Messages ready in these queues, by the broker's own count."""
        async with await aio_pika.connect(self._url) as connection:
            channel = await connection.channel()
            found = {}
            for name in queues:
                queue = await channel.declare_queue(name, passive=True)
                found[name] = queue.declaration_result.message_count or 0
            return found

    def verdict(self, standing: Mapping[str, int] | None = None) -> Verdict:
        """The account as it stands; ``standing`` is what is left in refused, strays, held and so on."""
        missing = [number for number in range(len(self.sent)) if number not in self.arrivals]
        repeats = {number: arrivals for number, arrivals in self.arrivals.items() if len(arrivals) > 1}
        return Verdict(len(self.sent), missing, self._early, self._changed, repeats, standing or {})


def _added(sent: Sent, delivery: Delivery) -> tuple[bytes, int] | None:
    """``x-delayer-id`` and ``x-delayer-due`` if they are all that the message gained, else None."""
    raw, head, tail = delivery.properties, sent.head, sent.tail
    if delivery.body != sent.body or not raw.startswith(head) or not raw.endswith(tail):
        return None
    table = raw[len(head) + 4 : len(raw) - len(tail)]
    if raw[len(head) : len(head) + 4] != struct.pack(">I", len(table)) or not table.startswith(sent.kept):
        return None
    found = _GAINED.fullmatch(table, len(sent.kept[0]))
    return None if found is None else (found[1], int.from_bytes(found[2], "big"))
