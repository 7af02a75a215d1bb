"""What follows an occurrence, and what a stopped daemon missed. Pure.

One occurrence of a schedule waits at any time. The next is computed when the waiting one is settled: released, held,
cancelled or expired. The waiting one outlives a stop of every daemon, so it is the first of those missed. ``catch_up``
says how many of these are sent at all:

- ``SKIP``: none. The waiting one expires, unsent, a minute after it was due.
- ``ONCE``: the waiting one, however late.
- more: the waiting one, and the latest of the others. Each is due already when it is written, so it leaves at once.

An occurrence is missed if nobody could send it within a minute. So a restart or a failover misses none.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from delayer.core.readable import counted, instant
from delayer.core.units import MINUTE_MS
from delayer.schedule.occurrence import due_ms
from delayer.schedule.rhythm import count_between
from delayer.schedule.schedule import SKIP, Schedule, next_time

LATE_MS: Final = MINUTE_MS
"""An occurrence later than this is missed."""


class Following(NamedTuple):
    """The next occurrence. ``at_ms``: the rhythm's time, without jitter; None if the schedule has ended, and ``why``.
    ``missed``: how many occurrences before it are never sent."""

    at_ms: int | None
    missed: int = 0
    why: str = ""


def starting(schedule: Schedule, now_ms: int, made: int = 0) -> Following:
    """The first occurrence of a schedule that was added or resumed: the first time later than now, since a paused
    schedule misses nothing. ``made``: how many occurrences were sent. Raises BadCron and UnknownZone."""
    return _following(schedule, now_ms, made)


def renewed(
    before: Schedule, after: Schedule, *, waiting_ms: int, settled_ms: int, now_ms: int, made: int = 0
) -> Following:
    """The occurrence that waits after an edit, or, if both schedules are equal, after a change of the zone data.
    ``waiting_ms``: the time of the one that waits now. It stays if this time has come, as nothing else would send it.
    ``settled_ms``: that of the last one settled, which may be ahead: a cancelled occurrence does not come back unless
    the rhythm is new. Raises BadCron and UnknownZone."""
    if waiting_ms <= now_ms:
        return Following(waiting_ms)
    return _following(after, now_ms if before.rhythm != after.rhythm else max(now_ms, settled_ms), made)


def following(schedule: Schedule, at_ms: int, now_ms: int, made: int = 0) -> Following:
    """What follows the occurrence of the rhythm's time ``at_ms``, settled at ``now_ms``. ``made``: how many occurrences
    were sent, with this one if it was. Raises BadCron and UnknownZone."""
    until_ms = now_ms - LATE_MS - schedule.jitter_ms - 1
    if schedule.last_ms is not None:
        until_ms = min(until_ms, schedule.last_ms)
    late = count_between(schedule.rhythm, at_ms, until_ms)
    missed = max(0, late - max(0, schedule.catch_up - 1))
    if missed:
        at_ms = until_ms if missed == late else _time_of(schedule, at_ms, until_ms, missed)
    return _following(schedule, at_ms, made)._replace(missed=missed)


def is_expired(schedule: Schedule, at_ms: int, now_ms: int) -> bool:
    """Whether the waiting occurrence of the rhythm's time ``at_ms`` is too late to be sent. It counts as missed."""
    return schedule.catch_up == SKIP and now_ms - due_ms(schedule, at_ms) > LATE_MS


def _following(schedule: Schedule, after_ms: int, made: int) -> Following:
    most = schedule.max_occurrences
    if most is not None and made >= most:
        return Following(None, why=f"it has had its {counted(most, 'occurrence')}")
    if (at_ms := next_time(schedule, after_ms)) is not None:
        return Following(at_ms)
    last = "no date follows" if schedule.last_ms is None else f"its last time was {instant(schedule.last_ms)}"
    return Following(None, why=last)


def _time_of(schedule: Schedule, after_ms: int, until_ms: int, ordinal: int) -> int:
    """The time of the ``ordinal``-th occurrence after this instant, found by halves."""
    low, high = after_ms, until_ms
    while high - low > 1:
        middle = (low + high) // 2
        enough = count_between(schedule.rhythm, after_ms, middle) >= ordinal
        low, high = (low, middle) if enough else (middle, high)
    return high
