"""Under which keys each message and each segment is counted: all that the rules want of the rows, in one pass. Pure.

kinds of keys       number        first             second
  id                the id
  lane              lane          where it stands
  keyed
  second            of its due
  route                           the route
  target                          exchange          routing key
  fault             lane          where it stands   what is wrong (integrity)
  repeat                          fingerprint
  overdue           lane          where it stands   how late
  overdue route     lane          the route         waiting, or paced
  segments          lane
  segment fault     lane          what is wrong
  damage                          table             where, and why (damage)
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from delayer.audit.rules import checks
from delayer.audit.rules.model import (
    DAY_MS,
    HELD,
    PACED,
    PACKED,
    WAITING,
    Context,
    Key,
    Message,
    Partial,
    Segment,
    Tallies,
    Tally,
    combined,
    folded,
)


# Keys that one portion of rows is counted under before they are handed on: about 20 MB.
def counted(messages: Iterable[Message], context: Context, bound: int = 50_000) -> Iterator[Partial]:
    """The tallies of ``messages``. Some keys come more than once; holds ``bound`` of them, and a few more, at most."""
    tallies = Tallies(bound)
    for message in messages:
        due_ms, size = message.due_ms, message.body_bytes + len(message.properties)
        properties = checks.parsed(message)
        for fault in checks.message_faults(message, properties, context):
            key = ("fault", message.lane, _WHERE[message.where], fault.encode())
            tallies.add(key, size, due_ms)
            tallies.name(key, message.id)
        tallies.add(("lane", message.lane, _WHERE[message.where], b""), size, due_ms)
        if message.key is not None:
            tallies.add(("keyed", 0, b"", b""), size, due_ms)
        if context.whole:
            yield Key(checks.ID, message.id), Tally(1, size, due_ms, due_ms)
            fingerprint = checks.fingerprint(message, properties)
            if fingerprint is not None:
                yield Key(checks.REPEAT, 0, fingerprint), Tally(1, size, due_ms, due_ms, (message.id,))
        if message.where != HELD:
            tallies.add(("second", due_ms // 1000, b"", b""), size, due_ms)
            tallies.add(("route", 0, message.route, b""), size, due_ms)
            tallies.add(("target", 0, message.to_exchange, message.to_key), size, due_ms)
            if due_ms < context.now_ms:
                _count_late(message, due_ms, size, tallies, context)
        elif message.retry_ms is not None:
            _count_late(message, message.retry_ms, size, tallies, context)
        if tallies.full:
            yield from tallies.drain()
    yield from tallies.drain()


_WHERE: Final = {where: where.encode() for where in (WAITING, HELD, PACKED, PACED)}


def _count_late(message: Message, expected_ms: int, size: int, tallies: Tallies, context: Context) -> None:
    age = checks.age(expected_ms, context.now_ms)
    if age is not None:
        where = PACED if message.where == WAITING and message.route in context.paced else message.where
        tallies.add(("overdue", message.lane, _WHERE[where], age.encode()), size, message.due_ms)
        if message.where == WAITING:
            tallies.add(("overdue route", message.lane, message.route, _WHERE[where]), size, message.due_ms)


def counted_segments(found: Iterable[Segment], context: Context) -> Iterator[Partial]:
    """The tallies of segments."""
    for segment in found:
        live = segment.messages - segment.cancelled
        tally = Tally(1, segment.packed_bytes, segment.first_due_ms, segment.last_due_ms)
        if segment.lane is not None:
            yield Key("segments", segment.lane), tally
            yield Key("packed", segment.lane), tally._replace(messages=live)
        affected = max(live, 0) if segment.lane is not None else segment.tombstones
        for fault in checks.segment_faults(segment, context):
            key = Key("segment fault", -1 if segment.lane is None else segment.lane, fault.encode())
            yield key, tally._replace(messages=affected, examples=(segment.id,))


HOUR_MS, MINUTE_MS, SECOND_MS = 3_600_000, 60_000, 1000
PEAKS: Final = 10
SPREAD_SECONDS: Final = DAY_MS // SECOND_MS
"""The seconds of one day must be summarized together: its minutes and hours are made of them."""


class Width(NamedTuple):
    """Bars of ``ms``, shown from ``before_ms`` before now to ``after_ms`` after. What lies beyond is counted in the bar
    at the edge where ``gathers``, and not shown otherwise."""

    ms: int
    before_ms: int
    after_ms: int
    gathers: bool = False


WIDTHS: Final[Mapping[str, Width]] = {
    "minute": Width(MINUTE_MS, HOUR_MS, DAY_MS),
    "hour": Width(HOUR_MS, DAY_MS, 31 * DAY_MS),
    "day": Width(DAY_MS, 400 * DAY_MS, 4000 * DAY_MS, gathers=True),
}

_Rank = Callable[[Key, Tally], tuple[int, ...]]


def _most(key: Key, tally: Tally) -> tuple[int, ...]:
    return (-tally.messages,)


_TOP: Final[Mapping[str, tuple[int, _Rank]]] = {
    "second": (PEAKS, _most),
    "minute": (PEAKS, _most),
    "hour": (PEAKS, _most),
    "route": (50, _most),
    "target": (200, _most),
    "overdue route": (500, _most),
    checks.DAMAGED_PLACE: (100, _most),
    checks.REPEAT: (20, _most),
    checks.ID: (20, _most),
}


def spread(key: Key) -> int:
    """Tallies of one kind with equal spread, ``first`` and ``second`` must be summarized together; others need not."""
    if key.kind == "second":
        return key.number // SPREAD_SECONDS
    return key.number if key.kind == checks.ID else 0


def summarized(partials: Iterable[Partial], now_ms: int) -> Iterator[Partial]:
    """What to hand on of ``partials``, which must be sorted by key. Holds a bounded number of them."""
    tops: dict[str, _Top] = {}
    rising = _Rising(now_ms, tops)
    for key, tally in folded(partials):
        kind = key.kind
        if kind in (checks.REPEAT, checks.ID) and not checks.repeated(key, tally):
            continue
        if kind == "second":
            yield from rising.add(key.number * SECOND_MS, tally)
        if kind in _TOP:
            _top(tops, kind).add(key, tally)
        else:
            yield key, tally
    yield from rising.drain()
    for kind in sorted(tops):
        yield from tops[kind].drain()


def merged(partials: Iterable[Partial]) -> list[Partial]:
    """What several calls of :func:`summarized` handed on, made one and cut again; sorted by kind and rank."""
    tops: dict[str, _Top] = {}
    plain: dict[Key, Tally] = {}
    for key, tally in partials:
        if key.kind in _TOP:
            _top(tops, key.kind).add(key, tally)
        else:
            plain[key] = combined(plain[key], tally) if key in plain else tally
    kept = [partial for kind in sorted(tops) for partial in tops[kind].kept()]
    return [*sorted(plain.items()), *kept]


def _top(tops: dict[str, _Top], kind: str) -> _Top:
    if kind not in tops:
        tops[kind] = _Top(kind)
    return tops[kind]


class _Reversed(NamedTuple):
    """Sorts the other way round, for a heap whose least entry is the first to go."""

    rank: tuple[int, ...]
    key: Key

    def __lt__(self, other: object) -> bool:
        assert isinstance(other, _Reversed)
        return (self.rank, self.key) > (other.rank, other.key)


class _Top:
    """The tallies of one kind that stand out most, and the total of all; of equals the first by key."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._size, self._rank = _TOP[kind]
        self._heap: list[tuple[_Reversed, Tally]] = []
        self._total: Tally | None = None

    def add(self, key: Key, tally: Tally) -> None:
        entry = (_Reversed(self._rank(key, tally), key), tally)
        if len(self._heap) < self._size:
            heapq.heappush(self._heap, entry)
        elif self._heap[0][0] < entry[0]:
            heapq.heapreplace(self._heap, entry)
        one = tally._replace(size=1, examples=())
        self._total = one if self._total is None else combined(self._total, one)

    def kept(self) -> list[Partial]:
        return [(entry.key, tally) for entry, tally in sorted(self._heap, key=lambda each: each[0], reverse=True)]

    def drain(self) -> list[Partial]:
        assert self._total is not None
        return [*self.kept(), (Key("total", 0, self._kind.encode()), self._total)]


