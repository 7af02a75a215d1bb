"""Translates Celery beat's entries into schedules, whose messages are tasks of Celery's protocol 2. Pure.

Entries and their schedules are recognized by the names of types and attributes, so neither Celery nor the application
has to be imported. An entry that cannot be translated in full is not translated at all. Beat runs an overdue entry once
when it starts, so ``catch_up`` is once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from delayer.amqp.properties import Properties, changed, encode_headers, entry, int64, long_string
from delayer.amqp.values import SHORT_STRING
from delayer.core.delay_headers import quote_value
from delayer.core.message import Target, raw
from delayer.imports.translation import Translation
from delayer.schedule.occurrence import MESSAGE_ID
from delayer.schedule.rhythm import Cron, Every, Rhythm
from delayer.schedule.schedule import Schedule

_WEEKS: Final = {"1-7": 1, "8-14": 2, "15-21": 3, "22-28": 4, "29-31": 5}
_OPTIONS: Final = frozenset({"queue", "exchange", "routing_key", "priority", "expires"})
_MILLISECOND: Final = timedelta(milliseconds=1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class _NoEqual(ValueError):
    """A part of an entry has no equal here. The text says which."""


def translate_beat(result: Translation, entries: Mapping[str, Any], *, zone: str, queue: str) -> None:
    """Add beat's entries to ``result``: dictionaries as in ``beat_schedule``, or the objects of beat's own file.
    ``zone``: the application's ``timezone``. ``queue``: its ``task_default_queue``."""
    for name, found in entries.items():
        parts = found if isinstance(found, Mapping) else _attributes(found)
        try:
            schedule = _translate(result, name, parts, zone, queue)
        except _NoEqual as missing:
            result.refuse(name, str(missing))
        else:
            result.add(name, schedule)


def _attributes(found: object) -> Mapping[str, Any]:
    names = ("task", "schedule", "args", "kwargs", "options", "last_run_at")
    return {name: getattr(found, name, None) for name in names}


def _translate(result: Translation, name: str, parts: Mapping[str, Any], zone: str, queue: str) -> Schedule:
    task = parts.get("task")
    if not isinstance(task, str) or not task:
        raise _NoEqual(f"task: expected its name, found {quote_value(task)}")
    options = parts.get("options") or {}
    if unknown := sorted(map(str, set(options) - _OPTIONS)):
        raise _NoEqual(f"options: expected none but {', '.join(sorted(_OPTIONS))}, found {', '.join(unknown)}")
    args, kwargs = list(parts.get("args") or ()), dict(parts.get("kwargs") or {})
    try:
        body = json.dumps([args, kwargs, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}])
    except (TypeError, ValueError):
        raise _NoEqual(f"args and kwargs: expected values of JSON, found {quote_value([args, kwargs])}") from None
    return Schedule(
        result.new_id(),
        result.name_like(name),
        _target(options, queue),
        _rhythm(parts, zone, result.now_ms),
        _properties(task, args, kwargs, options),
        body.encode(),
    )


def _target(options: Mapping[str, Any], queue: str) -> Target:
    names = {name: options.get(name) for name in ("queue", "exchange", "routing_key")}
    for name, value in names.items():
        if value is not None and not isinstance(value, str):
            raise _NoEqual(f"{name}: expected a name, found {quote_value(value)}")
    if names["exchange"]:
        return Target(raw(names["exchange"]), raw(names["routing_key"] or ""))
    return Target(b"", raw(names["queue"] or names["routing_key"] or queue))


