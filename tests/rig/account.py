"""The account of a ledger: what is owed, what arrived, and what that says of the promises. Pure, and small: some sixty
bytes a message, so that hours of messages fit."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

from tests.rig.letters import Form, message_id_of

FIRST_FEW: Final = 20
"""Findings that are kept in words; the others are counted."""
_STORED: Final = (1 << 64) - 1
"""Beside the number of a row, where the id of any other message has the first half of a UUID."""

_HEX: Final = 32
"""Digits of a UUID; the number of a row has fewer."""


class Arrival(NamedTuple):
    """One message at the destination. ``due_ms`` and ``id`` are what its x-delayer headers say."""

    at_ms: float
    id: bytes
    due_ms: int
    redelivered: bool


class Owed(NamedTuple):
    """What is owed for a number: not before ``due_ms``, and exactly then if it was said as an instant."""

    form: Form
    due_ms: int
    delay_ms: int

    @property
    def sent_ms(self) -> int:
        return self.due_ms - self.delay_ms


class Window(NamedTuple):
    """The time of a fault: from its beginning to when everything went on again."""

    begin_ms: float
    end_ms: float


def covered(windows: Iterable[Window]) -> float:
    """Seconds that lie in any of them."""
    seconds, until_ms = 0.0, 0.0
    for begin_ms, end_ms in sorted(windows):
        seconds += max(0.0, end_ms - max(begin_ms, until_ms)) / 1000
        until_ms = max(until_ms, end_ms)
    return seconds


@dataclass
class Findings:
    """Broken promises of one kind: how many, and the first few in words."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        self.count += 1
        if len(self.first) < FIRST_FEW:
            self.first.append(text)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, position: int) -> str:
        return self.first[position]


@dataclass(frozen=True)
class Verdict:
    """The account. ``repeats``: by number, every arrival of the messages that came more than once. ``unexcused``: those
    of them that met no fault, where the times of the faults are known."""

    sent: int
    missing: Sequence[int]
    early: Findings
    changed: Findings
    repeats: Mapping[int, Sequence[Arrival]]
    published_twice: frozenset[int] = frozenset()
    unexcused: Sequence[int] = ()
    standing: Mapping[str, int] = field(default_factory=dict)
    shared: Sequence[int] = ()
    """Messages with the ``x-delayer-id`` of another one, which a consumer that knows copies by it would throw away. Of
    one store there must be none; of two, numbers of rows are the same."""

    @property
    def repeated_at_release(self) -> int:
        """Messages of which all copies have one ``x-delayer-id``: they were in the store, or in the cascade, once."""
        return sum(len({one.id for one in arrivals}) == 1 for arrivals in self.repeats.values())

    @property
    def taken_in_twice(self) -> int:
        """Messages that were read twice from the intake queue, by their publisher's ``message_id``: their copies have
        that in common, and an ``x-delayer-id`` each."""
        return sum(bool(message_id_of(number)) for number in self._read_twice())

    @property
    def nameless(self) -> int:
        """The same, of messages to which their publisher gave no ``message_id``: no name marks their copies. They are
        alike in everything that was published (or they count as changed), and in ``x-delayer-due`` too where the due
        instant was said as such (or they count as early); one that was said as a delay has a later one in a later
        copy, as it counts from when that was read."""
        return sum(not message_id_of(number) for number in self._read_twice())

    @property
    def two_faced(self) -> Sequence[int]:
        """Messages with copies of one ``x-delayer-id`` that differ in ``x-delayer-due``. There must be none."""
        return [
            number
            for number, arrivals in self.repeats.items()
            if len({one.id for one in arrivals}) < len({(one.id, one.due_ms) for one in arrivals})
        ]

    def _read_twice(self) -> Iterator[int]:
        return (number for number, arrivals in self.repeats.items() if len({one.id for one in arrivals}) > 1)

    def assert_kept(self, *, repeats: bool = False) -> None:
        """Nothing lost, early or changed, nothing left standing; nothing twice unless there was a fault."""
        assert not self.missing, f"{len(self.missing)} of {self.sent} lost, the first: {self.missing[:10]}; {self}"
        assert not self.early, f"{len(self.early)} early, the first: {self.early[0]}"
        assert not self.changed, f"{len(self.changed)} changed, the first: {self.changed[0]}"
        assert not any(self.standing.values()), f"left standing: {self.standing}"
        assert repeats or not self.repeats, f"{len(self.repeats)} came more than once: {list(self.repeats.items())[:3]}"
        assert not self.unexcused, f"{len(self.unexcused)} came twice without a fault: {self.unexcused[:10]}"
        assert not self.two_faced, f"{len(self.two_faced)} with one id and two due instants: {self.two_faced[:10]}"

    def assert_apart(self) -> None:
        """Every message has a name of its own: ask where there is one store."""
        assert not self.shared, f"{len(self.shared)} have the x-delayer-id of another: {self.shared[:10]}"

    def __str__(self) -> str:
        return (
            f"sent {self.sent}, lost {len(self.missing)}, early {len(self.early)}, changed {len(self.changed)}, "
            f"more than once {len(self.repeats)} (at release {self.repeated_at_release}, "
            f"taken in twice {self.taken_in_twice} and {self.nameless} without a name, "
            f"published twice {len(self.published_twice & self.repeats.keys())}), standing {dict(self.standing)}"
        )


