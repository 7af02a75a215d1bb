"""The release cursor: where claims begin, and when held rows are asked for."""

from __future__ import annotations

from delayer.store import pool
from delayer.store.clock import StoreClock
from delayer.store.lanes.cursor import LOCKED_MS, NEVER_MS, ReleaseCursor, Start, Turn
from delayer.store.lanes.notify import HELD, WAITING, Notification

NOW = 1_000_000


def made(retry_ms: int | None = None) -> tuple[ReleaseCursor, StoreClock]:
    clock = StoreClock(monotonic=lambda: 0.0)
    clock.observe(0.0, float(NOW), 0.0)
    return ReleaseCursor(Start(1, NOW - 100, retry_ms), clock), clock


def test_a_note_during_a_claim_keeps_the_watermark_back() -> None:
    cursor, _ = made()
    cursor.claiming()
    cursor.note_parked(NOW - 500)
    cursor.settled(NOW, full=False, next_ms=NEVER_MS)
    assert cursor.watermark == NOW - 500
    assert cursor.next_ms(None) == NOW - 500
    cursor.claiming()
    cursor.settled(NOW, full=True, next_ms=None)
    assert (cursor.watermark, cursor.more) == (NOW, True)


def test_notifications_are_notes() -> None:
    cursor, _ = made()
    cursor.notified(Notification(WAITING, NOW - 7000))
    assert cursor.watermark == cursor.noted == NOW - 7000
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
    assert (cursor.watermark, cursor.retry_ms) == (NOW - 101, NOW + 9)


def test_a_clock_that_was_set_takes_the_watermark_to_the_beginning() -> None:
    cursor, clock = made()
    clock.observe(0.0, NOW - 50_000.0, 0.0)
    assert cursor.clock_stepped
    cursor.claiming()
    assert (cursor.watermark, cursor.more, cursor.clock_stepped) == (pool.BEGINNING_MS, True, False)


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
    cursor.claimed(crowded=True)
    assert cursor.turn(50) == (1, Turn.SHARE)
    cursor.claimed(crowded=False)
    assert cursor.turn(50) == (50, Turn.SHARE)


def test_locked_held_rows_are_left_alone_for_a_while() -> None:
    cursor, _ = made(NOW)
    cursor.pass_over_retries()
    assert cursor.turn(50) == (50, Turn.NONE)
    assert cursor.next_retry_ms() == NOW + LOCKED_MS
    cursor.note_held(NOW)
    assert cursor.turn(50) == (50, Turn.SHARE)
