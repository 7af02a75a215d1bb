"""What the publisher has learnt of its exchanges, and so which messages go alone and how many at a time.

A message goes alone, waiting for its own confirm on a channel beside the shared one,

- while nothing is known of its exchange: a success makes it known;
- while its exchange is delicate: the broker objected to one message for it and would take others (topic permissions
  depend on the key). On the shared channel such a message would take everybody else's down with it;
- in careful mode: the shared channel was closed, and as many messages as were in doubt then go alone, until they are
  settled or the exchange behind it is known.

Where the broker closed the whole connection for what was sent, they go alone on a connection of their own.

Going alone costs a round trip, or three for a message that is refused; so the batches are small meanwhile: whatever is
learnt of a batch that is not through at its deadline is lost, and repeated. For the same reason every batch is smaller
after one that was overdue: a broker that takes a hundred messages a second would else be given the same thousand again
and again, and pass on a part of them each time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

BATCH: Final = 10_000
"""Messages of a batch as a rule: no limit to speak of."""
FEW: Final = 100
"""Messages of a batch while some of them go alone: through within the deadline at 25 ms a round trip."""
WARY: Final = 1000
"""Messages that go on connections of their own at least, after one that ended a connection."""
DELICATE: Final = 600.0
"""Seconds that an exchange stays delicate. Permissions are repaired, and whoever sent the one message may be gone."""
REMEMBERED: Final = 10_000
"""Exchanges known to take publishes, and delicate ones. Forgetting costs a round trip each, or a batch in doubt."""


class Caution:
    """Counts and remembers; publishes nothing itself. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tried: set[bytes] = set()
        self._delicate: dict[bytes, float] = {}  # until when; the next one to end stands first
        self._careful = 0
        self._apart = 0
        self._few = FEW
        self._most = BATCH

    @property
    def batch_limit(self) -> int:
        """How many messages one batch should have now."""
        self._forgive()
        return min(self._most, self._few if self._careful or self._delicate else BATCH)

    def delicate(self, exchange: bytes) -> bool:
        """Whether the broker objected lately to one message for this exchange."""
        self._forgive()
        return exchange in self._delicate

    def alone(self, exchange: bytes) -> bool:
        """Whether a message for this exchange goes alone now."""
        return self._careful > 0 or exchange not in self._tried or self.delicate(exchange)

    def took(self, exchange: bytes) -> None:
        """The exchange is there and open to us: one message was confirmed, nacked or returned."""
        if len(self._tried) >= REMEMBERED:
            self._tried.clear()
        self._tried.add(exchange)

    def objected(self, exchange: bytes) -> None:
        """The broker closed the channel for one message, and not for what the exchange is."""
        self._delicate.pop(exchange, None)
        if len(self._delicate) >= REMEMBERED:
            del self._delicate[next(iter(self._delicate))]
        self._delicate[exchange] = self._clock() + DELICATE

    def in_doubt(self, messages: int) -> None:
        """The broker closed the shared channel over so many messages, one of which it was."""
        self._careful += messages
        self._tried.clear()

    @property
    def apart(self) -> bool:
        """Whether messages go on a connection of their own now."""
        return self._apart > 0

    def lost(self, *, objects: bool, messages: int) -> None:
        """The connection is gone. Where the broker ``objects`` to what was sent, that may be one of so many messages,
        or of somebody else's."""
        if objects:
            self.in_doubt(messages)
            self._apart = self._careful

    def found_out(self) -> None:
        """One that ends connections was found. Such ones come in company."""
        self._apart = self._careful = max(self._careful, WARY)

    def late(self, learnt: int, messages: int) -> None:
        """A batch of ``messages`` was not through in time, ``learnt`` of those that went alone were.

        Half as many will be. None at all says nothing of the size: such a broker does not answer.
        """
        if learnt:
            self._few = min(self._few, max(1, learnt // 2))
            self._careful = max(self._careful, messages)

    def overdue(self, messages: int) -> None:
        """A batch of so many was not through in time, and is in doubt."""
        self._most = max(1, min(self._most, messages) // 4)

    def settled(self, messages: int, *, quickly: bool) -> None:
        """The outcomes of a batch are all known."""
        self._careful = max(0, self._careful - messages)
        self._apart = max(0, self._apart - messages)
        if quickly:
            self._few = min(FEW, 2 * self._few)
            self._most = min(BATCH, 2 * self._most)

    def _forgive(self) -> None:
        now = self._clock()
        while self._delicate and self._delicate[exchange := next(iter(self._delicate))] <= now:
            del self._delicate[exchange]