def _properties(task: str, args: object, kwargs: object, options: Mapping[str, Any]) -> bytes:
    texts = {
        b"lang": b"py", b"task": raw(task), b"id": MESSAGE_ID, b"root_id": MESSAGE_ID, b"origin": b"delayer",
        b"argsrepr": raw(repr(args)), b"kwargsrepr": raw(repr(kwargs)),
    }  # fmt: skip
    headers = b"".join(entry(name, long_string(text)) for name, text in texts.items()) + entry(b"retries", int64(0))
    short = {"content_type": b"application/json", "content_encoding": b"utf-8", "correlation_id": MESSAGE_ID}
    if (expires := options.get("expires")) is not None:
        if isinstance(expires, bool) or not isinstance(expires, int | float) or not 0 < expires < 1 << 22:
            raise _NoEqual(f"expires: expected seconds, at most 48 days, found {quote_value(expires)}")
        short["expiration"] = b"%d" % (expires * 1000)
    values = {name: bytes((len(text),)) + text for name, text in short.items()}
    if (priority := options.get("priority")) is not None:
        if type(priority) is not int or not 0 <= priority <= SHORT_STRING:
            raise _NoEqual(f"priority: expected 0 to 255, found {quote_value(priority)}")
        values["priority"] = bytes((priority,))
    return changed(Properties.parse(encode_headers(headers)), values)


def _rhythm(parts: Mapping[str, Any], zone: str, now_ms: int) -> Rhythm:
    found = parts.get("schedule")
    if getattr(found, "nowfun", None) is not None:
        raise _NoEqual("nowfun: a custom clock; a schedule has a zone instead")
    kind = type(found).__name__
    if kind == "crontab":
        return Cron(_expression(found), zone)
    if kind == "solar":
        raise _NoEqual(
            f"solar: {quote_value(getattr(found, 'event', 'an event'))} moves with the sun, and has no cron expression"
        )
    period = getattr(found, "run_every", None) if kind == "schedule" else found
    if isinstance(period, int | float) and not isinstance(period, bool):
        try:
            period = timedelta(seconds=period)
        except (OverflowError, ValueError):  # The second is for NaN.
            raise _NoEqual(f"schedule: expected a number of seconds, found {quote_value(period)}") from None
    if not isinstance(period, timedelta):
        raise _NoEqual(f"schedule: expected a crontab, a timedelta or seconds, found {kind}")
    # A relative schedule is rounded to whole units, like an interval from the epoch. Others continue from the last run.
    is_relative = getattr(found, "relative", False) or parts.get("relative")
    last = parts.get("last_run_at")
    if is_relative:
        first_ms = 0
    elif isinstance(last, datetime) and last.utcoffset() is not None:
        first_ms = (last - _EPOCH) // _MILLISECOND
    else:
        first_ms = now_ms
    return Every(period // _MILLISECOND, first_ms)


def _expression(crontab: object) -> str:
    """The cron expression of a ``crontab`` object, in which a day must match every field."""
    minute, hour, date, month, day = (
        _field(getattr(crontab, f"_orig_{name}", None))
        for name in ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
    )
    if not date.startswith("*") and not day.startswith("*"):
        date, day = "*", _weeks(date, day)
    return f"{minute} {hour} {date} {month} {day}"


def _field(value: object) -> str:
    if isinstance(value, Iterable) and not isinstance(value, str):
        value = ",".join(map(str, sorted(value) if isinstance(value, set | frozenset) else value))
    # Celery reads the first three letters of a name.
    return re.sub("([A-Za-z]{3})[A-Za-z]*", r"\1", str(value)).replace(" ", "")


def _weeks(date: str, day: str) -> str:
    """Express a date and a day of the week that must both match as the n-th such day, because cron matches either."""
    dates, days = date.split(","), day.split(",")
    if not _WEEKS.keys() >= set(dates) or not all(re.fullmatch("[0-9]|[A-Za-z]{3}", one) for one in days):
        raise _NoEqual(
            f"crontab: day_of_month {quote_value(date)} and day_of_week {quote_value(day)} must both match, which cron "
            "expresses only for whole weeks (1-7, 8-14, 15-21, 22-28, 29-31) and single days; split the entry"
        )
    return ",".join(f"{one}#{_WEEKS[week]}" for one in days for week in dates)
