"""What the rules work on: messages, segments, lanes; tallies under keys; the merged tallies as evidence. Pure.

A rule that looks at rows names keys for each of them. Tallies under equal keys are combined, in any order and grouping
(a commutative monoid), so the same functions serve a list of rows and a cluster.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import groupby
from operator import itemgetter
from typing import Final, NamedTuple

from delayer.store.admin.stats import RESTORED_MS

WAITING, HELD, PACKED = "waiting", "held", "segment"
"""Where a message stands: a row of ``message``, a row of ``held``, inside a segment."""
PACED = "paced"
"""Overdue rows of a route with ``max_rate`` are counted apart: they wait because somebody wants them to."""

DAY_MS: Final = 86_400_000
GRACE_MS: Final = 60_000
"""How long past its due time a message is before it counts as overdue: a release at work is not worth a word."""
STUCK_MS: Final = 3_600_000
"""Overdue for longer than this is a violation even in a lane with an owner: it should have been released long ago."""
EXAMPLES: Final = 5
"""Ids that a finding names."""


class Message(NamedTuple):
    """``home`` is the partition's name, and empty in held and in segments. ``retry_ms``: when a held one is to be tried
    again. ``crc`` is what the checksum of its bytes is now."""

    where: str
    home: str | None
    id: int
    lane: int
    due_ms: int
    parked_ms: int
    checksum: int
    format: int
    route: bytes
    to_exchange: bytes
    to_key: bytes
    properties: bytes
    key: bytes | None
    retry_ms: int | None
    body_bytes: int
    crc: int
    body_digest: bytes


class Segment(NamedTuple):
    """One segment. ``unpacked`` messages came out of it now, ``live`` of them without a tombstone, and what is
    ``found_…`` of them should be what the segment says of itself; ``fault`` says why it did not read back, or is None.
    ``tombstones`` are its rows of segment_cancelled. A segment without ``lane`` is not there: only its tombstones."""

    id: int
    lane: int | None
    first_due_ms: int
    last_due_ms: int
    first_id: int
    last_id: int
    messages: int
    cancelled: int
    raw_bytes: int
    packed_bytes: int
    unpacked: int | None
    live: int | None
    found_first_due_ms: int | None
    found_last_due_ms: int | None
    found_first_id: int | None
    found_last_id: int | None
    found_raw_bytes: int | None
    fault: str | None
    broken_ms: int | None
    broken: str | None
    tombstones: int


class Lane(NamedTuple):
    """``alive`` is None where the lanes' locks cannot be seen."""

    number: int
    owner: str
    alive: bool | None


@dataclass(frozen=True)
class Context:
    """What judging one message needs beside it. ``partitions``: the interval [first, after) of each partition of days,
    in epoch ms; the default partition is not in it. ``whole``: every row is read, not a sample. ``restored_ms``: how
    long before its first message is due a segment should have been restored. ``paced``: what routes may release, in
    messages a second, where that is limited."""

    now_ms: int
    partitions: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    whole: bool = True
    restored_ms: int = RESTORED_MS
    paced: Mapping[bytes, int] = field(default_factory=dict)

    @cached_property
    def _intervals(self) -> list[tuple[int, int]]:
        return sorted(self.partitions.values())

    def has_partition(self, due_ms: int) -> bool:
        """Is there a partition of days for this instant?"""
        position = bisect_right(self._intervals, due_ms, key=itemgetter(0))
        return position > 0 and due_ms < self._intervals[position - 1][1]


class Key(NamedTuple):
    """``kind`` says what the other three are; see :mod:`delayer.audit.rules.counting`."""

    kind: str
    number: int = 0
    first: bytes = b""
    second: bytes = b""


class Tally(NamedTuple):
    """``messages`` of ``size`` bytes together, due from ``first_due_ms`` to ``last_due_ms``. ``examples``: the lowest
    ids, sorted, at most EXAMPLES, where the kind asks for them."""

    messages: int
    size: int
    first_due_ms: int
    last_due_ms: int
    examples: tuple[int, ...] = ()


