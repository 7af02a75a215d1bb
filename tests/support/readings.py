"""How often each numbered message was read, overheard on the line between the broker and whoever reads its queues.

    account.readings = readings = Readings(b"delayer.in")
    proxy.listener = readings.listener

That bounds what may come out, whatever breaks meanwhile: a message has a new ``x-delayer-id`` only when it was read
from the intake queue once more, comes out of the cascade once more only when it was read from the due queue once more,
and has its headers sorted by a broker that sorts only what it delivers again only when it was delivered again.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Final

from tests.support.letters import DOOMED_KEYS, KEYS, NUMBER
from tests.support.verdict import Arrival, Owed

_FRAME: Final = struct.Struct(">BHI")
_AROUND: Final = 8
"""Bytes of a frame beside its payload: what stands before it, and its end."""
_METHOD, _BODY = 1, 3
_DELIVER: Final = b"\0\x3c\0\x3c"
_REDELIVERED_AT: Final = 8
"""Bytes behind the consumer tag: the delivery tag is between."""
_MOST: Final = 255
"""Times that are counted; more are as many as anybody needs."""
_NUMBERS: Final = 1 << 28
"""A body that begins with a larger number is somebody else's."""
_ROOM: Final = 4_096
_RANDOM_ID: Final = 32
"""Digits of an id that is no row's number."""


class Readings:
    """Three bytes a message, and two for each of the doomed."""

    def __init__(self, into: bytes) -> None:
        """``into``: the exchange that the ledger publishes to; what comes through another one is on its way already."""
        self._into = into
        self._read, self._again, self._due = bytearray(), bytearray(), bytearray()
        self._doomed, self._doomed_again = bytearray(), bytearray()
        self.heard: Callable[[int], None] = lambda _: None
        """Called with the number of each message that is read from the intake queue."""

    def listener(self) -> Callable[[bytes], None]:
        """For one connection: takes what the broker says there, in pieces as they come."""
        return _Listener(self._handed)

    def read(self, number: int) -> int:
        """How often it was read from the intake queue."""
        return _of(self._read, number)

    def again(self, number: int) -> bool:
        """Whether the broker itself says that it delivered it again, or it came back from a queue of somebody else."""
        return bool(_of(self._again, number))

    def due(self, number: int) -> int:
        """How often it was read at the end of the cascade."""
        return _of(self._due, number)

    def doomed(self, number: int) -> int:
        """How often the doomed message of that number was read: they have numbers of their own."""
        return _of(self._doomed, number)

    def doomed_again(self, number: int) -> bool:
        """As :meth:`again`, of a doomed one."""
        return bool(_of(self._doomed_again, number))

    def _handed(self, redelivered: bool, exchange: bytes, routing_key: bytes, body: bytes) -> None:
        if len(body) < NUMBER.size or (number := NUMBER.unpack_from(body)[0]) >= _NUMBERS:
            return
        ours = routing_key.startswith(KEYS)  # and not the cascade's, or somebody else's
        if exchange != self._into:
            _count(self._due, number)
            redelivered = True  # what was dead-lettered is sorted as well
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
        """What there is of a message beyond what its readings account for; nothing, as a rule."""
        read, due = self.read(number), self.due(number)
        names = {one.id for one in arrivals}
        random = sum(len(id) == _RANDOM_ID for id in names)
        rows = len(names) - random
        if random > read:
            return f"message {number}: {random} ids that are random, and it was read {read} times: {arrivals}"
        # A reading makes one row at the most: parked, or held, which may follow either of the two readings.
        if rows > read + due:
            return f"message {number}: {rows} rows, and it was read {read} times, {due} times when due: {arrivals}"
        # Copies of one id are the account's to judge: a fault may repeat a publish (G3), and only a fault.
        return ""


def _of(counts: bytearray, number: int) -> int:
    return counts[number] if number < len(counts) else 0


def _count(counts: bytearray, number: int) -> None:
    if number >= len(counts):
        counts.extend(bytes(number - len(counts) + _ROOM))
    if counts[number] < _MOST:
        counts[number] += 1


class _Listener:
    """One connection, the broker's side of it: of every delivery the method, and the beginning of the body."""

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
    """Whether again, exchange and routing key of the delivery whose consumer tag stands at ``at``."""
    at += 1 + data[at] + _REDELIVERED_AT
    redelivered, size = data[at] & 1 == 1, data[at + 1]
    key = at + 2 + size
    return redelivered, data[at + 2 : key], data[key + 1 : key + 1 + data[key]]
