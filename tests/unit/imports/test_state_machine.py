"""Legacy imports: the state machine over fakes, interrupted everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from delayer.core.hold import Hold, HoldKind
from delayer.core.importing import Item, Phase
from delayer.imports import state_machine
from delayer.imports.state_machine import CountMismatch, ImportImpossible
from tests.unit.imports.import_fakes import (
    PARAMETERS,
    Died,
    FakeBook,
    FakeJudge,
    FakeSource,
    Shelf,
    Switch,
    run_once,
    silent,
)

COUNT = 11


def check_all_in(shelf: Shelf, book: FakeBook, items: Sequence[Item]) -> None:
    assert [item.parcel for item in book.parked] == [item.parcel for item in items]
    assert not shelf.there
    assert shelf.staged is None
    assert book.run is not None
    assert (book.run.phase, book.run.committed) == (Phase.DONE, len(items))


def in_order(shelf: Shelf) -> list[Item]:
    return [item for _, _, item in sorted((i.parcel.due_ms, n, i) for n, i in shelf.there.items())]


@pytest.mark.words
async def test_all_of_it_the_soonest_first() -> None:
    shelf, book = Shelf(COUNT), FakeBook()
    items = in_order(shelf)
    report = await run_once(shelf, book)
    check_all_in(shelf, book, items)
    assert (report.parked, report.held, report.resumed) == (8, 3, False)
    assert report.reasons == {"no such queue": 3}
    assert {item.hold for item in book.parked} == {None, Hold(HoldKind.RETURNED, "no such queue")}


async def test_killed_at_every_step_and_again_while_it_goes_on() -> None:
    """Whatever dies wherever: nothing is lost, nothing is parked twice, the order holds."""
    steps = 0
    while True:
        steps += 1
        shelf, book = Shelf(COUNT), FakeBook()
        items = in_order(shelf)
        try:
            await run_once(shelf, book, at=steps)
            break
        except Died:
            pass
        for again in (steps % 7 + 1, 2, None):
            if book.run is not None and book.run.phase is Phase.DONE:
                break
            try:
                await run_once(shelf, book, at=again)
            except Died:
                continue
        check_all_in(shelf, book, items)
    assert steps > 20


async def test_aborted_at_every_step() -> None:
    steps = 0
    while True:
        steps += 1
        shelf, book = Shelf(COUNT), FakeBook()
        items = in_order(shelf)
        try:
            await run_once(shelf, book, at=steps)
            break
        except Died:
            pass
        if await book.unfinished() is None:
            continue
        for at in (1, 2, 3, None):
            try:
                book.switch = Switch(at)
                await state_machine.abort(FakeSource(shelf, book.switch, PARAMETERS), book)
                break
            except Died:
                continue
        assert book.run is not None
        assert book.run.phase is Phase.ABORTED
        left = sorted(item.parcel for item in shelf.there.values())
        assert sorted([*left, *(item.parcel for item in book.parked)]) == sorted(item.parcel for item in items)
        assert shelf.staged is None


async def test_a_run_behind_an_abort_that_was_killed_says_to_abort() -> None:
    """Everything is where it was by then, and only the store does not know."""
    shelf, book = Shelf(COUNT), FakeBook()
    items = in_order(shelf)
    with pytest.raises(Died):
        await run_once(shelf, book, at=10)
    assert book.run is not None
    assert 0 < book.run.committed < COUNT
    source = FakeSource(shelf, Switch(), PARAMETERS)
    book.switch = Switch(1)
    with pytest.raises(Died):
        await state_machine.abort(source, book)
    for _ in range(2):
        with pytest.raises(ImportImpossible, match="Next: `abort`, with the same parameters"):
            await run_once(shelf, book)
    aborted, _ = await state_machine.abort(FakeSource(shelf, Switch(), PARAMETERS), book)
    assert aborted.phase is Phase.ABORTED
    left = sorted(item.parcel for item in shelf.there.values())
    assert sorted([*left, *(item.parcel for item in book.parked)]) == sorted(item.parcel for item in items)


async def test_other_parameters_do_not_resume() -> None:
    shelf, book = Shelf(COUNT), FakeBook()
    with pytest.raises(Died):
        await run_once(shelf, book, at=9)
    other = FakeSource(shelf, Switch(), PARAMETERS | {"cutoff_ms": 6})
    for doing in (state_machine.run(other, book, FakeJudge(), "me", silent), state_machine.abort(other, book)):
        with pytest.raises(ImportImpossible, match="cutoff_ms: begun with 5, now 6"):
            await doing
    other.name = "other"
    with pytest.raises(ImportImpossible, match="import 1 from fake is not finished"):
        await state_machine.run(other, book, FakeJudge(), "me", silent)


async def test_nothing_to_abort() -> None:
    with pytest.raises(ImportImpossible, match="no unfinished import"):
        await state_machine.abort(FakeSource(Shelf(1), Switch(), PARAMETERS), FakeBook())


async def test_counts_that_differ_stop_it() -> None:
    shelf, book = Shelf(COUNT), FakeBook()
    source = FakeSource(shelf, Switch(), PARAMETERS)
    source.loses = 1
    with pytest.raises(CountMismatch, match="3 messages of a batch are committed, but 2 could be removed"):
        await state_machine.run(source, book, FakeJudge(), "me", silent)
    shelf, book = Shelf(COUNT), FakeBook()
    with pytest.raises(Died):
        await run_once(shelf, book, at=6)
    assert shelf.staged is not None
    shelf.staged.popitem()
    with pytest.raises(CountMismatch, match="11 messages were staged, but 10"):
        await run_once(shelf, book)
