"""What follows an occurrence, and which late occurrences are sent. Pure.

At any time one occurrence of an active schedule waits. The next is computed when the waiting occurrence is settled:
released, held, cancelled or expired.

An occurrence still unsent a minute after it was due with all of its jitter is *late*. A restart or a failover takes
less, so it does not make occurrences late, and neither does the jitter of the one before, for which it waits. The
waiting occurrence outlives a stop of every daemon, so it is always the first of the late ones.
The field ``catch_up`` (option ``--catch-up``) sets how many late ones are sent:

- ``SKIP``: none. The waiting one expires.
- ``ONCE``: the waiting one.
- n > 1: the waiting occurrence, then the latest n - 1 of the other late ones. These are due before they are written,
  so each is sent immediately.

The other late occurrences are never sent. Only these count in ``missed``.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from delayer.core.readable import counted, instant
from delayer.core.units import MINUTE_MS
from delayer.schedule.rhythm import count_between
from delayer.schedule.schedule import SKIP, Schedule, next_time

LATE_MS: Final = MINUTE_MS
"""An occurrence still unsent this long after it was due with all of its jitter is late."""


class Following(NamedTuple):
    """The next occurrence. ``at_ms``: its time by the rhythm, without jitter; None if the schedule has ended, for the
    reason ``why``. ``missed``: the number of occurrences before it that are never sent."""

    at_ms: int | None
    missed: int = 0
    why: str = ""


def find_first(schedule: Schedule, now_ms: int, made: int = 0) -> Following:
    """The first occurrence of a schedule that was added or resumed: the first time later than now, since a paused
    schedule misses nothing. ``made``: how many occurrences were sent. Raises BadCron and UnknownZone."""
    return _find_next(schedule, now_ms, made)


def find_anew(schedule: Schedule, *, waiting_ms: int, after_ms: int, now_ms: int, made: int = 0) -> Following:
    """Find the occurrence that waits after an edit, or after a change of the zone data.

    ``waiting_ms``: the rhythm's time of the occurrence that waits before. If this time has come, it stays, because
    nothing else would send it, unless the schedule now ends before it, or begins after it. ``after_ms``: all times up
    to this one are over. Raises BadCron and UnknownZone."""
    last_ms, most = schedule.last_ms, schedule.max_occurrences
    is_allowed = schedule.rhythm.first_ms <= waiting_ms and (last_ms is None or waiting_ms <= last_ms)
    if waiting_ms <= now_ms and is_allowed and (most is None or made < most):
        return Following(waiting_ms)
    return _find_next(schedule, after_ms, made)


def find_next(schedule: Schedule, at_ms: int, now_ms: int, made: int = 0) -> Following:
    """Find what follows the occurrence of the rhythm's time ``at_ms``, settled at ``now_ms``. ``made``: the number of
    occurrences sent so far, including this one if it was sent. Raises BadCron and UnknownZone."""
    if schedule.max_occurrences is not None and made >= schedule.max_occurrences:
        return _find_next(schedule, at_ms, made)  # One that has ended misses nothing.
    # Occurrences of times up to this one are late, even with all of their jitter.
    until_ms = now_ms - LATE_MS - schedule.jitter_ms - 1
    if schedule.last_ms is not None:
        until_ms = min(until_ms, schedule.last_ms)
    late = count_between(schedule.rhythm, at_ms, until_ms)
    # ``catch_up`` includes the settled occurrence, which was the first late one.
    missed = max(0, late - max(0, schedule.catch_up - 1))
    if missed:
        at_ms = until_ms if missed == late else _last_but(schedule, late - missed, at_ms, until_ms)
    return _find_next(schedule, at_ms, made)._replace(missed=missed)


def is_expired(schedule: Schedule, at_ms: int, now_ms: int) -> bool:
    """Whether the waiting occurrence of the rhythm's time ``at_ms`` is late and not to be sent. It counts as missed."""
    return schedule.catch_up == SKIP and now_ms - at_ms - schedule.jitter_ms > LATE_MS


def _find_next(schedule: Schedule, after_ms: int, made: int) -> Following:
    most = schedule.max_occurrences
    if most is not None and made >= most:
        return Following(None, why=f"it has had its {counted(most, 'occurrence')}")
    if (at_ms := next_time(schedule, after_ms)) is not None:
        return Following(at_ms)
    last = "no date follows" if schedule.last_ms is None else f"its last time was {instant(schedule.last_ms)}"
    return Following(None, why=last)


def _last_but(schedule: Schedule, count: int, after_ms: int, until_ms: int) -> int:
    """Find the time before the last ``count`` ones that are not later than ``until_ms``: later than ``after_ms``.

    Search backwards from the end, in steps of twice the length, and bisect the last step. So the cost depends on how
    far back that time is, and not on how long the outage was."""
    length, low = MINUTE_MS, max(after_ms, until_ms - MINUTE_MS)
    while low > after_ms and count_between(schedule.rhythm, low, until_ms) <= count:
        length *= 2
        low = max(after_ms, until_ms - length)
    high = until_ms
    while high - low > 1:
        middle = (low + high) // 2
        is_before = count_between(schedule.rhythm, middle, until_ms) > count
        low, high = (middle, high) if is_before else (low, middle)
    return high