class _Rising:
    """Seconds, in their order, into minutes, hours and days."""

    def __init__(self, now_ms: int, tops: dict[str, _Top]) -> None:
        self._now_ms = now_ms
        self._tops = tops
        self._open: dict[str, tuple[int, Tally]] = {}

    def add(self, at_ms: int, tally: Tally) -> Iterator[Partial]:
        for name, width in WIDTHS.items():
            start = at_ms // width.ms
            before = self._open.get(name)
            if before is None:
                self._open[name] = (start, tally)
            elif before[0] == start:
                self._open[name] = (start, combined(before[1], tally))
            else:
                self._open[name] = (start, tally)
                yield from self._close(name, *before)

    def drain(self) -> Iterator[Partial]:
        for name, before in self._open.items():
            yield from self._close(name, *before)
        self._open.clear()

    def _close(self, name: str, start: int, tally: Tally) -> Iterator[Partial]:
        width = WIDTHS[name]
        if name in _TOP:
            _top(self._tops, name).add(Key(name, start), tally)
        first = (self._now_ms - width.before_ms) // width.ms
        last = (self._now_ms + width.after_ms) // width.ms
        if width.gathers:
            yield Key(f"{name} bar", min(max(start, first), last)), tally
        elif first <= start <= last:
            yield Key(f"{name} bar", start), tally
