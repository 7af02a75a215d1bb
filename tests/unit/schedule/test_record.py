"""A record proceeds from one occurrence to the next, and finds the next one after an operator's change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delayer.core.units import DAY_MS
from delayer.schedule.missed import Following
from delayer.schedule.occurrence import due_ms
from delayer.schedule.record import Fate, ScheduleRecord, begin, key_of, name_of, plan, revise, step_on, stop
from delayer.schedule.rhythm import Cron, Every
from delayer.schedule.schedule import ScheduleState
from tests.unit.schedule.scene import HOURLY, schedule

HOUR_MS = 3_600_000
NOON_MS = 12 * HOUR_MS
WAITING = ScheduleRecord(schedule(), waiting_ms=NOON_MS, waiting_id=7)


def test_the_key_names_the_schedule() -> None:
    assert key_of("tick") == b"delayer.schedule/tick"
    assert name_of(key_of("tick")) == "tick"


@pytest.mark.parametrize(("fate", "made", "missed"), [(Fate.SENT, 1, 0), (Fate.MISSED, 0, 1), (Fate.CANCELLED, 0, 0)])
def test_the_next_occurrence_follows_each_fate(fate: Fate, made: int, missed: int) -> None:
    record, parcel = step_on(WAITING, fate, NOON_MS + 5)
    assert (record.made, record.missed, record.settled_ms, record.waiting_ms) == (
        made, missed, NOON_MS, NOON_MS + HOUR_MS,
    )  # fmt: skip
    assert parcel is not None
    assert (parcel.due_ms, parcel.key) == (NOON_MS + HOUR_MS, b"delayer.schedule/tick")


def test_the_lateness_is_that_of_the_last_occurrence_sent() -> None:
    record, _ = step_on(WAITING, Fate.SENT, NOON_MS + 5, sent_ms=NOON_MS + 3)
    assert (record.made_ms, record.late_ms) == (NOON_MS + 3, 3)
    again, _ = step_on(record, Fate.CANCELLED, NOON_MS + HOUR_MS)
    assert (again.made_ms, again.late_ms) == (NOON_MS + 3, 3)


def test_the_jitter_of_the_occurrence_before_is_no_lateness() -> None:
    minute_ms = 60_000
    jittery = schedule(rhythm=Cron("* * * * *"), jitter_ms=HOUR_MS)
    times = range(NOON_MS, NOON_MS + HOUR_MS, minute_ms)
    # The first occurrence is due after each of the next two.
    at_ms = next(
        at_ms for at_ms in times
        if due_ms(jittery, at_ms) > max(due_ms(jittery, at_ms + n * minute_ms) for n in (1, 2))
    )  # fmt: skip
    record, sent_ms = WAITING._replace(schedule=jittery, waiting_ms=at_ms), due_ms(jittery, at_ms) + 3
    for _ in range(3):
        record, _ = step_on(record, Fate.SENT, sent_ms, sent_ms)
        assert record.late_ms == 3
    assert record.settled_ms == at_ms + 2 * minute_ms


def test_an_occurrence_after_a_late_one_is_late_as_well() -> None:
    record = WAITING._replace(schedule=schedule(rhythm=Every(60_000), catch_up=1_000))
    sent_ms = NOON_MS + HOUR_MS
    for minutes in range(3):
        record, _ = step_on(record, Fate.SENT, sent_ms, sent_ms)
        assert record.late_ms == HOUR_MS - minutes * 60_000


def test_it_ends_and_says_why() -> None:
    last = WAITING._replace(schedule=schedule(last_ms=NOON_MS))
    record, parcel = step_on(last, Fate.SENT, NOON_MS)
    assert parcel is None
    assert (record.state, record.waiting_ms, record.waiting_id) == (ScheduleState.ENDED, None, None)
    assert record.why.startswith("its last time was")


def test_one_that_cannot_be_computed_has_failed() -> None:
    broken = WAITING._replace(schedule=schedule(rhythm=Cron("0 * * * *", "Europe/Atlantis")))
    record, parcel = step_on(broken, Fate.SENT, NOON_MS)
    assert parcel is None
    assert record.state is ScheduleState.FAILED
    assert "Europe/Atlantis" in record.why
    assert (record.made, record.settled_ms) == (1, NOON_MS)


def test_a_fault_of_the_host_does_not_fail_the_schedule() -> None:
    def find() -> Following:
        raise OSError("Too many open files")

    with pytest.raises(OSError, match="Too many"):
        plan(WAITING, find)


def test_a_resumed_schedule_does_not_repeat_an_occurrence_that_was_cancelled_ahead() -> None:
    cancelled, _ = step_on(WAITING, Fate.CANCELLED, NOON_MS - HOUR_MS // 2)
    paused = stop(cancelled, ScheduleState.PAUSED)
    record, _ = begin(paused, NOON_MS - HOUR_MS // 4)
    assert record.waiting_ms == NOON_MS + HOUR_MS
    assert record.state is ScheduleState.ACTIVE


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_new_rhythm_does_not_wait_for_the_time_of_a_cancelled_occurrence(is_paused: bool) -> None:
    record, _ = step_on(WAITING._replace(waiting_ms=NOON_MS + 9 * HOUR_MS), Fate.CANCELLED, NOON_MS)
    record = stop(record, ScheduleState.PAUSED) if is_paused else record
    record, _ = revise(record, schedule(rhythm=Every(60_000)), NOON_MS)
    record, _ = begin(stop(record, ScheduleState.PAUSED), NOON_MS)
    assert record.waiting_ms == NOON_MS + 60_000


@pytest.mark.parametrize("is_paused", [False, True])
@pytest.mark.parametrize("ahead", [1, 3])
def test_times_that_are_settled_ahead_do_not_come_again_by_a_new_rhythm(is_paused: bool, ahead: int) -> None:
    """An occurrence that was moved would come twice."""
    record = WAITING._replace(schedule=schedule(rhythm=Cron("0 12 * * *")))
    for _ in range(ahead):
        record, _ = step_on(record, Fate.SENT, NOON_MS - 1)
    record = stop(record, ScheduleState.PAUSED) if is_paused else record
    for rhythm in (Cron("0 12 * * MON-SUN"), Cron("0 12 * * *", "Etc/UTC"), Cron("0 12 * * *", first_ms=1)):
        edited, _ = revise(record, replace(record.schedule, rhythm=rhythm), NOON_MS - 1)
        begun, _ = begin(edited, NOON_MS - 1) if is_paused else (edited, None)
        assert begun.waiting_ms == NOON_MS + ahead * DAY_MS
    # Each sixth hour is new.
    edited, _ = revise(record, replace(record.schedule, rhythm=Cron("0 */6 * * *")), NOON_MS - 1)
    begun, _ = begin(edited, NOON_MS - 1) if is_paused else (edited, None)
    assert begun.waiting_ms == NOON_MS + 6 * HOUR_MS


def test_an_edit_without_a_new_rhythm_does_not_repeat_a_cancelled_occurrence() -> None:
    cancelled, _ = step_on(WAITING, Fate.CANCELLED, NOON_MS - HOUR_MS // 2)
    record, _ = revise(cancelled, schedule(body=b"tock"), NOON_MS - HOUR_MS // 4)
    assert record.waiting_ms == NOON_MS + HOUR_MS


@pytest.mark.parametrize(
    ("state", "waiting_ms", "expected_ms"),
    [
        (ScheduleState.ACTIVE, NOON_MS, NOON_MS),
        (ScheduleState.ACTIVE, NOON_MS + HOUR_MS, NOON_MS + 60_000),
        (ScheduleState.PAUSED, None, None),
        (ScheduleState.ENDED, None, NOON_MS + 60_000),
        (ScheduleState.FAILED, None, NOON_MS + 60_000),
    ],
)
def test_an_edit_finds_the_next_time_unless_one_is_due_or_the_schedule_is_paused(
    state: ScheduleState, waiting_ms: int | None, expected_ms: int | None
) -> None:
    before = ScheduleRecord(schedule(), state, waiting_ms=waiting_ms)
    after = replace(before.schedule, rhythm=Every(60_000))
    record, parcel = revise(before, after, NOON_MS)
    assert record.waiting_ms == expected_ms
    assert (parcel is None) == (expected_ms is None)
    assert record.schedule.rhythm == after.rhythm
    assert record.state is (state if state is ScheduleState.PAUSED else ScheduleState.ACTIVE)


def test_the_waiting_occurrence_is_due_with_its_jitter() -> None:
    assert WAITING.due_ms == NOON_MS
    assert ScheduleRecord(schedule()).due_ms is None
    jittery = WAITING._replace(schedule=schedule(rhythm=HOURLY, jitter_ms=HOUR_MS - 1))
    assert NOON_MS < (jittery.due_ms or 0) < NOON_MS + HOUR_MS
