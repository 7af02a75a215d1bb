"""A schedule as a value, and what is wrong with one. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final
from uuid import UUID

from delayer.amqp.properties import decoded, parsed
from delayer.amqp.values import SHORT_STRING
from delayer.core.delay_headers import DELAY, REQUEST_HEADERS, quote_value
from delayer.core.message import COPY_HEADERS, Target, as_text, is_direct_reply
from delayer.core.readable import instant
from delayer.core.units import DAY_MS, LATEST_MS, LONGEST_DURATION_MS
from delayer.schedule.cron import BadCron, check_cron
from delayer.schedule.rhythm import Every, Rhythm, next_after
from delayer.schedule.wall import UnknownZone, check_zone

SCHEDULE: Final = b"x-delayer-schedule"
"""The header that names the schedule of an occurrence."""
SHORTEST_MS: Final = 1_000
MOST_JITTER_MS: Final = DAY_MS
SKIP: Final = 0
ONCE: Final = 1
MOST_CAUGHT_UP: Final = 1_000
MOST_OCCURRENCES: Final = (1 << 63) - 1
NAME: Final = "1 to 100 letters, digits, dots, dashes and underscores, the first a letter or a digit"
_NAME: Final = re.compile("[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_OURS: Final = REQUEST_HEADERS | {DELAY, SCHEDULE}


class ScheduleState(StrEnum):
    """The state of a schedule. The values are in the store."""

    ACTIVE = "active"
    """One occurrence waits."""
    PAUSED = "paused"
    """An operator stopped it. No occurrence waits, and none is missed."""
    ENDED = "ended"
    """Its last time, or its last occurrence, is over."""
    FAILED = "failed"
    """Its next occurrence cannot be computed, such as in a zone that the host's zone data has lost."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A recurring message. ``id`` stays when a schedule is edited or exported. ``properties``: those of the message, as
    AMQP encodes them, without ``message_id``. ``last_ms``: no occurrence is later; None for no limit."""

    id: UUID
    name: str
    target: Target
    rhythm: Rhythm
    properties: bytes
    body: bytes = b""
    last_ms: int | None = None
    catch_up: int = ONCE
    """How many late occurrences are sent (missed.py): none (``SKIP``), one (``ONCE``) or more."""
    jitter_ms: int = 0
    """Each occurrence is due up to this time later than the rhythm says."""
    max_occurrences: int | None = None


def next_time(schedule: Schedule, after_ms: int) -> int | None:
    """Find the first time of the rhythm later than ``after_ms`` and not later than the schedule's last. None is due
    later than LATEST_MS, even with its jitter. Raises BadCron and UnknownZone."""
    at_ms, last_ms = next_after(schedule.rhythm, after_ms), LATEST_MS - schedule.jitter_ms
    if schedule.last_ms is not None:
        last_ms = min(last_ms, schedule.last_ms)
    return None if at_ms is None or at_ms > last_ms else at_ms


def problems(schedule: Schedule, now_ms: int, *, failed: bool = False) -> list[str]:
    """List what is wrong with a new or edited schedule: for each field what was expected, and what was found.
    ``failed``: the schedule has failed, so its rhythm may have no times."""
    found = [*([] if failed else _of_rhythm(schedule.rhythm)), *_of_bounds(schedule)]
    if not found and not failed and next_time(schedule, now_ms) is None:
        ends = (
            "no such date within fifty years"
            if schedule.last_ms is None
            else f"its last is {instant(schedule.last_ms)}"
        )
        found.append(f"last: expected a time of the rhythm after {instant(now_ms)}, found none ({ends})")
    return [*_of_name(schedule.name), *found, *_of_limits(schedule), *_of_message(schedule)]


def is_name(text: str) -> bool:
    """Whether a schedule can have this name."""
    return _NAME.fullmatch(text) is not None


def _of_name(name: str) -> Iterator[str]:
    if not is_name(name):
        yield f"name: expected {NAME}, found {quote_value(name)}"


def _of_rhythm(rhythm: Rhythm) -> Iterator[str]:
    if isinstance(rhythm, Every):
        if not SHORTEST_MS <= rhythm.period_ms <= LONGEST_DURATION_MS:
            yield f"every: expected 1s to 36500d, found {rhythm.period_ms} ms"
        return
    try:
        check_cron(rhythm.expression)
    except BadCron as wrong:
        yield f"cron: {wrong}"
    try:
        check_zone(rhythm.zone)
    except UnknownZone as wrong:
        yield f"zone: {wrong}"


def _of_bounds(schedule: Schedule) -> Iterator[str]:
    for name, at_ms in (("first", schedule.rhythm.first_ms), ("last", schedule.last_ms or 0)):
        if not 0 <= at_ms <= LATEST_MS:
            yield f"{name}: expected an instant of the years 1970 to 9999, found {instant(at_ms)}"


def _of_limits(schedule: Schedule) -> Iterator[str]:
    most = MOST_JITTER_MS
    if isinstance(schedule.rhythm, Every):
        most = max(
            0, min(most, schedule.rhythm.period_ms - 1)
        )  # Otherwise an occurrence could be due after its successor.
    if not 0 <= schedule.jitter_ms <= most:
        yield f"jitter: expected 0 to {most} ms, less than an interval and at most a day, found {schedule.jitter_ms} ms"
    if not SKIP <= schedule.catch_up <= MOST_CAUGHT_UP:
        yield f"catch_up: expected skip, once, all, or a number of at most {MOST_CAUGHT_UP}, found {schedule.catch_up}"
    number = schedule.max_occurrences
    if number is not None and not 1 <= number <= MOST_OCCURRENCES:
        yield f"max: expected 1 to {MOST_OCCURRENCES} occurrences, found {number}"


def _of_message(schedule: Schedule) -> Iterator[str]:
    from delayer.core.plan import closes_channel  # noqa: PLC0415 - commands that read start without it

    for what, name in (("exchange", schedule.target.exchange), ("routing_key", schedule.target.routing_key)):
        if len(name) > SHORT_STRING:
            yield f"{what}: expected at most {SHORT_STRING} bytes, found {len(name)}"
    if is_direct_reply(*schedule.target):
        yield (
            "routing_key: expected a queue that stays, "
            f"found the direct reply {quote_value(as_text(schedule.target.routing_key))}, which ends with its consumer"
        )
    properties = parsed(schedule.properties)
    if properties is None:
        yield f"properties: expected those of an AMQP message, found {len(schedule.properties)} bytes of something else"
        return
    copies = decoded(properties, COPY_HEADERS)
    if wrong := closes_channel(properties.short("reply_to"), properties.short("expiration"), copies):
        yield wrong
    if "message_id" in properties.places:
        yield "message_id: expected none, because each occurrence gets its own, found one; put it into another header"
    if ours := _OURS.intersection(properties.names()):
        names = ", ".join(sorted(map(as_text, ours)))
        yield f"headers: expected none of delayer's own, because the rhythm says when, found {names}; leave them out"
