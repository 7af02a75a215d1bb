"""The verdict on an account: broken promises, and messages that came more than once. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tests.support.letters import Form, message_id_of

FIRST_FEW: Final = 20
"""The number of findings reported in full; the rest are only counted."""


class Arrival(NamedTuple):
    """One message at the destination. ``due_ms`` and ``id`` are from its x-delayer headers, ``redelivered`` is from the
    destination's queue. ``resorted``: its own headers came sorted by name, and were published in another order."""

    at_ms: float
    id: bytes
    due_ms: int
    redelivered: bool
    resorted: bool = False


class Owed(NamedTuple):
    """A message owed: not before ``due_ms``, and with exactly that due instant if its delay was said as an instant."""

    form: Form
    due_ms: int
    delay_ms: int

    @property
    def sent_ms(self) -> int:
        return self.due_ms - self.delay_ms


class Window(NamedTuple):
    """The time of a fault: from its beginning until everything works again."""

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
    """Broken promises of one kind: how many, and the first few in full."""

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
    """The account. ``repeats``: by number, every arrival of the messages that came more than once. ``unexcused``: the
    repeated messages that met no fault, where the times of the faults are known."""

    sent: int
    missing: Sequence[int]
    early: Findings
    changed: Findings
    repeats: Mapping[int, Sequence[Arrival]]
    published_twice: frozenset[int] = frozenset()
    unexcused: Sequence[int] = ()
    standing: Mapping[str, int] = field(default_factory=dict)
    shared: Sequence[int] = ()
    """Messages with the ``x-delayer-id`` of another message, which a consumer that drops copies by id would lose. One
    store must have none; two stores issue the same row numbers."""
    unaccounted: Findings = field(default_factory=Findings)
    """Messages with more ids, or more copies, than reads; known where a proxy listens (readings.py)."""
    resorted: Sequence[int] = ()
    """Messages whose headers arrived sorted, without a listening proxy: the broker sorts redelivered messages."""

    @property
    def repeated_at_release(self) -> int:
        """Messages whose copies all have one ``x-delayer-id``: they were in the store, or in the cascade, once."""
        return sum(len({one.id for one in arrivals}) == 1 for arrivals in self.repeats.values())

    @property
    def taken_in_twice(self) -> int:
        """Messages with a ``message_id`` of their publisher that were read twice from the intake queue: their copies
        share the ``message_id`` and have an ``x-delayer-id`` each."""
        return sum(bool(message_id_of(number)) for number in self._read_twice())

    @property
    def nameless(self) -> int:
        """The same for messages without a ``message_id``, whose copies no name marks. The copies have the same bytes,
        or they count as changed. They have the same ``x-delayer-due`` if the publisher set an absolute time, or they
        count as early. A relative delay is measured from each read, so a later copy has a later due instant."""
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

    def assert_kept(self, *, repeats: bool = False, redelivered: bool | None = None) -> None:
        """Assert that no message is lost, early, changed or left standing, and none came twice without a fault. Headers
        may be sorted only if messages were ``redelivered`` on their way, by default where ``repeats`` are allowed."""
        redelivered = repeats if redelivered is None else redelivered
        assert not self.missing, f"{len(self.missing)} of {self.sent} lost, the first: {self.missing[:10]}; {self}"
        assert not self.early, f"{len(self.early)} early, the first: {self.early[0]}"
        assert not self.changed, f"{len(self.changed)} changed, the first: {self.changed[0]}"
        assert redelivered or not self.resorted, f"{len(self.resorted)} changed: sorted headers: {self.resorted[:10]}"
        assert not any(self.standing.values()), f"left standing: {self.standing}"
        assert repeats or not self.repeats, f"{len(self.repeats)} came more than once: {list(self.repeats.items())[:3]}"
        assert not self.unexcused, f"{len(self.unexcused)} came twice without a fault: {self.unexcused[:10]}"
        assert not self.two_faced, f"{len(self.two_faced)} with one id and two due instants: {self.two_faced[:10]}"
        assert not self.unaccounted, f"{len(self.unaccounted)} more than they were read: {self.unaccounted[0]}"

    def assert_apart(self) -> None:
        """Assert that every message has its own id; only for tests with one store."""
        assert not self.shared, f"{len(self.shared)} have the x-delayer-id of another: {self.shared[:10]}"

    def __str__(self) -> str:
        return (
            f"sent {self.sent}, lost {len(self.missing)}, early {len(self.early)}, changed {len(self.changed)}, "
            f"more than once {len(self.repeats)} (at release {self.repeated_at_release}, "
            f"taken in twice {self.taken_in_twice} and {self.nameless} without a name, "
            f"published twice {len(self.published_twice & self.repeats.keys())}), standing {dict(self.standing)}"
        )
