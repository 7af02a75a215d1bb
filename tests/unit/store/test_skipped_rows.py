"""Rows that the database rejects: how long they are skipped, and how many a lane remembers."""

from __future__ import annotations

from dataclasses import dataclass

from delayer.store.clock import StoreClock
from delayer.store.lanes.settling import MOST, MOST_COUNTED, SkippedRows


@dataclass
class Now:
    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_each_pause_of_a_row_is_longer() -> None:
    now = Now()
    skipped = SkippedRows(1, StoreClock(now))
    pauses = []
    for _ in range(3):
        began = now.seconds
        skipped.add(7, 1_000, "no")
        while not skipped.end_pauses():
            now.seconds += 1.0
        pauses.append(now.seconds - began)
    assert pauses == sorted(set(pauses))


def test_no_more_rows_are_skipped_than_a_claim_can_leave_out() -> None:
    skipped = SkippedRows(1, StoreClock(Now()))
    for id_ in range(MOST + 1):
        skipped.add(id_, 1_000, "no")
    assert skipped.full
    assert skipped.ids == [*range(MOST)]


def test_the_counts_of_rejected_rows_do_not_grow_for_ever() -> None:
    now = Now()
    skipped = SkippedRows(1, StoreClock(now))
    for id_ in range(2 * MOST_COUNTED):
        skipped.add(id_, 1_000, "no")
        if skipped.full:
            now.seconds += 20.0
            skipped.end_pauses()
    assert len(skipped._times) == MOST_COUNTED
