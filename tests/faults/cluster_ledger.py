"""A ledger whose destination survives the death of a node, and the figures of a fault."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

from delayer.amqp.values import Delivery, Outgoing
from tests.support.ledger import Arrival, Ledger, Verdict
from tests.support.raw import Props

SILENT_SECONDS: Final = 1.0
"""The shortest silence that counts. A busy machine causes half of it without a fault."""


class ReplicatedLedger(Ledger):
    """Its destination is a quorum queue. It notes the time of each publish and of each arrival."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.newest = -1
        """The highest number that has arrived."""
        self.arrived_ms: list[float] = []
        self._attempted_ms: dict[int, float] = {}

    def arguments(self) -> dict[str, Any]:
        return {"x-queue-type": "quorum"}

    def note_attempt(self, batch: Sequence[Outgoing]) -> None:
        now_ms = time.time() * 1000
        self._attempted_ms.update((int(message.token), now_ms) for message in batch)

    def judge(self, number: int, delivery: Delivery, at_ms: float) -> bool:
        self.newest = max(self.newest, number)
        self.arrived_ms.append(at_ms)
        if not delivery.redelivered:
            return super().judge(number, delivery, at_ms)
        # A quorum queue adds a header to a redelivered message, and sorts its headers.
        properties = Props.decode(delivery.properties).without(b"x-delivery-count").encode()
        letter = self.letter(number, self.account.owed(number))
        if gained := letter.gained(delivery.routing_key, properties, delivery.body, sorts=True):
            self.account.take(number, Arrival(at_ms, gained.id, gained.due_ms, True))
            return True
        return super().judge(number, delivery._replace(properties=properties), at_ms)

    def lateness(self) -> list[float]:
        """The lateness of each message that arrived, in seconds, sorted. A delay begins with the last attempt to
        publish the message: before it the publisher was late, and after it the broker or the daemon."""
        found = []
        for number in range(self.account.sent):
            if arrivals := self.account.arrivals_of(number):
                owed, attempted_ms = self.account.owed(number), self._attempted_ms[number]
                due_ms = max(owed.due_ms, attempted_ms + (0 if owed.form.absolute else owed.delay_ms))
                found.append(max(0.0, arrivals[0].at_ms - due_ms) / 1000)
        return sorted(found)

    def repeats(self) -> Repeats:
        """The messages that arrived more than once, by the cause of their copies."""
        release = intake = ledger = 0
        for number in range(self.account.sent):
            fresh = [one.id for one in self.account.arrivals_of(number) if not one.redelivered]
            release += len(fresh) > len(set(fresh))
            if len(set(fresh)) > 1:
                ledger += number in self.account.published_twice
                intake += number not in self.account.published_twice
        return Repeats(release, intake, ledger)

    def silences(self, begin_ms: float, end_ms: float) -> list[Silence]:
        """The times without an arrival between these two instants."""
        times = [begin_ms, *(at_ms for at_ms in sorted(self.arrived_ms) if begin_ms < at_ms < end_ms), end_ms]
        return [
            Silence((last_ms - begin_ms) / 1000, (next_ms - begin_ms) / 1000)
            for last_ms, next_ms in pairwise(times)
            if next_ms - last_ms >= SILENT_SECONDS * 1000
        ]


class Silence(NamedTuple):
    """A time without an arrival, in seconds since the fault."""

    begin: float
    end: float


@dataclass(frozen=True)
class Repeats:
    """Numbers of messages with copies. ``release``: under one ``x-delayer-id``. ``intake``: read twice by the daemon.
    ``ledger``: published twice by the ledger, after a publish that the broker did not confirm. Copies redelivered by
    the destination's queue do not count."""

    release: int
    intake: int
    ledger: int


@dataclass(frozen=True)
class Figures:
    """The account of one fault. All times are in seconds.

    ``lasted``: from the fault until everything was repaired.
    ``silences``: the times without an arrival between the fault and the last new message.
    ``failed_over``: whether new messages passed before the repair.
    ``events``: the daemon's log since the fault, each event with its time.
    """

    verdict: Verdict
    repeats: Repeats
    lateness: Sequence[float]
    lasted: float
    silences: Sequence[Silence]
    failed_over: bool
    events: Sequence[str]

    def late(self, share: float) -> float:
        """The lateness that this share of the messages did not exceed."""
        return self.lateness[min(len(self.lateness) - 1, int(share * len(self.lateness)))] if self.lateness else 0.0

    @property
    def recovery(self) -> float:
        """Seconds from the fault until release continued for good; 0 if it never paused."""
        return self.silences[-1].end if self.silences else 0.0

    @property
    def row(self) -> Mapping[str, object]:
        """A row of the report."""
        return {
            "sent": self.verdict.sent,
            "lost": len(self.verdict.missing),
            "early": len(self.verdict.early),
            "changed": len(self.verdict.changed),
            "repeated at release": self.repeats.release,
            "read twice": self.repeats.intake,
            "published twice": self.repeats.ledger,
            "p50": round(self.late(0.5), 3),
            "p99": round(self.late(0.99), 2),
            "max": round(self.late(1.0), 2),
            "lasted": round(self.lasted, 1),
            "silences": " ".join(f"{begin:.1f}-{end:.1f}" for begin, end in self.silences),
            "recovery": round(self.recovery, 1),
            "failed over": self.failed_over,
        }
