"""Circuit breakers of destinations. While a breaker is open, the messages of its destination are held at once,
unpublished.

A breaker is *closed* (not in the table), *open* until a time, or *half-open* after it. A half-open breaker lets one
batch through as a probe, which closes the breaker or opens it for longer. This module does not publish.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, NamedTuple

from delayer.amqp.errors import MalformedProperties, MalformedTable
from delayer.amqp.properties import Properties
from delayer.amqp.values import CONFIRMED, Outgoing
from delayer.core.hold import Hold, HoldKind, Outcome

MANY: Final = 3
"""With this many open breakers, all keys of an exchange are doubtful, because if keys name orders, each key is new."""
SILENT_PAUSES: Final = (5.0, 30.0)
"""First and longest time that the breaker of a silent queue stays open, in seconds. Its probe takes a second."""
CLOSED_PAUSES: Final = (1.0, 10.0)
"""First and longest time for a destination whose probe closes a channel. Such a probe takes milliseconds."""


class Destination(NamedTuple):
    """The key of a breaker: everything that decides which queues a publish reaches. A ``routing_key`` of None means all
    keys of a missing exchange.

    ``copies``: a digest of CC and BCC, which may be long; empty without copies. If a copy's queue is silent, the same
    key may still answer without the copy.
    """

    exchange: bytes
    routing_key: bytes | None
    copies: bytes = b""


def destination_of(message: Outgoing) -> Destination:
    """Return the destination of a message. Parses its properties, so use it only for doubtful messages."""
    try:
        properties = Properties.parse(message.properties)
        found = [field.content for name in (b"CC", b"BCC") if (field := properties.get(name)) is not None]
        copies = blake2b(b"\0".join(found), digest_size=16).digest() if found else b""
    except (MalformedProperties, MalformedTable):
        copies = b""
    return Destination(message.exchange, message.routing_key, copies)


@dataclass(slots=True)
class _Breaker:
    outcome: Outcome
    """CONFIRMED if the destination answered recently although its exchange has many open breakers."""
    failures: int
    until: float


class CircuitBreaker:
    """The breakers of one process. ``clock``: returns seconds. ``most``: maximum size of the table."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, most: int = 10_000) -> None:
        self._clock = clock
        self._most = most
        self.table: dict[Destination, _Breaker] = {}
        """The breakers that are not closed, ordered by their last probe, the oldest first."""
        self._open: Counter[bytes] = Counter()  # How many breakers of each exchange are not closed.
        self._turn = 0.0  # No batch probes silent queues before this time.

    def partition(self, batch: Sequence[Outgoing], indexes: Iterable[int]) -> tuple[dict[int, Outcome], list[int]]:
        """Return the messages that an open breaker holds, with their outcome, and the doubtful messages, whose
        destination needs a probe first. The rest uses the shared channel.

        Probes of silent queues delay a batch by a second, so only one batch in five seconds sends them.
        """
        now = self._clock()
        self._forget(now)
        held: dict[int, Outcome] = {}
        doubtful: list[int] = []
        our_turn = self._turn <= now
        for one, group in self.groups(batch, (i for i in indexes if batch[i].exchange in self._open)).items():
            breaker = self.table.get(one)
            if breaker is None or breaker.outcome is CONFIRMED:
                if self.suspects(one) and (breaker is None or breaker.until <= now):
                    doubtful += group
                continue
            silent = _silent(breaker.outcome)
            if breaker.until > now or (silent and not our_turn):
                held.update((index, breaker.outcome) for index in group)
                continue
            doubtful += group
            breaker.until = now + 10.0  # This batch has the probe.
            if silent:
                self._turn = now + 5.0
        return held, doubtful

    def groups(self, batch: Sequence[Outgoing], indexes: Iterable[int]) -> dict[Destination, list[int]]:
        """Group the indexes of messages by their breaker."""
        found: dict[Destination, list[int]] = {}
        for index in indexes:
            one = Destination(batch[index].exchange, None)
            if one not in self.table:
                one = destination_of(batch[index])
            found.setdefault(one, []).append(index)
        return found

    def suspects(self, one: Destination) -> bool:
        """Whether a short timeout is enough, because a probe failed or the exchange has silent queues."""
        return one in self.table or self._open[one.exchange] >= MANY

    def open(self, one: Destination, outcome: Outcome) -> None:
        """Open the breaker after a failed probe, for longer each time."""
        earlier = self._remove(one)
        failures = 1 + (earlier.failures if earlier is not None else 0)
        first, longest = SILENT_PAUSES if _silent(outcome) else CLOSED_PAUSES
        pause = min(longest, first * 2.0 ** min(failures - 1, 10))
        self._enter(one, _Breaker(outcome, failures, self._clock() + pause))

    def close(self, one: Destination) -> None:
        """Close the breaker, because the destination answered with any outcome."""
        self._remove(one)
        if one.routing_key is not None and self._open[one.exchange] >= MANY:
            self._enter(one, _Breaker(CONFIRMED, 0, self._clock() + 60.0))

    def _enter(self, one: Destination, breaker: _Breaker) -> None:
        self.table[one] = breaker
        self._open[one.exchange] += breaker.outcome is not CONFIRMED
        if len(self.table) > self._most:
            self._remove(next(iter(self.table)))

    def _remove(self, one: Destination) -> _Breaker | None:
        breaker = self.table.pop(one, None)
        if breaker is not None:
            self._open[one.exchange] -= breaker.outcome is not CONFIRMED
            if not self._open[one.exchange]:
                del self._open[one.exchange]
        return breaker

    def _forget(self, now: float) -> None:
        """Close breakers that had no publish for ten minutes."""
        while self.table and self.table[first := next(iter(self.table))].until + 600.0 < now:
            self._remove(first)


def _silent(outcome: Outcome) -> bool:
    return isinstance(outcome, Hold) and outcome.kind is HoldKind.UNANSWERED
