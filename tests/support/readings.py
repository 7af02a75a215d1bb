"""Counts how often each numbered message was read, in a proxy between the broker and its consumers.

    account.readings = readings = Readings(b"delayer.in")
    proxy.listener = readings.listener

These counts limit the copies under every fault. A message gets a new ``x-delayer-id`` only through another read from
the intake queue. It leaves the cascade again only through another read from the due queue. A broker that sorts headers
only on redelivery may sort them only if it redelivered the message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Final

from tests.support.letters import DOOMED_KEYS, KEYS, NUMBER, Form
from tests.support.verdict import Arrival, Owed

_FRAME: Final = struct.Struct(">BHI")
_AROUND: Final = 8
"""Bytes of a frame in addition to its payload: the header and the end byte."""
_METHOD, _BODY = 1, 3
_DELIVER: Final = b"\0\x3c\0\x3c"
_REDELIVERED_AT: Final = 8
"""Offset from the end of the consumer tag; the delivery tag is between."""
_MOST: Final = 255
"""The largest count."""
_NUMBERS: Final = 1 << 28
"""A body that begins with a number from here on is not of a ledger."""
_ROOM: Final = 4_096
_RANDOM_ID: Final = 32
"""Digits of an id that is no row's number."""


class Readings:
    """Three bytes a message, and two for each of the doomed."""

    def __init__(self, into: bytes) -> None:
        """``into``: the exchange that the ledger publishes to. A message of another exchange is from the due queue."""
        self._into = into
        self._read, self._again, self._due = bytearray(), bytearray(), bytearray()
        self._doomed, self._doomed_again = bytearray(), bytearray()
        self.heard: Callable[[int], None] = lambda _: None
        """Called with the number of each message that is read from the intake queue."""

    def listener(self) -> Callable[[bytes], None]:
        """A listener for one connection: takes the broker's bytes there in pieces."""
        return _Listener(self._handed)

    def read(self, number: int) -> int:
        """How often it was read from the intake queue."""
        return _of(self._read, number)

    def again(self, number: int) -> bool:
        """Whether the broker marked a delivery as redelivered, or the message was dead-lettered from another queue."""
        return bool(_of(self._again, number))

    def due(self, number: int) -> int:
        """How often it was read from the due queue."""
        return _of(self._due, number)

    def doomed(self, number: int) -> int:
        """How often the doomed message of that number was read; doomed messages are numbered separately."""
        return _of(self._doomed, number)

    def doomed_again(self, number: int) -> bool:
        """Like :meth:`again`, for a doomed message."""
        return bool(_of(self._doomed_again, number))

    def _handed(self, redelivered: bool, exchange: bytes, routing_key: bytes, body: bytes) -> None:
        if len(body) < NUMBER.size or (number := NUMBER.unpack_from(body)[0]) >= _NUMBERS:
            return
        ours = routing_key.startswith(KEYS)  # else it is from the cascade or from another publisher
        if exchange != self._into:
            _count(self._due, number)
            redelivered = True  # a broker sorts the headers of a dead letter too
        elif ours:
            _count(self._read, number)
            self.heard(number)
        elif routing_key.startswith(DOOMED_KEYS):
            _count(self._doomed, number)
            if redelivered:
                _count(self._doomed_again, number)
        if ours and redelivered:
            _count(self._again, number)

    def unaccounted(self, number: int, owed: Owed, arrivals: Sequence[Arrival]) -> str:
        """A note on the ids that the reads of a message do not explain; empty if there are none, and for messages sent
        by SQL, which no proxy sees."""
        if owed.form is Form.SQL:
            return ""
        read, due = self.read(number), self.due(number)
        names = {one.id for one in arrivals}
        random = sum(len(id) == _RANDOM_ID for id in names)
        rows = len(names) - random
        if random > read:
            return f"message {number}: {random} ids that are random, and it was read {read} times: {arrivals}"
        # Each read makes at most one row: parked, or held, which may follow a read from either queue.
        if rows > read + due:
            return f"message {number}: {rows} rows, and it was read {read} times, {due} times when due: {arrivals}"
        # The account judges copies of one id: only a fault may repeat a publish (G3).
        return ""


def _of(counts: bytearray, number: int) -> int:
    return counts[number] if number < len(counts) else 0


def _count(counts: bytearray, number: int) -> None:
    if number >= len(counts):
        counts.extend(bytes(number - len(counts) + _ROOM))
    if counts[number] < _MOST:
        counts[number] += 1


class _Listener:
    """Parses the broker's side of one connection: the method and the beginning of the body of every delivery."""

    def __init__(self, handed: Callable[[bool, bytes, bytes, bytes], None]) -> None:
        self._handed = handed
        self._rest = b""
        self._begun: dict[int, tuple[bool, bytes, bytes]] = {}

    def __call__(self, data: bytes) -> None:
        data = self._rest + data
        at, end = 0, len(data)
        while end - at >= _AROUND:
            kind, channel, size = _FRAME.unpack_from(data, at)
            if end - at < size + _AROUND:
                break
            payload = at + _FRAME.size
            if kind == _METHOD:
                self._begun.pop(channel, None)
                if data[payload : payload + len(_DELIVER)] == _DELIVER:
                    self._begun[channel] = _delivered(data, payload + len(_DELIVER))
            elif kind == _BODY and (begun := self._begun.pop(channel, None)) is not None:
                self._handed(*begun, data[payload : payload + min(size, NUMBER.size)])
            at += size + _AROUND
        self._rest = data[at:]


def _delivered(data: bytes, at: int) -> tuple[bool, bytes, bytes]:
    """The redelivered flag, exchange and routing key of the delivery with its consumer tag at ``at``."""
    at += 1 + data[at] + _REDELIVERED_AT
    redelivered, size = data[at] & 1 == 1, data[at + 1]
    key = at + 2 + size
    return redelivered, data[at + 2 : key], data[key + 1 : key + 1 + data[key]]
