"""What follows an occurrence: the policies in tables, and against a schedule that is walked through."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from delayer.core.units import DAY_MS, HOUR_MS, MINUTE_MS
from delayer.schedule.missed import LATE_MS, Following, find_anew, find_first, find_next, is_expired
from delayer.schedule.occurrence import due_ms
from delayer.schedule.rhythm import Cron, Every
from delayer.schedule.schedule import ONCE, SKIP, next_time
from delayer.schedule.wall import UnknownZone
from tests.unit.schedule.readings import READINGS, ZONES, Reading, changes, read
from tests.unit.schedule.scene import HOURLY, ms, schedule

TEN = ms("2026-03-02T10:00Z")
HOUR = HOUR_MS


@pytest.mark.parametrize(
    ("catch_up", "settled", "next_", "missed"),
    [
        (ONCE, TEN + 20, TEN + HOUR, 0),
        (ONCE, TEN + HOUR + LATE_MS, TEN + HOUR, 0),  # late, not missed
        (ONCE, TEN + HOUR + LATE_MS + 1, TEN + 2 * HOUR, 1),
        (ONCE, TEN + DAY_MS + 5 * MINUTE_MS, TEN + DAY_MS + HOUR, 24),
        (SKIP, TEN + DAY_MS + 5 * MINUTE_MS, TEN + DAY_MS + HOUR, 24),
        (SKIP, TEN + HOUR + LATE_MS, TEN + HOUR, 0),
        (2, TEN + DAY_MS + 5 * MINUTE_MS, TEN + DAY_MS, 23),
        (5, TEN + DAY_MS + 5 * MINUTE_MS, TEN + DAY_MS - 3 * HOUR, 20),
        (24, TEN + DAY_MS + 5 * MINUTE_MS, TEN + 2 * HOUR, 1),
        (25, TEN + DAY_MS + 5 * MINUTE_MS, TEN + HOUR, 0),
        (1_000, TEN + DAY_MS + 5 * MINUTE_MS, TEN + HOUR, 0),
        (ONCE, TEN - DAY_MS, TEN + HOUR, 0),  # cancelled ahead of its time
        (ONCE, TEN - 5 * DAY_MS, TEN + HOUR, 0),  # or the clock stepped back
    ],
)
def test_a_stopped_daemon(catch_up: int, settled: int, next_: int, missed: int) -> None:
    assert find_next(schedule(catch_up=catch_up), TEN, settled) == Following(next_, missed)


@pytest.mark.parametrize(
    ("catch_up", "late", "expired"),
    [(SKIP, LATE_MS, False), (SKIP, LATE_MS + 1, True), (ONCE, DAY_MS, False), (5, DAY_MS, False), (SKIP, -1, False)],
)
def test_only_skip_expires(catch_up: int, late: int, expired: bool) -> None:
    one = schedule(catch_up=catch_up, jitter_ms=MINUTE_MS)
    assert is_expired(one, TEN, TEN + MINUTE_MS + late) is expired


def test_a_single_missed_occurrence_is_sent_late_or_not_at_all() -> None:
    """Down from 6:00 to 9:00, and due at 7:00 each weekday."""
    rhythm = Cron("0 7 * * 1-5", "Europe/Berlin")
    seven, nine, next_ = (ms(f"2026-03-{at}+01:00") for at in ("27T07:00", "27T09:00", "28T07:00"))
    monday = ms("2026-03-30T07:00+02:00")
    assert next_ < monday
    for catch_up in (SKIP, ONCE, 10):
        one = schedule(rhythm=rhythm, catch_up=catch_up)
        assert is_expired(one, seven, nine) is (catch_up == SKIP)
        assert find_next(one, seven, nine) == Following(monday)


def test_the_last_time_ends_a_schedule_and_bounds_what_was_missed() -> None:
    one = schedule(last_ms=TEN + 3 * HOUR)
    assert find_next(one, TEN + 2 * HOUR, TEN + 2 * HOUR) == Following(TEN + 3 * HOUR)
    assert find_next(one, TEN + 3 * HOUR, TEN + 3 * HOUR) == Following(
        None, why="its last time was 2026-03-02T13:00:00Z"
    )
    assert find_next(one, TEN, TEN + DAY_MS)[:2] == (None, 3)
    assert find_next(schedule(last_ms=TEN + 3 * HOUR, catch_up=3), TEN, TEN + DAY_MS)[:2] == (TEN + 2 * HOUR, 1)


def test_the_maximum_ends_a_schedule() -> None:
    one = schedule(max_occurrences=3)
    assert find_next(one, TEN, TEN, made=2) == Following(TEN + HOUR)
    assert find_next(one, TEN, TEN, made=3) == Following(None, why="it has had its 3 occurrences")
    assert find_first(one, TEN, made=3).at_ms is None
    assert find_next(one, TEN, TEN + DAY_MS, made=3).missed == 0, "after its last one, a schedule misses nothing"


def test_a_date_that_does_not_come_again_ends_a_schedule() -> None:
    never = schedule(rhythm=Cron("0 0 */31 * MON#5"))
    assert find_first(never, TEN) == Following(None, why="no date follows")


def test_a_zone_that_is_gone_is_an_error() -> None:
    gone = schedule(rhythm=Cron("@daily", "Europe/Atlantis"))
    for settle in (lambda: find_next(gone, TEN, TEN), lambda: find_first(gone, TEN)):
        with pytest.raises(UnknownZone):
            settle()


def test_a_paused_schedule_misses_nothing() -> None:
    assert find_first(schedule(catch_up=1_000), TEN + DAY_MS + 1) == Following(TEN + DAY_MS + HOUR)
    assert find_first(schedule(rhythm=Every(HOUR, TEN + 5)), 0) == Following(TEN + 5)


def test_an_interval_goes_on_from_its_first_time_not_from_a_release() -> None:
    one = schedule(rhythm=Every(HOUR, TEN))
    at, settled = TEN, TEN + 1_234
    for step in range(1, 50):
        at = find_next(one, at, settled).at_ms or 0
        assert at == TEN + step * HOUR
        settled = at + 1_234


def test_an_edit_keeps_what_is_due_and_what_was_cancelled() -> None:
    body, quarterly = schedule(body=b"new"), schedule(rhythm=Every(HOUR // 4))
    now = TEN + MINUTE_MS
    # 11:00 waits.
    assert find_anew(body, waiting_ms=TEN + HOUR, after_ms=now, now_ms=now) == Following(TEN + HOUR)
    assert find_anew(quarterly, waiting_ms=TEN + HOUR, after_ms=now, now_ms=now) == Following(TEN + HOUR // 4)
    # 10:00 is due, and every daemon is down.
    assert find_anew(quarterly, waiting_ms=TEN, after_ms=now, now_ms=now) == Following(TEN)
    # 11:00 was cancelled, and 12:00 waits.
    assert find_anew(body, waiting_ms=TEN + 2 * HOUR, after_ms=TEN + HOUR, now_ms=now) == Following(TEN + 2 * HOUR)
    assert find_anew(schedule(last_ms=now + 1), waiting_ms=TEN + HOUR, after_ms=now, now_ms=now).at_ms is None
    ended = schedule(max_occurrences=2)
    assert find_anew(ended, waiting_ms=TEN + HOUR, after_ms=now, now_ms=now, made=2).at_ms is None


def test_what_is_due_does_not_outlast_new_limits() -> None:
    now = TEN + MINUTE_MS
    for limits, made in (
        ({"max_occurrences": 2}, 2), ({"last_ms": TEN - 1}, 0), ({"rhythm": Every(HOUR, TEN + 5 * HOUR)}, 0),
    ):  # fmt: skip
        found = find_anew(schedule(**limits), waiting_ms=TEN, after_ms=now, now_ms=now, made=made)
        assert found.at_ms == (TEN + 5 * HOUR if "rhythm" in limits else None)


def test_jitter_makes_no_occurrence_missed() -> None:
    one = schedule(rhythm=Cron("*/5 * * * *"), jitter_ms=20 * MINUTE_MS)
    assert find_next(one, TEN, TEN + 20 * MINUTE_MS) == Following(TEN + 5 * MINUTE_MS)


def test_jitter_longer_than_the_gap_drops_nothing() -> None:
    """An occurrence waits for the one before, whose jitter may be larger."""
    one = schedule(rhythm=Cron("*/5 * * * *"), jitter_ms=20 * MINUTE_MS, catch_up=SKIP)
    now, at, sent, missed = TEN, find_first(one, TEN).at_ms, 0, 0
    while at is not None and at <= TEN + DAY_MS:
        now = max(now, due_ms(one, at))
        sent += not is_expired(one, at, now)
        at, more, _ = find_next(one, at, now)
        missed += more
    assert (sent, missed) == (24 * 12, 0)


RHYTHMS = st.sampled_from(
    [HOURLY, Every(7 * MINUTE_MS, TEN), Cron("*/20 * * * *", "Europe/Berlin"), Cron("30 2 * * *", "America/New_York"),
     Cron("0,30 1-3 * * *", "Australia/Lord_Howe"), Cron("0 9-17 * * 1-5", "Asia/Kathmandu")]
)  # fmt: skip


@given(RHYTHMS, st.integers(0, 30), st.integers(0, 365 * 24 * 60), st.lists(st.integers(0, 3 * 24 * 60), max_size=6),
       st.integers(0, MINUTE_MS))  # fmt: skip
def test_every_occurrence_is_sent_once_or_counted_as_missed(
    rhythm: Every | Cron, catch_up: int, start: int, stops: list[int], jitter_ms: int
) -> None:
    """A daemon stops and starts. Each time of the rhythm is settled or missed, none twice, and those sent late in a row
    are no more than the policy says."""
    one = schedule(rhythm=rhythm, catch_up=catch_up, jitter_ms=jitter_ms)
    now = TEN + start * MINUTE_MS
    waiting, settled, missed = find_first(one, now).at_ms, [], 0
    for stop in stops:
        now += stop * MINUTE_MS
        late = 0
        while waiting is not None and due_ms(one, waiting) <= now:
            assert not settled or waiting > settled[-1]
            late += now - due_ms(one, waiting) > LATE_MS + jitter_ms and not is_expired(one, waiting, now)
            settled.append(waiting)
            waiting, more, _ = find_next(one, waiting, now)
            missed += more
        assert late <= catch_up
    expected, at = [], next_time(one, TEN + start * MINUTE_MS)
    while at is not None and waiting is not None and at < waiting:
        expected.append(at)
        at = next_time(one, at)
    assert at == waiting
    assert set(settled) <= set(expected)
    assert len(expected) == len(settled) + missed


CHANGES = st.sampled_from([(zone, change) for zone in ZONES for change in changes(zone)[-12:]])


@given(st.sampled_from(READINGS), CHANGES, st.integers(2, 5), st.integers(0, 40), st.integers(-6 * HOUR, 6 * HOUR))
def test_what_is_caught_up_next_to_a_change_of_the_clocks(
    reading: Reading, change: tuple[str, int], catch_up: int, back: int, now: int
) -> None:
    """Compared with the times as another reading has them, minute by minute."""
    zone, at = change
    midnight, now = at - at % 86_400, at * 1_000 + now
    times = [one * 1_000 for one in read(reading, zone, midnight - 3 * 86_400, midnight + 8 * 86_400)]
    before = [one for one in times if one <= now]
    assume(before)
    settled = before[-min(len(before), back + 1)]
    late = [one for one in times if settled < one < now - LATE_MS]
    caught_up, after = late[1 - catch_up :], [one for one in times if one > max([settled, *late])]
    assume(caught_up or after)
    one = schedule(rhythm=Cron(reading.expression, zone), catch_up=catch_up)
    assert find_next(one, settled, now) == Following([*caught_up, *after][0], len(late) - len(caught_up))
