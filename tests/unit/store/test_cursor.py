"""The release cursor: where claims begin, and when held rows are asked for."""

from __future__ import annotations

from delayer.store import pool
from delayer.store.clock import StoreClock
from delayer.store.lanes.cursor import LEAD_MS, LOCKED_MS, NEVER_MS, Place, ReleaseCursor, Turn
from delayer.store.lanes.notify import HELD, WAITING, Notification

NOW = 1_000_000


def made(retry_ms: int | None = None) -> tuple[ReleaseCursor, StoreClock]:
    clock = StoreClock(monotonic=lambda: 0.0)
    clock.observe(0.0, float(NOW), 0.0)
    cursor = ReleaseCursor(clock)
    cursor.begin(NOW - 100, retry_ms)
    cursor.woken.clear()
    return cursor, clock


def claimed(
    cursor: ReleaseCursor, last: Place, *, next_ms: int | None = None, more: bool = False, crowded: bool = False
) -> None:
    cursor.claimed(last, next_ms=next_ms, more=more, retrying=False, crowded=crowded)


def test_a_note_during_a_claim_keeps_the_place_back() -> None:
    cursor, _ = made()
    cursor.claiming()
    cursor.note_parked(NOW - 500)
    claimed(cursor, (NOW, 7))
    assert cursor.place == (NOW - 500, 0)
    assert cursor.wake_ms() == NOW - 500 - LEAD_MS
    cursor.claiming()
    claimed(cursor, (NOW, 7), more=True)
    assert (cursor.place, cursor.more) == ((NOW, 7), True)


def test_the_next_claim_begins_before_the_next_row_is_due() -> None:
    cursor, _ = made()
    cursor.claiming()
    claimed(cursor, (NOW, 7), next_ms=NOW + 1_000)
    assert cursor.wake_ms() == NOW + 1_000 - LEAD_MS
    cursor.note_parked(NOW + 500)
    assert (cursor.place, cursor.wake_ms()) == ((NOW, 7), NOW + 500 - LEAD_MS)
    cursor.note_parked(NOW)
    assert cursor.place == (NOW, 0), "a row of that instant may have a smaller id"


def test_a_claim_that_is_rolled_back_takes_the_place_back_also_under_the_next_claim() -> None:
    cursor, _ = made()
    cursor.claiming()
    claimed(cursor, (NOW, 7))
    cursor.claiming()
    cursor.rolled_back((NOW - 100, 3))
    claimed(cursor, (NOW + 50, 9))
    assert cursor.place == (NOW - 100, 0)
    assert cursor.wake_ms() < NOW - 100
    assert cursor.woken.is_set()


def test_held_rows_of_an_open_claim_are_not_waited_for() -> None:
    cursor, _ = made(NOW)
    assert cursor.next_retry_ms() == NOW
    cursor.claimed((NOW, 7), next_ms=NEVER_MS, more=False, retrying=True, crowded=False)
    assert cursor.next_retry_ms() == NEVER_MS
    assert cursor.turn(50) == (50, Turn.NONE)
    cursor.retrying = False
    assert cursor.next_retry_ms() == NOW


def test_notifications_are_notes() -> None:
    cursor, _ = made()
    cursor.notified(Notification(WAITING, NOW - 7000))
    assert (cursor.place, cursor.noted) == ((NOW - 7000, 0), NOW - 7000)
    assert cursor.woken.is_set()
    cursor.woken.clear()
    cursor.notified(Notification(HELD, NOW + 5))
    assert cursor.next_retry_ms() == NOW + 5
    assert cursor.woken.is_set()


def test_a_scan_finds_rows_before_the_watermark_only() -> None:
    cursor, _ = made()
    cursor.scanned(NOW - 100, NOW - 100, None)
    assert cursor.noted == NEVER_MS
    cursor.scanned(NOW - 100, NOW - 101, NOW + 9)
    assert (cursor.place, cursor.retry_ms) == ((NOW - 101, 0), NOW + 9)


def test_a_clock_that_was_set_takes_the_place_to_the_beginning() -> None:
    cursor, clock = made()
    clock.observe(0.0, NOW - 50_000.0, 0.0)
    assert cursor.clock_stepped
    cursor.claiming()
    assert (cursor.place, cursor.more, cursor.clock_stepped) == ((pool.BEGINNING_MS, 0), True, False)


def test_held_rows_get_a_share_of_claims_once_one_is_due() -> None:
    cursor, _ = made(NOW + 1)
    assert cursor.turn(50) == (50, Turn.NONE)
    cursor.expect_retry(NOW)
    assert cursor.turn(50) == (50, Turn.SHARE)


def test_claims_of_one_row_alternate_between_waiting_and_held() -> None:
    cursor, _ = made(NOW)
    assert [cursor.turn(1)[1] for _ in range(4)] == [Turn.SHARE, Turn.SPARE, Turn.SHARE, Turn.SPARE]


def test_after_a_claim_without_bytes_for_held_rows_comes_one_of_a_single_held_row() -> None:
    cursor, _ = made(NOW)
    claimed(cursor, (NOW, 7), crowded=True)
    assert cursor.turn(50) == (1, Turn.SHARE)
    claimed(cursor, (NOW, 7))
    assert cursor.turn(50) == (50, Turn.SHARE)


def test_locked_held_rows_are_left_alone_for_a_while() -> None:
    cursor, _ = made(NOW)
    cursor.pass_over_retries()
    assert cursor.turn(50) == (50, Turn.NONE)
    assert cursor.next_retry_ms() == NOW + LOCKED_MS
    cursor.note_held(NOW)
    assert cursor.turn(50) == (50, Turn.SHARE)
