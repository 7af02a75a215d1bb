"""The account of a ledger: messages owed, messages arrived, and the verdict on the promises. Pure, and small: about
sixty bytes per message, so that hours of messages fit."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

from tests.support.letters import Form
from tests.support.readings import Readings
from tests.support.verdict import Arrival, Findings, Owed, Verdict, Window

_STORED: Final = (1 << 64) - 1
"""The first half of an id that is a row's number; other ids have the first half of a UUID here."""
AFTERMATH_MS: Final = 5_000
"""After a fault a server may answer old requests for this long."""
_HEX: Final = 32
"""Digits of a UUID; the number of a row has fewer."""


class Account:
    """Numbers are given from 0 on."""

    def __init__(self) -> None:
        self.early = Findings()
        self.changed = Findings()
        self.published_twice: set[int] = set()
        """Messages that the ledger published again after a publish in doubt: it may have made their copies itself."""
        self.windows: list[Window] | None = None
        """Times of the faults, if the test records them: then only a message that met a fault may be delivered
        twice."""
        self.readings: Readings | None = None
        """Counts of reads per message, if a proxy listens: then a message may not have more copies than its reads
        explain, under any fault."""
        self.resorted: list[int] = []
        """Messages whose headers arrived sorted by name, without a listening proxy."""
        self._form = array("B")
        self._due = array("q")
        self._delay = array("q")
        self._at = array("d")
        self._ids = array("Q")
        self._said_due = array("q")
        self._redelivered = array("B")
        self._copies: dict[int, list[Arrival]] = {}
        self._back = 0
        self._more = 0

    @property
    def sent(self) -> int:
        return len(self._form)

    @property
    def back(self) -> int:
        """Different messages that arrived."""
        return self._back

    @property
    def arrived(self) -> int:
        """All arrivals, copies included."""
        return self._back + self._more

    def owe(self, form: Form, due_ms: int, delay_ms: int) -> int:
        """A new number, for a message about to be published."""
        self._form.append(form)
        self._due.append(due_ms)
        self._delay.append(delay_ms)
        self._at.append(0.0)
        self._ids.extend((0, 0))
        self._said_due.append(0)
        self._redelivered.append(0)
        return len(self._form) - 1

    def owed(self, number: int) -> Owed:
        return Owed(Form(self._form[number]), self._due[number], self._delay[number])

    def reschedule(self, due_ms: int) -> None:
        """The test has rescheduled every message to this instant."""
        self._due = array("q", [due_ms]) * self.sent

    def move(self, number: int, due_ms: int) -> None:
        """The test has rescheduled this message."""
        self._due[number] = due_ms

    def take(self, number: int, arrival: Arrival) -> None:
        """Note an unchanged message."""
        owed = self.owed(number)
        if (
            arrival.at_ms < max(arrival.due_ms, owed.due_ms)
            or arrival.due_ms < owed.due_ms
            or (owed.form.absolute and arrival.due_ms != owed.due_ms)
        ):
            self.early.add(f"message {number}: owed at {owed.due_ms}, header {arrival.due_ms}, at {arrival.at_ms}")
        if arrival.resorted:
            self._judge_order(number)
        high, low = _packed(arrival.id)
        if self._at[number]:
            self._copies.setdefault(number, []).append(arrival)
            self._more += 1
            return
        self._back += 1
        self._at[number] = arrival.at_ms
        self._ids[2 * number], self._ids[2 * number + 1] = high, low
        self._said_due[number] = arrival.due_ms
        self._redelivered[number] = arrival.redelivered

    def _judge_order(self, number: int) -> None:
        """The broker may have sorted the headers, but only of a message that it delivered again."""
        if self.readings is None:
            self.resorted.append(number)
        elif not self.readings.again(number):
            self.changed.add(f"message {number}: its headers came sorted, and it was never delivered again")

    def take_changed(self, number: int, at_ms: float, text: str) -> None:
        """Record a changed message. It does not count as missing."""
        self.changed.add(text)
        if not self._at[number]:
            self._back += 1
            self._at[number] = at_ms

    def arrivals_of(self, number: int) -> list[Arrival]:
        if not self._at[number]:
            return []
        id = _unpacked(self._ids[2 * number], self._ids[2 * number + 1])
        first = Arrival(self._at[number], id, self._said_due[number], bool(self._redelivered[number]))
        return [first, *self._copies.get(number, ())]

    @property
    def rows_back(self) -> int:
        """Rows of the store with at least one arrival under the row's number. Together with messages held under an
        earlier id, they are as many as the store counts as released, if every copy has its row's id."""
        ids = self._ids
        first = sum(ids[2 * number] == _STORED for number in range(self.sent))
        return first + sum(
            len({one.id for one in copies if len(one.id) < _HEX} - {self.arrivals_of(number)[0].id})
            for number, copies in self._copies.items()
        )

    def shared(self) -> list[int]:
        """Numbers of messages that share an id with another message; a changed message has no id here."""
        ids, found = self._ids, set[int]()
        named = [number for number in range(self.sent) if ids[2 * number] or ids[2 * number + 1]]
        named.sort(key=lambda number: (ids[2 * number], ids[2 * number + 1]))
        for one, other in pairwise(named):
            if ids[2 * one : 2 * one + 2] == ids[2 * other : 2 * other + 2]:
                found |= {one, other}
        holder = {_packed(copy.id): number for number, copies in self._copies.items() for copy in copies}
        for number in named:
            other = holder.get((ids[2 * number], ids[2 * number + 1]), number)
            if other != number:
                found |= {number, other}
        return sorted(found)

    def missing(self) -> list[int]:
        return [] if self._back == self.sent else [number for number, at in enumerate(self._at) if not at]

    def verdict(self, standing: Mapping[str, int]) -> Verdict:
        """The account now; ``standing`` counts the messages left in refused, strays, held and so on."""
        repeats = {number: self.arrivals_of(number) for number in sorted(self._copies)}
        return Verdict(
            self.sent,
            self.missing(),
            self.early,
            self.changed,
            repeats,
            frozenset(self.published_twice),
            [number for number in repeats if not self._excused(number, repeats[number])],
            standing,
            self.shared(),
            self._unaccounted(repeats),
            self.resorted,
        )

    def _unaccounted(self, repeats: Mapping[int, Sequence[Arrival]]) -> Findings:
        findings = Findings()
        if self.readings is not None:
            for number, arrivals in repeats.items():
                if text := self.readings.unaccounted(number, self.owed(number), arrivals):
                    findings.add(text)
        return findings

    def _excused(self, number: int, arrivals: Sequence[Arrival]) -> bool:
        """Whether a fault fell between the start of a message and its last copy. Two copies with two ids are also
        excused if the ledger published the message twice."""
        if self.windows is None:
            return True
        names = {one.id for one in arrivals}
        if number in self.published_twice and len(names) == len(arrivals) == 2:
            return True
        begun_ms, last_ms = _begun_ms(self.owed(number), arrivals), max(one.at_ms for one in arrivals)
        return any(window.begin_ms <= last_ms and window.end_ms >= begun_ms for window in self.windows)


def _begun_ms(owed: Owed, arrivals: Sequence[Arrival]) -> float:
    """The first instant at which a fault could have caused the copies: usually the publish. Copies under one id come
    from one read, and a relative delay reveals when that was."""
    if owed.form.absolute or len({one.id for one in arrivals}) > 1:
        return owed.sent_ms
    return max(owed.sent_ms, arrivals[0].due_ms - owed.delay_ms - AFTERMATH_MS)


def _packed(id: bytes) -> tuple[int, int]:
    """An id as two integers: that of a row is its number in decimal, any other is 32 hexadecimal digits."""
    return (int(id[:16], 16), int(id[16:], 16)) if len(id) == _HEX else (_STORED, int(id))


def _unpacked(high: int, low: int) -> bytes:
    return b"%d" % low if high == _STORED else b"%016x%016x" % (high, low)
