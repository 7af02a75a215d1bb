"""What can be read of a damaged table is read once, in its order; and each place that cannot is told about once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delayer.audit import salvage
from delayer.audit.connection import Unreadable
from delayer.audit.rules.damage import Damage
from delayer.audit.salvage import readable
from delayer.audit.splits import Piece

LOST = 8_000
"""Pages of a split that are gone."""


class Page(NamedTuple):
    """``gone``: nothing of it can be read. ``lost``: rows, by their position, of which a value elsewhere is gone."""

    rows: int
    gone: bool = False
    lost: tuple[int, ...] = ()


class Table:
    """A table as Postgres gives it: batches in the order of the pages, up to the first failure."""

    def __init__(self, pages: list[Page], batch: int = 3) -> None:
        self.pages = pages
        self._batch = batch
        self.statements = 0

    def read(self, condition: str, *, values: bool = True) -> Iterator[pa.RecordBatch]:
        self.statements += 1
        waiting: list[str] = []
        try:
            for place in self._places(condition, values=values):
                waiting.append(place)
                if len(waiting) == self._batch:
                    yield batch_of(waiting)
                    waiting = []
        except Unreadable:
            # The driver hands on what it has, or does not.
            if waiting and len(waiting) % 2:
                yield batch_of(waiting)
            raise
        if waiting:
            yield batch_of(waiting)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        if sql.startswith("SELECT pg_relation_size"):
            return [(len(self.pages),)]
        condition = sql.partition("WHERE ")[2]
        places = [one for batch in self.read(condition, values=False) for one in batch.column(0).to_pylist()]
        if "due_at" in sql:
            return [(1, 4711, 5) for _ in places]
        return [(int(place.split(",")[1][:-1]),) for place in places]

    def _places(self, condition: str, *, values: bool) -> Iterator[str]:
        tids = [tuple(map(int, found)) for found in re.findall(r"\((\d+),(\d+)\)", condition)]
        one = condition.startswith("ctid = ")
        low, high = tids[0][0], tids[0][0] + 1 if one else tids[1][0] if len(tids) > 1 else len(self.pages)
        for number, page in list(enumerate(self.pages))[low:high]:
            if page.gone:
                raise Unreadable(f"invalid page in block {number}")
            for row in range(1, page.rows + 1):
                if one and row != tids[0][1]:
                    continue
                if values and row in page.lost:
                    raise Unreadable("missing chunk number 0")
                yield f"({number},{row})"


def batch_of(places: list[str]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(places)], names=["ctid"])


def found(table: Table, piece: Piece, *, messages: bool = False) -> tuple[list[str], list[Damage]]:
    everything = list(readable(table, piece, table.read, messages=messages))  # type: ignore[arg-type]
    damage = [one for one in everything if isinstance(one, Damage)]
    rows = [one.column(0).to_pylist() for one in everything if not isinstance(one, Damage)]
    return [place for batch in rows for place in batch], damage


pages = st.builds(
    lambda rows, gone, lost: Page(rows, gone, tuple(one for one in lost if one <= rows)),
    st.integers(0, 7),
    st.sampled_from([False] * 9 + [True]),
    st.sets(st.integers(1, 40), max_size=4),
)


@settings(deadline=None)
@given(st.lists(pages, max_size=12), st.integers(1, 5), st.booleans())
def test_every_row_is_read_once_or_its_place_is_told_once(table: list[Page], batch: int, whole: bool) -> None:
    at = Table(table, batch)
    rows, damage = found(at, Piece("t", 0, None if whole else len(table)))
    sound = [
        f"({number},{row})"
        for number, page in enumerate(table)
        for row in range(1, page.rows + 1)
        if not page.gone and row not in page.lost
    ]
    broken = [f"page {number}" for number, page in enumerate(table) if page.gone]
    broken += [f"({number},{row})" for number, page in enumerate(table) if not page.gone for row in page.lost]
    assert rows == sound
    assert sorted(one.place for one in damage) == sorted(broken)


def test_a_sound_table_is_read_by_one_statement() -> None:
    table = Table([Page(5)] * 1000)
    rows, damage = found(table, Piece("t", 0, None))
    assert (len(rows), damage, table.statements) == (5000, [], 1)


def test_one_page_of_many_is_found_by_halves() -> None:
    table = Table([Page(5)] * 700 + [Page(5, gone=True)] + [Page(5)] * 323)
    rows, [damage] = found(table, Piece("t", 0, 1024))
    assert len(rows) == 5 * 1023
    assert damage == Damage("t", "page 700", "invalid page in block 700")
    assert table.statements < 30


def test_a_large_loss_is_told_in_a_few_statements_and_what_lies_around_it_is_read() -> None:
    """Most of the pages of a split are gone; a lost gigabyte is sixteen of these."""
    table = Table([Page(2)] * 40 + [Page(2, gone=True)] * LOST + [Page(2)] * 40)
    rows, damage = found(table, Piece("t", 0, len(table.pages)))
    assert table.statements < 3 * salvage.FAILURES
    lost = [page for one in damage for page in pages_in(one.place)]
    assert lost == sorted(set(lost)), "no place is told twice"
    assert set(range(40, 40 + LOST)) <= set(lost)
    assert [one for one in damage if salvage.WHOLE in one.place]
    there = [int(re.split(r"[(,]", row)[1]) for row in rows]
    assert len(there) == len(set(rows)), "nothing is read twice"
    assert not set(there) & set(lost) or max(there) < 40 + LOST
    assert set(range(40)) <= set(there)


def pages_in(place: str) -> range:
    numbers = [int(one) for one in re.findall(r"\d+", place.removesuffix(salvage.WHOLE))]
    return range(numbers[0], numbers[-1] + 1)


@settings(deadline=None)
@given(st.lists(pages, max_size=12), st.integers(1, 5), st.integers(0, 6))
def test_where_it_gives_up_nothing_is_read_twice_or_lost_silently(table: list[Page], batch: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(salvage, "FAILURES", most)
        rows, damage = found(Table(table, batch), Piece("t", 0, len(table)))
    assert rows == sorted(set(rows), key=lambda row: tuple(map(int, row[1:-1].split(","))))
    told = [one.place for one in damage]
    whole = {page for place in told if place.startswith("page") for page in pages_in(place)}
    for number, page in enumerate(table):
        for row in range(1, page.rows + 1):
            place = f"({number},{row})"
            assert place in rows or place in told or number in whole
            assert not (place in rows and (page.gone or row in page.lost))


def test_a_message_whose_lane_can_be_read_is_told_with_it() -> None:
    _, [damage] = found(Table([Page(3, lost=(2,))]), Piece("t", 0, None), messages=True)
    assert damage == Damage("t", "(0,2)", "missing chunk number 0", 1, 4711, 5)
