"""The numbered messages of a ledger: the bytes to publish under a number, and the bytes that must return. Pure.

A letter is a function of the seed, its number and its delay. It is recomputed when it returns, so millions of letters
need no memory. The expected bytes are computed without the code under test: the headers in order, minus those that
requested the delay, plus ``x-delayer-id`` and ``x-delayer-due``.
"""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from enum import IntEnum
from typing import Final, NamedTuple

NUMBER: Final = struct.Struct(">Q")
"""The beginning of a body."""
KEYS: Final = b"ledger."
"""The beginning of a routing key."""
DOOMED_KEYS: Final = b"doomed."
"""The beginning of a doomed message's routing key."""
LARGEST: Final = 200_000
SIZES: Final = ((300, 0), (900, 100), (999, 2_000), (1_000, LARGEST))
"""Pairs of a limit and a size: of a thousand bodies, those below the limit have up to that many bytes after their
number."""
_ID = rb"\x0cx-delayer-idS\0\0\0[\x01-\x20]([0-9]{1,19}|[0-9a-f]{32})"
_DUE = rb"\x0dx-delayer-duel(.{8})"
_GAINED = re.compile(_ID + _DUE, re.DOTALL)
_GAINED_BY_NAME = re.compile(_DUE + _ID, re.DOTALL)
_BEFORE_GAINED, _BEHIND_GAINED = b"x-delayer-", b"x-delayer."
"""The names of all other headers of a letter sort before the first or after the second."""
_MASK: Final = (1 << 64) - 1


class Form(IntEnum):
    """The form in which a letter says its delay. SQL and HTTP are ways of their own, with a due instant."""

    INT32 = 0
    INT64 = 1
    STRING = 2
    EPOCH = 3
    RFC3339 = 4
    SQL = 5
    HTTP = 6

    @property
    def absolute(self) -> bool:
        return self >= Form.EPOCH


def text(content: bytes) -> bytes:
    return b"S" + struct.pack(">I", len(content)) + content


def long(value: int) -> bytes:
    return b"l" + struct.pack(">q", value)


