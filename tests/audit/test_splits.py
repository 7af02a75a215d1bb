"""The division of a table among the executors."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from delayer.audit.source import CHUNK_BYTES, HeapTable, PageRange, plan_splits

PAGE = 8192


def relation(name: str, pages: int, *, page_size: int = PAGE) -> HeapTable:
    return HeapTable(name, pages, pages * page_size)


relations = st.lists(
    st.builds(relation, st.uuids().map(str), st.integers(0, 5000), page_size=st.sampled_from([PAGE, 50 * PAGE])),
    max_size=8,
)


@given(relations, st.integers(PAGE, 4 << 20))
def test_every_page_is_read_once(given: list[HeapTable], split_bytes: int) -> None:
    pieces = [piece for split in plan_splits(given, split_bytes=split_bytes) for piece in split]
    for each in given:
        own = [piece for piece in pieces if piece.heap == each.name]
        assert [piece.first for piece in own] == [0, *(piece.after for piece in own[:-1])][: len(own)]
        # The last split is open, for a table that grows; a table without pages is not read.
        assert [piece.after for piece in own[-1:]] == [None] * (each.pages > 0)


@given(relations, st.integers(64 << 10, 4 << 20))
def test_no_split_is_much_larger_than_asked(given: list[HeapTable], split_bytes: int) -> None:
    sizes = {each.name: each for each in given}

    def size(piece: PageRange) -> float:
        of = sizes[piece.heap]
        return ((piece.after or of.pages) - piece.first) * of.page_size

    for split in plan_splits(given, split_bytes=split_bytes):
        one_page = max(sizes[piece.heap].page_size for piece in split)
        assert sum(map(size, split)) <= max(split_bytes, one_page)


def test_small_tables_share_a_split() -> None:
    days = [relation(f"day{n}", 3) for n in range(100)]
    [split] = plan_splits(days)
    assert [piece.heap for piece in split] == [day.name for day in days]


def test_a_sample_is_about_its_share_in_many_places_and_the_same_again() -> None:
    pages = 400_000
    sample = plan_splits([relation("message", pages)], sample=0.1)
    taken = [piece for split in sample for piece in split]
    share = sum(piece.after - piece.first for piece in taken if piece.after is not None) / pages
    assert 0.07 < share < 0.13
    assert len(taken) > 100
    assert all(piece.after is not None and piece.after <= pages for piece in taken)
    assert sample == plan_splits([relation("message", pages)], sample=0.1)


def test_a_sample_of_wide_pages_takes_single_pages() -> None:
    taken = [
        piece
        for split in plan_splits([relation("segment", 200, page_size=50 * CHUNK_BYTES)], sample=0.5)
        for piece in split
    ]
    assert taken
    assert {piece.after - piece.first for piece in taken if piece.after is not None} == {1}