class Account:
    """Numbers are given from 0 on."""

    def __init__(self) -> None:
        self.early = Findings()
        self.changed = Findings()
        self.published_twice: set[int] = set()
        """Whose publish was in doubt, so that it was published again: their copies may be the ledger's own doing."""
        self.windows: list[Window] | None = None
        """When faults were, if whoever causes them says so: then nothing may come twice that met none of them."""
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

    def take(self, number: int, arrival: Arrival) -> None:
        """That message arrived, unchanged."""
        owed = self.owed(number)
        if (
            arrival.at_ms < max(arrival.due_ms, owed.due_ms)
            or arrival.due_ms < owed.due_ms
            or (owed.form.absolute and arrival.due_ms != owed.due_ms)
        ):
            self.early.add(f"message {number}: owed at {owed.due_ms}, header {arrival.due_ms}, at {arrival.at_ms}")
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

    def take_changed(self, number: int, at_ms: float, text: str) -> None:
        """That message arrived, and is not what was sent. It is not missing, at least."""
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
        """Rows of the store of which at least one copy arrived: as many as it has counted as released, if every copy
        of a row has that row's id."""
        ids = self._ids
        first = sum(ids[2 * number] == _STORED for number in range(self.sent))
        return first + sum(
            len({one.id for one in copies if len(one.id) < _HEX} - {self.arrivals_of(number)[0].id})
            for number, copies in self._copies.items()
        )

    def shared(self) -> list[int]:
        """Numbers of messages that came under an id which another had; those that came changed have none here."""
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
        """The account as it stands; ``standing`` is what is left in refused, strays, held and so on."""
        repeats = {number: self.arrivals_of(number) for number in sorted(self._copies)}
        return Verdict(
            self.sent,
            self.missing(),
            self.early,
            self.changed,
            repeats,
            frozenset(self.published_twice),
            [number for number in repeats if not self._excused(number)],
            standing,
            self.shared(),
        )

    def _excused(self, number: int) -> bool:
        """Whether a fault was between the sending of a message and the last of its copies."""
        if self.windows is None or number in self.published_twice:
            return True
        sent_ms, last_ms = self.owed(number).sent_ms, self._copies[number][-1].at_ms
        return any(window.begin_ms <= last_ms and window.end_ms >= sent_ms for window in self.windows)


class Arrivals(Mapping[int, Sequence[Arrival]]):
    """By number, of what arrived."""

    def __init__(self, account: Account) -> None:
        self._account = account

    def __len__(self) -> int:
        return self._account.back

    def __iter__(self) -> Iterator[int]:
        return (number for number in range(self._account.sent) if self._account.arrivals_of(number))

    def __getitem__(self, number: int) -> Sequence[Arrival]:
        if 0 <= number < self._account.sent and (found := self._account.arrivals_of(number)):
            return found
        raise KeyError(number)


def _packed(id: bytes) -> tuple[int, int]:
    """An id as two integers: that of a row is its number in decimal, any other is 32 hexadecimal digits."""
    return (int(id[:16], 16), int(id[16:], 16)) if len(id) == _HEX else (_STORED, int(id))


def _unpacked(high: int, low: int) -> bytes:
    return b"%d" % low if high == _STORED else b"%016x%016x" % (high, low)
