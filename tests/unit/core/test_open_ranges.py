"""A reader of a growing table neither misses a row nor reads one twice, in whatever order transactions commit."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from delayer.core.open_ranges import END, OpenRanges


@dataclass
class Table:
    """``drawn``: by transaction, the ids of open transactions, whose number is the key."""

    visible: list[int] = field(default_factory=list)
    drawn: dict[int, list[int]] = field(default_factory=dict)
    next_id: int = 1
    next_transaction: int = 1

    def begin(self, ids: int) -> None:
        self.drawn[self.next_transaction] = list(range(self.next_id, self.next_id + ids))
        self.next_id += ids
        self.next_transaction += 1

    def end(self, number: int, *, commit: bool) -> None:
        if self.drawn:
            ids = self.drawn.pop(sorted(self.drawn)[number % len(self.drawn)])
            self.visible += ids if commit else []

    def read(self, ranges: OpenRanges, limit: int, gone: Collection[int]) -> list[int]:
        """As read_inbox.sql. All other rows stay, as if long settled rows were still there."""
        open_ = list(zip(*ranges.bounds, strict=True))
        there = [id_ for id_ in self.visible if id_ not in gone]
        return sorted(id_ for id_ in there if any(low < id_ < high for low, high in open_))[:limit]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(1, 4)),
        st.tuples(st.sampled_from(["commit", "roll back"]), st.integers(0, 9)),
        st.tuples(st.just("read"), st.integers(1, 5)),
        st.tuples(st.just("settle and merge"), st.integers(0, 3)),
    ),
    max_size=60,
)


@given(STEPS)
def test_each_row_is_read_once_and_ranges_close(steps: list[tuple[str, int]]) -> None:
    """The reader marks the last id and the next number, and closes when no transaction before that number is open."""
    table, ranges, seen, gone = Table(), OpenRanges(), list[int](), set[int]()
    mark: tuple[int, int] | None = None
    for step, number in [*steps, ("read", 1_000), ("read", 1_000), ("end", 0)]:
        if step == "begin":
            table.begin(number)
        elif step == "read":
            oldest = min(table.drawn, default=table.next_transaction)
            mark = mark or (ranges.last, table.next_transaction)
            closed, mark = (mark[0], None) if oldest >= mark[1] else (None, mark)
            ids = table.read(ranges, number, gone)
            ranges.take(ids)
            if closed is not None and (len(ids) < number or ids[-1] > closed):
                ranges.close(closed)
            seen += ids
        elif step == "settle and merge":
            gone.update(sorted(set(seen) - gone)[: 2 * number])
            before = len(ranges)
            ranges.merge(2, set(seen) - gone)
            assert len(ranges) <= before
        elif step != "end":
            table.end(number, commit=step == "commit")
    assert sorted(seen) == sorted(table.visible)
    if not table.drawn:
        lows, highs = ranges.bounds
        assert lows[-1] == max(seen, default=0)
        assert highs[-1] == END


def test_closing_keeps_what_follows() -> None:
    ranges = OpenRanges()
    ranges.take([5, 9])
    ranges.close(7)
    assert ranges.bounds == ([7, 9], [9, END])
    ranges.take([8])
    assert not ranges.has_gaps
    assert ranges.last == 9


def test_the_closest_ranges_are_merged_but_not_across_rows_that_are_there() -> None:
    ranges = OpenRanges()
    ranges.take([2, 5, 6, 7, 8, 12, 14, 20])
    assert list(zip(*ranges.bounds, strict=True)) == [(0, 2), (2, 5), (8, 12), (12, 14), (14, 20), (20, END)]
    ranges.merge(5, [2])
    assert list(zip(*ranges.bounds, strict=True)) == [(0, 2), (2, 5), (8, 14), (14, 20), (20, END)]
    ranges.merge(1, [2])
    assert list(zip(*ranges.bounds, strict=True)) == [(0, 2), (2, 20), (20, END)], "the last one says what was read"
    assert ranges.last == 20
    ranges.merge(1, [])
    assert list(zip(*ranges.bounds, strict=True)) == [(0, 20), (20, END)]
