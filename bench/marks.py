"""The marks of a message of the load: the instant for which its publisher asked, and its number. The publisher writes
them into prebuilt frames, and the consumer finds them by a regular expression."""

from __future__ import annotations

import array
import re
import struct
from collections.abc import Iterable

from bench.plain import PORTION, message, number, properties

_INSTANT = struct.Struct(">q")
PLACEHOLDER, PLACE_OF_NUMBER = 1 << 62, 3 << 61
DUE_HEADER = "bench-due"
"""The instant requested by the publisher (epoch ms). It travels with the message: lateness is measured from it, not
from the due instant computed by a daemon."""
DUE = re.compile(rb"\x09bench-due[lL](.{8})", re.DOTALL)
NUMBER_HEADER = "bench-n"
"""The message's number. Its name follows the other by the alphabet too: brokers from 4.0 on sort headers."""
NUMBERED = re.compile(rb"\x09bench-due[lL](.{8})\x07bench-n[lL](.{8})", re.DOTALL)
UNREAD = 35
"""The last bytes of a read may be the beginning of these headers."""
DISTINCT_BYTES = 64_000_000
"""Bytes of different messages built beforehand."""


def instant(ms: int) -> bytes:
    return _INSTANT.pack(ms)


DAEMON_HEADER, RELATIVE_HEADER, BROKER_HEADER = "x-deliver-at", "x-delay", "x-opt-delivery-time"
"""The headers that request an instant and a delay from the daemon, and the one that requests it from RabbitMQ 4.4
itself."""


def due_at(instant_ms: int, n: int, header: str = DAEMON_HEADER) -> bytes:
    """Properties of a message for that instant: the header that requests it, and the headers for the consumer."""
    return properties(number(header, instant_ms) + number(DUE_HEADER, instant_ms) + number(NUMBER_HEADER, n))


class Chunk:
    """Some messages in one write; each use writes new instants and numbers into it."""

    def __init__(self, exchange: str, key: str, body: bytes, each: int, header: str = DAEMON_HEADER) -> None:
        one = message(exchange, key, due_at(PLACEHOLDER, PLACE_OF_NUMBER, header), body)
        self.data = bytearray(one * each)
        instants, self._numbers = self._places(PLACEHOLDER), self._places(PLACE_OF_NUMBER)
        self._instants = list(zip(instants[::2], instants[1::2], strict=True))
        if not len(self._instants) == len(self._numbers) == each:
            raise ValueError("a body that looks like a placeholder")

    def _places(self, value: int) -> list[int]:
        return [found.start() for found in re.finditer(re.escape(_INSTANT.pack(value)), bytes(self.data))]

    def fill(self, asked: Iterable[int], due_ms: Iterable[int], first: int) -> bytearray:
        """The messages that request these instants (or delays), numbered from ``first`` on. The consumer measures their
        lateness from ``due_ms``."""
        values = zip(asked, due_ms, self._instants, self._numbers, strict=True)
        for n, (ask, due, (header, mark), place) in enumerate(values, first):
            _INSTANT.pack_into(self.data, header, ask)
            _INSTANT.pack_into(self.data, mark, due)
            _INSTANT.pack_into(self.data, place, n)
        return self.data


def distinct(count: int, size: int, each: int = PORTION) -> int:
    """The number of different messages in a flood of ``count``: all, unless they are large. A multiple of ``each``."""
    most = max(DISTINCT_BYTES // size // each, 1) * each
    return min(-(-count // each) * each, most)


class Tally:
    """The arrived messages by their numbers: a repeated message does not hide a lost one.

    ``count`` were sent, cycling through ``distinct`` numbers.
    """

    def __init__(self, count: int, distinct: int) -> None:
        rounds, more = divmod(count, distinct)
        self._expected = array.array("q", [rounds + 1]) * more + array.array("q", [rounds]) * (distinct - more)
        self.came = 0
        self.repeated = 0

    def take(self, n: int) -> None:
        if n >= len(self._expected):  # a publisher rounds to whole ticks
            self._expected.extend([1] * (n + 1 - len(self._expected)))
        if self._expected[n]:
            self._expected[n] -= 1
            self.came += 1
        else:
            self.repeated += 1
