"""Modes of keys: half of the keys throttle (keep), and half debounce.

Letter n has key n % KEYS, and the mode of that key. A letter that keeps is delivered, or dropped because an earlier
letter of its key waits, which then is delivered after it was read. Of the letters that debounce, the one read last is
delivered, and none comes after a later one. Each is due about the ceiling after it was read, not after its own delay.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from delayer.amqp.values import Outgoing
from tests.faults.features.keys import KEYS, Keyed, judged_live, lost
from tests.support.account import Owed
from tests.support.letters import Letter, long, text

CEILING_MS: Final = 1_500
OWN_MS: Final = 40_000
"""The delay of a letter that debounces. The ceiling must shorten it."""
PARKING_MS: Final = 25_000
"""The ceiling begins when a letter is parked: at most this long after it was read, on a loaded machine and with a fault
between."""


def keeps(number: int) -> bool:
    return number % KEYS % 2 == 0


class Modal(Keyed):
    """``first_ms``, ``last_ms``: when each letter was read for the first and for the last time."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.first_ms: dict[int, float] = {}
        self.last_ms: dict[int, float] = {}

    def _read(self, number: int) -> None:
        super()._read(number)
        self.last_ms[number] = time.time() * 1000
        self.first_ms.setdefault(number, self.last_ms[number])

    def _compose(self, now_ms: int, delay_ms: int, absolute: bool | None) -> Outgoing:
        """A letter that debounces may be due at any time, because its burst may be old."""
        if keeps(self.account.sent):
            return super()._compose(now_ms, delay_ms, absolute)
        return super()._compose(now_ms, 0, absolute=False)

    def letter(self, number: int, owed: Owed) -> Letter:
        if keeps(number):
            mode = [(b"x-delay-key-mode", text(b"keep"))]
        else:
            owed = owed._replace(due_ms=owed.due_ms + OWN_MS, delay_ms=OWN_MS)
            mode = [(b"x-delay-key-mode", text(b"debounce")), (b"x-delay-key-ceiling", long(CEILING_MS))]
        letter = super().letter(number, owed)
        return letter._replace(said=[*letter.said, *mode])


@dataclass(frozen=True)
class Judgement:
    """``lost``: a letter was never read, or the last one of a key that debounces did not arrive. ``dropped``: how many
    letters that keep were dropped. ``uncovered``: no earlier letter of the key came after a dropped one was read.
    ``late``: a letter was due too long after it was read. ``overtaken``: a letter came after a later one of its key."""

    lost: Sequence[int]
    dropped: int
    uncovered: Sequence[int]
    late: Sequence[int]
    overtaken: Sequence[int]

    def assert_kept(self) -> None:
        assert not self.lost, f"{len(self.lost)} were lost, such as {self.lost[:5]}"
        assert not self.uncovered, f"{len(self.uncovered)} were dropped for nothing, such as {self.uncovered[:5]}"
        assert not self.late, f"{len(self.late)} waited longer than their ceiling, such as {self.late[:5]}"
        assert not self.overtaken, f"{len(self.overtaken)} came after a later one, such as {self.overtaken[:5]}"


def judged(ledger: Modal, refused: Collection[int] = ()) -> Judgement:
    """Judge everything, once nothing waits. ``refused``: the numbers that a daemon refused."""
    account, came = ledger.account, sorted(set(ledger.order))
    debouncing = [number for number in range(account.sent) if not keeps(number)]
    gone = lost(ledger.last_read, debouncing, ledger.order, refused)
    gone += [number for number in range(account.sent) if keeps(number) and number not in ledger.last_read]
    dropped = set(filter(keeps, ledger.last_read)).difference(came, refused)
    by_key = {key: [number for number in came if number % KEYS == key] for key in range(KEYS)}
    uncovered = [number for number in dropped if not any(covers(ledger, one, number) for one in by_key[number % KEYS])]
    late = [number for number in debouncing if is_late(ledger, number)]
    overtaken = judged_live(ledger, account.sent, refused).overtaken
    return Judgement(gone, len(dropped), uncovered, late, overtaken)


def covers(ledger: Modal, came: int, dropped: int) -> bool:
    """Whether a letter that came was read before the dropped one was, and came after that."""
    at_ms = ledger.account.arrivals_of(came)[-1].at_ms
    return ledger.first_read[came] < ledger.last_read[dropped] and at_ms >= ledger.first_ms[dropped]


def is_late(ledger: Modal, number: int) -> bool:
    """Whether a letter that debounces was due too long after its last reading."""
    arrivals = ledger.account.arrivals_of(number)
    return any(one.due_ms > ledger.last_ms[number] + CEILING_MS + PARKING_MS for one in arrivals)
