"""The ids of a growing table that may still appear, as ranges between those already read. Pure.

Transactions draw ids from a sequence, and commit in another order. So a reader that continues after the last id which
it has read would miss the rows of a transaction that drew smaller ids, and commits later. A reader that always begins
at the first id would read the dead rows of all messages before, until a vacuum can remove them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

END: Final = (1 << 63) - 1


class OpenRanges:
    """Ranges of ids, each between two ids that it does not contain.

    >>> ranges = OpenRanges()
    >>> ranges.take([3, 4, 7])
    >>> ranges.bounds == ([0, 4, 7], [3, 7, END])
    True
    >>> ranges.close(4)
    >>> ranges.bounds == ([4, 7], [7, END])
    True
    """

    def __init__(self) -> None:
        self._ranges = [(0, END)]

    @property
    def bounds(self) -> tuple[list[int], list[int]]:
        """The ids before and after each range."""
        return [low for low, _ in self._ranges], [high for _, high in self._ranges]

    def __len__(self) -> int:
        return len(self._ranges)

    @property
    def last(self) -> int:
        """The largest id taken so far; 0 without any."""
        return self._ranges[-1][0]

    @property
    def has_gaps(self) -> bool:
        """Whether ids before the last one are open."""
        return len(self._ranges) > 1

    def take(self, ids: Iterable[int]) -> None:
        """Cut these ids, which are open and in ascending order, out of the ranges."""
        left: list[tuple[int, int]] = []
        ranges = iter(self._ranges)
        low, high = next(ranges)
        for id_ in ids:
            while id_ >= high:
                left.append((low, high))
                low, high = next(ranges)
            if low + 1 < id_:
                left.append((low, id_))
            low = id_
        self._ranges = [*left, *([(low, high)] if low + 1 < high else []), *ranges]

    def merge(self, most: int, kept: Iterable[int]) -> None:
        """Merge the closest ranges until ``most`` are left, if possible. Ids between merged ranges are open again, so
        their rows must be gone; the ids ``kept`` stay closed."""
        rows = sorted(kept)
        places = [
            at
            for at in range(1, len(self._ranges) - 1)
            if bisect_left(rows, self._ranges[at - 1][1]) == bisect_left(rows, self._ranges[at][0] + 1)
        ]
        places.sort(key=lambda at: self._ranges[at][0] - self._ranges[at - 1][1])
        joined = set(places[: max(0, len(self._ranges) - most)])
        merged: list[tuple[int, int]] = []
        for at, (low, high) in enumerate(self._ranges):
            merged.append((merged.pop()[0] if at in joined else low, high))
        self._ranges = merged

    def close(self, last: int) -> None:
        """Close all ids up to ``last``, because none of them can appear any more."""
        self._ranges = [(max(low, last), high) for low, high in self._ranges if high > last + 1]