Partial = tuple[Key, Tally]


def combined(one: Tally, other: Tally) -> Tally:
    examples = one.examples
    if other.examples and other.examples != examples:
        examples = tuple(sorted({*examples, *other.examples})[:EXAMPLES])
    return Tally(
        one.messages + other.messages,
        one.size + other.size,
        min(one.first_due_ms, other.first_due_ms),
        max(one.last_due_ms, other.last_due_ms),
        examples,
    )


def folded(partials: Iterable[Partial]) -> Iterator[Partial]:
    """One partial for each key of ``partials``, which must be sorted by key. Holds one key at a time."""
    for key, group in groupby(partials, itemgetter(0)):
        yield key, reduce(combined, map(itemgetter(1), group))


class Tallies:
    """A dictionary of tallies that is emptied before it grows beyond ``bound`` keys.

    Keys are plain tuples and tallies lists while they are in here: half of the audit's Python time is spent in
    :meth:`add`, and named tuples would double it.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._found: dict[tuple[str, int, bytes, bytes], list[int]] = {}
        self._examples: dict[tuple[str, int, bytes, bytes], set[int]] = {}

    @property
    def full(self) -> bool:
        return len(self._found) >= self._bound

    def add(self, key: tuple[str, int, bytes, bytes], size: int, due_ms: int) -> None:
        """Count one message."""
        tally = self._found.get(key)
        if tally is None:
            self._found[key] = [1, size, due_ms, due_ms]
            return
        tally[0] += 1
        tally[1] += size
        if due_ms < tally[2]:
            tally[2] = due_ms
        elif due_ms > tally[3]:
            tally[3] = due_ms

    def name(self, key: tuple[str, int, bytes, bytes], example: int) -> None:
        """Make ``example`` one of the key's, unless there are lower ones enough."""
        examples = self._examples.setdefault(key, set())
        examples.add(example)
        if len(examples) > EXAMPLES:
            examples.remove(max(examples))

    def drain(self) -> Iterator[Partial]:
        found, examples = self._found, self._examples
        self._found, self._examples = {}, {}
        for key, tally in found.items():
            messages, size, first_due_ms, last_due_ms = tally
            named = tuple(sorted(examples.get(key, ())))
            yield Key(*key), Tally(messages, size, first_due_ms, last_due_ms, named)


class Evidence:
    """The merged tallies (rules.counting.merged) by kind, in their order there: by key, or what is most first."""

    def __init__(self, partials: Iterable[Partial]) -> None:
        self._kinds: dict[str, dict[Key, Tally]] = {}
        for key, tally in partials:
            self._kinds.setdefault(key.kind, {})[key] = tally

    def of(self, kind: str) -> list[Partial]:
        return list(self._kinds.get(kind, {}).items())

    def get(self, key: Key) -> Tally | None:
        return self._kinds.get(key.kind, {}).get(key)

    def messages(self, key: Key) -> int:
        """How many messages were counted under ``key``."""
        tally = self.get(key)
        return 0 if tally is None else tally.messages

    def total(self, kind: str) -> Tally | None:
        """All tallies of a kind together, those that were not handed on too; ``size`` is the number of their keys."""
        return self.get(Key("total", 0, kind.encode()))

    def more(self, kind: str) -> int:
        """How many keys of a kind were not handed on."""
        total = self.total(kind)
        return 0 if total is None else total.size - len(self._kinds.get(kind, {}))

    def first_due(self, lane: int) -> int | None:
        """When the first waiting message of a lane is due."""
        tally = self.get(Key("lane", lane, WAITING.encode()))
        return None if tally is None else tally.first_due_ms

    def overdue_routes(self, lane: int, where: str) -> list[tuple[bytes, int]]:
        """Routes and their overdue messages, the most first; ``where`` is WAITING or PACED."""
        found = ((key, tally) for key, tally in self.of("overdue route") if key.number == lane)
        return [(key.first, tally.messages) for key, tally in found if key.second == where.encode()]
