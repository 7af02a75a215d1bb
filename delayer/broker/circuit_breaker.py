"""Circuit breakers of destinations: while one is open, its messages are held at once and not published.

A breaker is *closed* (not in the table), *open* until a time, or *half-open* after it. A half-open breaker lets one
message through as a probe. The probe closes the breaker, or opens it for longer. This module publishes nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from delayer.amqp.errors import MalformedProperties, MalformedTable
from delayer.amqp.properties import Properties
from delayer.core.message import Outcome, Outgoing, Unanswered

MANY: Final = 3
"""With so many open breakers, the other keys of an exchange are doubtful: if keys name orders, each key is new."""


class Destination(NamedTuple):
    """The key of a breaker: everything that decides which queues a publish reaches. With ``routing_key`` None it stands
    for all keys of a missing exchange.

    ``copies`` are the bytes of CC and BCC. A silent queue behind a copy proves nothing about the same key without it.
    """

    exchange: bytes
    routing_key: bytes | None
    copies: bytes = b""


def destination(message: Outgoing) -> Destination:
    """The destination of ``message``. This parses the properties, so only doubtful messages need it."""
    try:
        properties = Properties.parse(message.properties)
        copies = b"\0".join(field.content for name in (b"CC", b"BCC") if (field := properties.get(name)) is not None)
    except (MalformedProperties, MalformedTable):
        copies = b""
    return Destination(message.exchange, message.routing_key, copies)


@dataclass(slots=True)
class _Breaker:
    outcome: Outcome | None  # None: the destination is suspected, so the next message is a probe.
    failures: int
    until: float


class CircuitBreaker:
    """The breakers of one process. ``clock`` returns seconds; ``most`` bounds each table."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, most: int = 10_000) -> None:
        self._clock = clock
        self._most = most
        self.table: dict[Destination, _Breaker] = {}
        """The breakers that are not closed, ordered by their last failure, the oldest first."""
        self._of_exchange: Counter[bytes] = Counter()
        self._open_of_exchange: Counter[bytes] = Counter()
        # Destinations that answered lately, although their exchange has open breakers.
        self._answering: dict[Destination, float] = {}
        # No batch waits for probes before the first time. The second is the time of the last batch that did.
        self._turn = self._granted = 0.0

    def partition(self, batch: Sequence[Outgoing], indexes: Iterable[int]) -> tuple[dict[int, Outcome], list[int]]:
        """The messages that an open breaker holds, with their outcome, and the doubtful ones, whose destination needs a
        probe first. All others take the shared channel."""
        now = self._clock()
        self._forget(now)
        held: dict[int, Outcome] = {}
        doubtful: list[int] = []
        for one, group in self.groups(batch, (i for i in indexes if batch[i].exchange in self._of_exchange)).items():
            breaker = self.table.get(one)
            if breaker is None:
                if self.suspects(one) and one not in self._answering:
                    doubtful += group
            elif (outcome := self._held(breaker, now)) is not None:
                held.update((index, outcome) for index in group)
            else:
                doubtful += group
                self._grant(breaker, now)
        return held, doubtful

    def groups(self, batch: Sequence[Outgoing], indexes: Iterable[int]) -> dict[Destination, list[int]]:
        """The indexes of these messages by their breaker."""
        found: dict[Destination, list[int]] = {}
        for index in indexes:
            one = Destination(batch[index].exchange, None)
            if one not in self.table:
                one = destination(batch[index])
            found.setdefault(one, []).append(index)
        return found

    def open(self, one: Destination, outcome: Outcome) -> None:
        """Open the breaker after a failed probe, for longer each time."""
        earlier = self.table.pop(one, None)
        failures = 1 + (earlier.failures if earlier is not None else 0)
        # A probe of a silent queue takes a second, a probe that closes a channel takes some milliseconds.
        first, longest = (5.0, 30.0) if isinstance(outcome, Unanswered) else (1.0, 10.0)
        pause = min(longest, first * 2.0 ** min(failures - 1, 10))
        self._enter(one, earlier, _Breaker(outcome, failures, self._clock() + pause))

    def suspect(self, one: Destination) -> None:
        """Suspect a destination that did not answer while nothing else was confirmed: its next message is a probe."""
        if one not in self.table:
            self._enter(one, None, _Breaker(None, 0, self._clock()))

    def has(self, one: Destination) -> bool:
        """Whether the destination has a breaker: an earlier probe of it failed or got no answer."""
        return one in self.table

    def suspects(self, one: Destination) -> bool:
        """Whether a short wait for its answer is enough: it was silent before, or its exchange has silent queues."""
        breaker = self.table.get(one)
        return breaker.outcome is not None if breaker is not None else self._open_of_exchange[one.exchange] >= MANY

    def close(self, one: Destination) -> None:
        """Close the breaker: the destination answered, with any outcome."""
        self._remove(one)
        if self._open_of_exchange[one.exchange] >= MANY:
            if len(self._answering) >= self._most:
                del self._answering[next(iter(self._answering))]
            self._answering[one] = self._clock() + 60.0

    def _held(self, breaker: _Breaker, now: float) -> Outcome | None:
        """The outcome of an open breaker; None for a half-open one. A batch waits a second for probes of silent queues,
        so only one batch in five seconds sends such probes."""
        silent = isinstance(breaker.outcome, Unanswered)
        return breaker.outcome if breaker.until > now or (silent and self._turn > now != self._granted) else None

    def _grant(self, breaker: _Breaker, now: float) -> None:
        """Reserve the probe for this batch."""
        if breaker.outcome is not None:
            breaker.until = now + 10.0
            if isinstance(breaker.outcome, Unanswered):
                self._turn, self._granted = now + 5.0, now

    def _enter(self, one: Destination, earlier: _Breaker | None, breaker: _Breaker) -> None:
        if earlier is None:
            self._of_exchange[one.exchange] += 1
        if breaker.outcome is not None and (earlier is None or earlier.outcome is None):
            self._open_of_exchange[one.exchange] += 1
        self._answering.pop(one, None)
        self.table[one] = breaker
        if len(self.table) > self._most:
            self._remove(next(iter(self.table)))

    def _remove(self, one: Destination) -> None:
        breaker = self.table.pop(one, None)
        if breaker is None:
            return
        for counter, counts in ((self._of_exchange, True), (self._open_of_exchange, breaker.outcome is not None)):
            counter[one.exchange] -= counts
            if counter[one.exchange] <= 0:
                del counter[one.exchange]

    def _forget(self, now: float) -> None:
        """Close breakers that had no publish for ten minutes."""
        while self.table and self.table[first := next(iter(self.table))].until + 600.0 < now:
            self._remove(first)
        while self._answering and self._answering[fine := next(iter(self._answering))] <= now:
            del self._answering[fine]
