"""Which destinations do not answer, and which answers came late. Remembers only; publishes nothing. Time is passed in.

A *destination* is what decides which queues a publish goes to: exchange, key and copies. It is *suspected* when a batch
was not through in time and it was among those without an answer (which says little: a broker's channel that waits for
one queue answers for none behind it), and *stuck* when it did not answer alone either, while others were confirmed.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Final, NamedTuple

from delayer.core.message import Outcome, Outgoing
from delayer.wire.properties import MalformedProperties, MalformedTable, Properties

SUSPECTED: Final = 60.0
"""Seconds that a destination is suspected if nothing goes there."""
STUCK: Final = 600.0
"""Seconds that one is stuck, since it was last found so."""
FINE: Final = 60.0
"""Seconds that one is left in peace that answered, while its exchange leads to others that do not."""
MANY: Final = 3
"""Stuck destinations of one exchange that make every other one of it doubtful: where keys name orders, each is new."""
REMEMBERED: Final = 10_000
"""Of each kind. Forgetting costs a batch that waits for its deadline, or a copy."""
BRIEFLY: Final = 60.0
"""Seconds that an outcome is remembered whose batch was interrupted: what was rolled back comes again soon."""
LONG: Final = 7200.0
"""And one that came late: a held message is tried again within an hour."""


class Destination(NamedTuple):
    """Where a publish leads. ``copies``: the fields CC and BCC, as they are."""

    exchange: bytes
    routing_key: bytes
    copies: bytes = b""


class Doubt(Enum):
    """Why a message is not published with the others."""

    SUSPECTED = auto()
    STUCK = auto()
    BESIDE = auto()
    """Its exchange leads to several that are stuck, whether it is suspected itself or not."""


def destination(message: Outgoing) -> Destination:
    """Looked into only while there is a doubt."""
    try:
        properties = Properties.parse(message.properties)
        copies = b"\0".join(field.content for name in (b"CC", b"BCC") if (field := properties.get(name)) is not None)
    except (MalformedProperties, MalformedTable):
        copies = b""
    return Destination(message.exchange, message.routing_key, copies)


class Doubts:
    """Destinations, each with the time until which that holds; the first to end stands first."""

    def __init__(self) -> None:
        self._suspected: dict[Destination, float] = {}
        self._stuck: dict[Destination, float] = {}
        self._fine: dict[Destination, float] = {}
        self._of_exchange: Counter[bytes] = Counter()

    def any(self, now: float) -> bool:
        """Whether there is a doubt about anything."""
        self._expire(now)
        return bool(self._suspected or self._stuck)

    def of(self, one: Destination) -> Doubt | None:
        """None: it is published with the others. As of the last :meth:`any`."""
        if one in self._stuck:
            return Doubt.STUCK
        if self._of_exchange[one.exchange] >= MANY and one not in self._fine:
            return Doubt.BESIDE
        return Doubt.SUSPECTED if one in self._suspected else None

    def meant(self) -> Callable[[Outgoing], bool]:
        """Tells whether a message can be meant by any doubt, without a look into its properties."""
        places = {(one.exchange, one.routing_key) for kind in (self._suspected, self._stuck) for one in kind}
        wide = {exchange for exchange, stuck in self._of_exchange.items() if stuck >= MANY}
        return lambda message: message.exchange in wide or (message.exchange, message.routing_key) in places

    def suspect(self, one: Destination, now: float) -> None:
        """It was not answered, among others."""
        self._fine.pop(one, None)
        if one not in self._stuck:
            _enter(self._suspected, one, now + SUSPECTED)

    def stuck(self, one: Destination, now: float) -> None:
        """It did not answer alone."""
        self._suspected.pop(one, None)
        if one not in self._stuck:
            self._of_exchange[one.exchange] += 1
            if len(self._stuck) >= REMEMBERED:
                self._free(next(iter(self._stuck)))
        _enter(self._stuck, one, now + STUCK)

    def unsuspect(self, one: Destination, now: float) -> None:
        """It did not answer, but that says nothing of it: it goes with the others, unless it was found stuck before."""
        if one not in self._stuck:
            self.answered(one, now)

    def answered(self, one: Destination, now: float) -> None:
        """It answered, whatever."""
        self._suspected.pop(one, None)
        self._free(one)
        if self._of_exchange[one.exchange] >= MANY:
            _enter(self._fine, one, now + FINE)

    def _free(self, one: Destination) -> None:
        if self._stuck.pop(one, None) is not None:
            self._of_exchange[one.exchange] -= 1
            if not self._of_exchange[one.exchange]:
                del self._of_exchange[one.exchange]

    def _expire(self, now: float) -> None:
        for kind in (self._suspected, self._fine):
            while kind and kind[first := next(iter(kind))] <= now:
                del kind[first]
        while self._stuck and self._stuck[first := next(iter(self._stuck))] <= now:
            self._free(first)


def _enter(kind: dict[Destination, float], one: Destination, until: float) -> None:
    kind.pop(one, None)
    if len(kind) >= REMEMBERED:
        del kind[next(iter(kind))]
    kind[one] = until


def others(
    batch: Sequence[Outgoing], apart: Mapping[Destination, Sequence[int]], known: Mapping[int, Outcome]
) -> list[int]:
    """The indexes of all but these."""
    held_back = {index for indexes in apart.values() for index in indexes}
    return [index for index in range(len(batch)) if index not in held_back and index not in known]


class Known:
    """Outcomes of single messages. A message is the same only if every byte of it is: its id, and its due instant."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._outcomes: dict[bytes, tuple[bytes, Outcome, float]] = {}

    def any(self, now: float) -> bool:
        """Whether anything is known."""
        outcomes = self._outcomes
        while outcomes and outcomes[first := next(iter(outcomes))][2] <= now:
            del outcomes[first]
        return bool(outcomes)

    def note(self, message: Outgoing, outcome: Outcome, now: float) -> None:
        self._outcomes.pop(message.token, None)
        if len(self._outcomes) >= REMEMBERED:
            del self._outcomes[next(iter(self._outcomes))]
        self._outcomes[message.token] = _digest(message), outcome, now + self._seconds

    def of(self, message: Outgoing) -> Outcome | None:
        """What is known of this very message. As of the last :meth:`any`."""
        known = self._outcomes.get(message.token)
        return known[1] if known is not None and known[0] == _digest(message) else None

    def forget(self) -> None:
        self._outcomes.clear()


def _digest(message: Outgoing) -> bytes:
    whole = hashlib.blake2b(digest_size=16)
    for part in (message.exchange, message.routing_key, message.properties, message.body):
        whole.update(b"%d:" % len(part))
        whole.update(part)
    return whole.digest()
