"""What an import out of queues has committed and may find there again: nobody confirms an acknowledgement.

So the note that is committed with a batch has every batch that the broker may not have heard of: it sends no more than
the prefetch unacknowledged, and what it sent beyond that shows how much it has heard.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from delayer.core.message import Delivery
from delayer.legacy.known import fell
from delayer.wire.properties import Properties


class Taken(NamedTuple):
    """A message in hand; the digest is empty where it has no identity."""

    tag: int
    digest: str


class _Acknowledged(NamedTuple):
    """A batch whose acknowledgements the broker may not have heard of: how many, and the digests of what has one."""

    messages: int
    digests: list[str]


class Doubt:
    """``falling``: whether messages go from one of the queues to another by themselves."""

    def __init__(self, *, falling: bool) -> None:
        self._falling = falling
        self._known: Counter[str] = Counter()
        self._in_doubt: deque[_Acknowledged] = deque()
        self._heard = 0

    def read(self, note: str) -> None:
        """What another run noted."""
        self._known.update(json.loads(note)["digests"])

    def total(self) -> int:
        """How many of those were not met yet."""
        return self._known.total()

    def met_again(self, delivery: Delivery, properties: Properties | None, digest: str) -> bool:
        """Whether it is one of those that are committed and may still be there."""
        again = delivery.redelivered or (self._falling and fell(properties))
        if not again or not digest or self._known[digest] <= 0:
            return False
        self._known[digest] -= 1
        return True

    def note(self, queue: str, both: Sequence[Taken], heard: int) -> str:
        """The digests of what may be delivered again: of this batch, of those before whose acknowledgements the broker
        may not have, and of those that another run committed and that were not met again. ``heard``: how many it must
        have heard of."""
        self._in_doubt.append(_Acknowledged(len(both), [one.digest for one in both if one.digest]))
        while len(self._in_doubt) > 1 and self._heard + self._in_doubt[0].messages <= heard:
            self._heard += self._in_doubt.popleft().messages
        digests = sorted([*(one for of in self._in_doubt for one in of.digests), *self._known.elements()])
        return json.dumps({"queue": queue, "digests": digests})

    def over(self) -> None:
        """The broker has ended the consumer, in order behind its acknowledgements."""
        self._in_doubt.clear()
        self._heard = 0


def queue_of(note: str) -> str:
    """Which queue was read when that was noted."""
    return str(json.loads(note)["queue"])
