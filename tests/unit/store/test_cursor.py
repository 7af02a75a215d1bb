"""The release cursor: the place where claims begin, and the instant of the next one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from delayer.store.clock import StoreClock
from delayer.store.lanes.cursor import LEAD_MS, NEVER_MS, ReleaseCursor
from delayer.store.lanes.notify import WAITING

NOW_MS = 1_000_000
HORIZON_MS = NOW_MS + 61_000
SOON_MS = NOW_MS + 5_000
HELD = "held"


@pytest.fixture
def cursor() -> ReleaseCursor:
    """After an empty claim: the lane has no row before the horizon."""
    made = ReleaseCursor(StoreClock())
    made.begin(NOW_MS, None)
    made.prepare_claim()
    made.note_claim((NOW_MS, 0), next_ms=HORIZON_MS, more=False)
    made.woken.clear()
    return made


@pytest.mark.parametrize(
    ("happens", "wake_ms"),
    [
        (lambda it: None, HORIZON_MS - LEAD_MS),
        (lambda it: it.note_parked(SOON_MS), SOON_MS - LEAD_MS),
        (lambda it: it.note_parked(HORIZON_MS + 1), HORIZON_MS - LEAD_MS),
        (lambda it: it.note_notification(WAITING, SOON_MS), SOON_MS - LEAD_MS),
        (lambda it: it.note_notification(HELD, SOON_MS), SOON_MS),
        (lambda it: it.note_held(SOON_MS), SOON_MS),
        (lambda it: it.note_scan(NOW_MS, NOW_MS - 5, SOON_MS), NOW_MS - 5 - LEAD_MS),
        (lambda it: it.note_scan(NOW_MS, SOON_MS, None), SOON_MS - LEAD_MS),
        (lambda it: it.note_scan(NOW_MS - 9, NOW_MS - 5, None), HORIZON_MS - LEAD_MS),
    ],
    ids=["nothing", "park", "far park", "notified", "of held", "held", "unannounced", "unannounced, later", "claimed"],
)
def test_the_next_claim_begins_at_the_soonest_row(
    cursor: ReleaseCursor, happens: Callable[[ReleaseCursor], None], wake_ms: int
) -> None:
    happens(cursor)
    assert cursor.wake_ms() == wake_ms
    assert cursor.woken.is_set() or wake_ms == HORIZON_MS - LEAD_MS
    assert not cursor.more


def test_a_row_noted_during_a_claim_is_claimed_by_the_next_one(cursor: ReleaseCursor) -> None:
    cursor.prepare_claim()
    cursor.note_parked(SOON_MS)
    cursor.note_claim((HORIZON_MS, 7), next_ms=None, more=False)
    assert (cursor.place, cursor.wake_ms()) == ((SOON_MS, 0), SOON_MS - LEAD_MS)


@pytest.mark.parametrize("start", [None, (NOW_MS, 0)], ids=["a failed claim", "an open claim"])
def test_a_rollback_claims_again_at_once(cursor: ReleaseCursor, start: tuple[int, int] | None) -> None:
    """The claim forgot the row that woke it, so the lane must not sleep until the horizon."""
    cursor.note_parked(SOON_MS)
    cursor.prepare_claim()
    if start is not None:
        cursor.note_claim((SOON_MS, 3), next_ms=HORIZON_MS, more=False)
    cursor.note_rollback(start)
    assert cursor.more
    assert cursor.place <= (SOON_MS, 0)


def test_one_open_claim_at_a_time_has_held_rows(cursor: ReleaseCursor) -> None:
    cursor.note_held(SOON_MS)
    cursor.retrying = True
    assert (cursor.next_retry_ms(), cursor.wake_ms()) == (NEVER_MS, HORIZON_MS - LEAD_MS)