def entry(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + value


def short(content: bytes) -> bytes:
    return bytes((len(content),)) + content


def table_of(entries: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join(entry(name, value) for name, value in entries)


# Shapes of header tables: every width and kind that a client may send, a string that is not UTF-8, tables in tables.
_TABLE = entry(b"inner", b"I" + struct.pack(">i", 7)) + entry(b"empty", b"F\0\0\0\0")
SHAPES: Final[Sequence[Mapping[bytes, bytes]]] = (
    {},
    {b"trace": text("größe".encode()), b"app": text(b"orders")},
    {b"i8": b"b\xff", b"u8": b"B\x01", b"i16": b"s\0\x05", b"u16": b"u\0\x05"},
    {b"i32": b"I\0\0\0\x05", b"u32": b"i\0\0\0\x05", b"i64": long(5), b"yes": b"t\x01"},
    {b"double": b"d" + struct.pack(">d", 0.1), b"float": b"f" + struct.pack(">f", 0.5)},
    {b"latin": text(b"caf\xe9"), b"raw": b"x\0\0\0\x03\0\xff\0", b"void": b"V"},
    {b"table": b"F" + struct.pack(">I", len(_TABLE)) + _TABLE, b"at": b"T" + struct.pack(">Q", 1 << 33)},
    {b"list": b"A\0\0\0\x09" + b"I\0\0\0\x01" + b"t\x01" + b"b\xff", b"price": b"D\x02\0\0\x04\xd2"},
)


class Gained(NamedTuple):
    """The headers that a message gained: its ``x-delayer-id`` and ``x-delayer-due``. ``resorted``: its own headers came
    back sorted by name, and were published in another order."""

    id: bytes
    due_ms: int
    resorted: bool = False


class Letter(NamedTuple):
    """A message. ``head`` and ``tail`` are its properties before and after the header table. ``said`` are the table's
    entries as published, ``kept`` as they must return."""

    routing_key: bytes
    head: bytes
    said: Sequence[tuple[bytes, bytes]]
    kept: Sequence[tuple[bytes, bytes]]
    tail: bytes
    body: bytes

    @property
    def properties(self) -> bytes:
        """The property bytes as published."""
        table = table_of(self.said)
        return self.head + struct.pack(">I", len(table)) + table + self.tail

    def gained(self, routing_key: bytes, properties: bytes, body: bytes, *, sorts: bool = False) -> Gained | None:
        """The headers that it gained on its way; None if anything else changed.

        A quorum queue that redelivers a message adds ``x-delivery-count``, and sorts the headers (seen on RabbitMQ
        3.10). The account judges whether that happened to this message. A broker with ``sorts`` sorts every table that
        it hands over, gained headers included.
        """
        head, tail = self.head, self.tail
        if body != self.body or routing_key != self.routing_key:
            return None
        if not properties.startswith(head) or not properties.endswith(tail):
            return None
        table = properties[len(head) + 4 : len(properties) - len(tail)]
        if properties[len(head) : len(head) + 4] != struct.pack(">I", len(table)):
            return None
        if sorts:
            return self._gained_by_name(table)
        kept = table_of(self.kept)
        resorted = not table.startswith(kept)
        if resorted and not table.startswith(table_of(sorted(self.kept))):
            return None
        found = _GAINED.fullmatch(table, len(kept))
        return None if found is None else Gained(found[1], int.from_bytes(found[2], "big"), resorted)

    def _gained_by_name(self, table: bytes) -> Gained | None:
        kept = sorted(self.kept)
        before = table_of(one for one in kept if one[0] < _BEFORE_GAINED)
        behind = table_of(one for one in kept if one[0] > _BEHIND_GAINED)
        if not table.startswith(before) or not table.endswith(behind):
            return None
        found = _GAINED_BY_NAME.fullmatch(table, len(before), len(table) - len(behind))
        return None if found is None else Gained(found[2], int.from_bytes(found[1], "big"))


def doomed(number: int) -> Letter:
    """A message with an unreadable delay: the daemon must refuse it, and put it unchanged into the refused queue."""
    # Not sorted by name, so that a test sees a broker or a daemon that sorts them.
    said = [(b"x-delay", text(said_by_doomed(number))), *SHAPES[number % len(SHAPES)].items(), (b"after", long(number))]
    head, tail = _around(number, b"doomed-%d" % number)
    return Letter(DOOMED_KEYS + b"%d" % (number % 5), head, said, said, tail, NUMBER.pack(number) + b"doomed")


def said_by_doomed(number: int) -> bytes:
    """The value in place of a delay."""
    return b"in %d moments" % number


class Letters:
    """All letters of one seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed & _MASK
        self._noise = random.Random(seed).randbytes(2 * LARGEST)

    def form(self, number: int, absolute: bool | None) -> Form:
        """The form of that letter's delay; ``absolute`` restricts the choice."""
        first, last = (0, 5) if absolute is None else (3, 5) if absolute else (0, 3)
        return Form(first + (self._bits(number) >> 56) % (last - first))

    def letter(self, number: int, form: Form, due_ms: int, delay_ms: int) -> Letter:
        bits = self._bits(number)
        said, turned = _delay(form, due_ms, delay_ms)
        shape = list(SHAPES[bits & 7].items())
        if bits & 8:
            said, kept = said + shape, turned + shape
        else:
            said, kept = shape + said, shape + turned
        head, tail = _around(bits >> 4, message_id_of(number))
        return Letter(KEYS + b"%d" % (number % 5), head, said, kept, tail, self._body(number, bits >> 8))

    def _body(self, number: int, bits: int) -> bytes:
        chosen = bits % 1000
        longest = next(size for limit, size in SIZES if chosen < limit)
        start = (bits >> 10) % LARGEST
        return NUMBER.pack(number) + self._noise[start : start + (bits >> 28) % (longest + 1)]

    def _bits(self, number: int) -> int:
        """64 bits that look like chance, from seed and number (splitmix64)."""
        z = (self._seed + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)


def message_id_of(number: int) -> bytes:
    """A quarter of the letters have no key, a quarter share one, and half have their own."""
    return (b"", b"the same", b"id-%d" % number, b"id-%d" % number)[number % 4]


def _delay(form: Form, due_ms: int, delay_ms: int) -> tuple[list[tuple[bytes, bytes]], list[tuple[bytes, bytes]]]:
    """The header that says the delay, and its remains at the destination: x-delay with its sign turned."""
    if form in (Form.EPOCH, Form.SQL, Form.HTTP):
        return [(b"x-deliver-at", long(due_ms))], []
    if form is Form.RFC3339:
        instant = datetime.fromtimestamp(due_ms // 1000, UTC)
        written = f"{instant:%Y-%m-%dT%H:%M:%S}.{due_ms % 1000:03d}Z"
        return [(b"x-deliver-at", text(written.encode()))], []

    def x_delay(ms: int) -> list[tuple[bytes, bytes]]:
        if form is Form.INT32:
            return [(b"x-delay", b"I" + struct.pack(">i", ms))]
        return [(b"x-delay", long(ms) if form is Form.INT64 else text(b"%d" % ms))]

    return x_delay(delay_ms), x_delay(-delay_ms)


def _around(bits: int, message_id: bytes) -> tuple[bytes, bytes]:
    """Properties before and after the header table, flags included; always persistent, or a broker may lose it."""
    flags, before, after = 0x3000, b"", b"\x02"  # headers and delivery mode
    if bits & 1:
        flags |= 0x8000
        before += short(b"application/x-ledger")
    if bits & 2:
        flags |= 0x0800 | 0x0400 | 0x0100  # priority, correlation id, expiration
        after += b"\x04" + short(b"correlated") + short(b"3600000")
    if message_id:
        flags |= 0x0080
        after += short(message_id)
    if bits & 4:
        flags |= 0x0040 | 0x0008  # timestamp, app id
        after += struct.pack(">Q", 1_700_000_000) + short(b"ledger")
    return struct.pack(">H", flags) + before, after
