"""From all tallies to those that fit on a page, however many messages, seconds and destinations there are. Pure.

Where a kind of key has as many keys as the store has messages, seconds or destinations, only the ones that stand out
most are handed on, and one tally under ``total`` for all of them together: its ``size`` is the number of keys.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from delayer.audit.rules import damage, repeats, standouts
from delayer.audit.rules.message import DAY_MS
from delayer.audit.rules.tally import Key, Partial, Tally, combined, folded

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
    damage.PLACE: (100, _most),
    repeats.MESSAGE: (20, _most),
    repeats.ID: (20, _most),
    **dict.fromkeys(standouts.KINDS, (standouts.KEPT, standouts.rank_of)),
}


def spread(key: Key) -> int:
    """Tallies of one kind with equal spread, ``first`` and ``second`` must be summarized together; others need not."""
    if key.kind == "second":
        return key.number // SPREAD_SECONDS
    return key.number if key.kind == repeats.ID else 0


def summarized(partials: Iterable[Partial], now_ms: int) -> Iterator[Partial]:
    """What to hand on of ``partials``, which must be sorted by key. Holds a bounded number of them."""
    tops: dict[str, _Top] = {}
    rising = _Rising(now_ms, tops)
    for key, tally in folded(partials):
        kind = key.kind
        if kind in (repeats.MESSAGE, repeats.ID) and not repeats.repeated(key, tally):
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
