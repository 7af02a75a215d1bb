"""Entries of Celery beat as schedules. The classes stand in for Celery's, of which only names and attributes count."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from delayer.amqp.properties import Properties
from delayer.core.message import Target
from delayer.imports.beat import translate_beat
from delayer.imports.translation import Translation
from delayer.schedule.occurrence import MESSAGE_ID, occurrence
from delayer.schedule.rhythm import Cron, Every, Rhythm
from delayer.schedule.schedule import ONCE, Schedule

NOW = 1_772_000_000_000


class crontab:  # noqa: N801
    nowfun = None

    def __init__(self, minute: Any = "*", hour: Any = "*", **days: Any) -> None:
        self._orig_minute, self._orig_hour = minute, hour
        self._orig_day_of_week = days.get("day_of_week", "*")
        self._orig_day_of_month = days.get("day_of_month", "*")
        self._orig_month_of_year = days.get("month_of_year", "*")


class schedule:  # noqa: N801
    def __init__(self, run_every: timedelta, relative: bool = False, nowfun: Any = None) -> None:
        self.run_every, self.relative, self.nowfun = run_every, relative, nowfun


class solar:  # noqa: N801
    nowfun, event, lat, lon = None, "sunrise", 52.5, 13.4


class ScheduleEntry:
    def __init__(self, **values: Any) -> None:
        self.args, self.kwargs, self.options, self.last_run_at = (), {}, {}, None
        vars(self).update(values)


def translate(**entries: Any) -> Translation:
    result = Translation(NOW, uuid4)
    translate_beat(result, entries, zone="Europe/Berlin", queue="celery")
    return result


def one(entry: object) -> Schedule:
    result = translate(entry=entry)
    assert result.untranslated == []
    return result.schedules[0]


def task(when: object, **values: Any) -> dict[str, Any]:
    return {"task": "shop.clean", "schedule": when, **values}


@pytest.mark.parametrize(
    ("when", "rhythm"),
    [
        (30.0, Every(30_000, NOW)),
        (90, Every(90_000, NOW)),
        (timedelta(hours=1.5), Every(5_400_000, NOW)),
        (schedule(timedelta(minutes=1)), Every(60_000, NOW)),
        (schedule(timedelta(hours=1), relative=True), Every(3_600_000)),
        (crontab(), Cron("* * * * *", "Europe/Berlin")),
        (crontab(0, 7, day_of_week="monday-friday"), Cron("0 7 * * mon-fri", "Europe/Berlin")),
        (crontab("*/15", {17, 9}, day_of_month=[1, 15]), Cron("*/15 9,17 1,15 * *", "Europe/Berlin")),
        (crontab(0, 0, month_of_year="*/3"), Cron("0 0 * */3 *", "Europe/Berlin")),
        (crontab(0, 0, day_of_week="sat-mon"), Cron("0 0 * * sat-mon", "Europe/Berlin")),
        (crontab(0, 0, day_of_month="*/2", day_of_week="fri"), Cron("0 0 */2 * fri", "Europe/Berlin")),
        (crontab(0, 0, day_of_month="1-7", day_of_week="mon"), Cron("0 0 * * mon#1", "Europe/Berlin")),
        (crontab(0, 0, day_of_month="1-7,15-21", day_of_week="1, thursday"),
         Cron("0 0 * * 1#1,1#3,thu#1,thu#3", "Europe/Berlin")),
    ],
)  # fmt: skip
def test_rhythms(when: object, rhythm: Rhythm) -> None:
    assert one(task(when)).rhythm == rhythm


def test_an_entry_of_the_file_goes_on_from_its_last_run() -> None:
    last = datetime.fromtimestamp(NOW / 1000 - 17, UTC)
    found = one(ScheduleEntry(task="shop.clean", schedule=schedule(timedelta(minutes=1)), last_run_at=last))
    assert found.rhythm == Every(60_000, NOW - 17_000)


def test_the_message_is_a_task() -> None:
    found = one(task(60, args=(1, "b"), kwargs={"c": None}, options={"priority": 5, "expires": 15.5}))
    parcel = occurrence(found, NOW)
    properties = Properties.parse(parcel.properties)
    own = (properties.short("message_id") or b"").decode()
    assert own and own != MESSAGE_ID.decode()
    assert {header.name.decode(): header.value for header in properties.headers_items()} == {
        "lang": "py", "task": "shop.clean", "id": own, "root_id": own, "origin": "delayer", "argsrepr": "[1, 'b']",
        "kwargsrepr": "{'c': None}", "retries": 0, "x-delayer-schedule": "entry",
    }  # fmt: skip
    assert properties.short("correlation_id") == own.encode()
    assert properties.short("content_type") == b"application/json"
    assert properties.short("content_encoding") == b"utf-8"
    assert properties.short("expiration") == b"15500"
    start, end = properties.spans["priority"]
    assert properties.raw[start:end] == b"\5"
    assert json.loads(parcel.body)[:2] == [[1, "b"], {"c": None}]
    assert found.catch_up == ONCE


@pytest.mark.parametrize(
    ("options", "target"),
    [
        ({}, Target(b"", b"celery")),
        ({"queue": "slow"}, Target(b"", b"slow")),
        ({"routing_key": "slow"}, Target(b"", b"slow")),
        ({"exchange": "tasks", "routing_key": "slow", "queue": "other"}, Target(b"tasks", b"slow")),
        ({"exchange": "tasks"}, Target(b"tasks", b"")),
    ],
)
def test_targets(options: dict[str, str], target: Target) -> None:
    assert one(task(60, options=options)).target == target


def test_names() -> None:
    found = translate(**{"shop.clean()": task(60), "every 10 s": task(10), "every:10:s": task(10)})
    assert [each.name for each in found.schedules] == ["shop.clean", "every-10-s", "every-10-s-2"]


@pytest.mark.words
@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (task(solar()), "solar: 'sunrise' moves with the sun"),
        (task(schedule(timedelta(minutes=1), nowfun=len)), "nowfun: a custom clock"),
        (task("often"), "schedule: expected a crontab, a timedelta or seconds, found str"),
        (task(True), "schedule: expected a crontab, a timedelta or seconds, found bool"),
        (task(None), "found NoneType"),
        (task(0.5), "every: expected 1s to 36500d, found 500 ms"),
        (task(crontab(0, 0, day_of_month="13", day_of_week="fri")), "must both match, which cron expresses only"),
        (task(crontab(0, 0, day_of_month="1-7", day_of_week="mon-fri")), "must both match"),
        (task(crontab(0, 25)), "cron: hour: expected 0 to 23"),
        (task(60, args=(object(),)), "args and kwargs: expected values of JSON"),
        (task(60, options={"countdown": 5, "queue": "q"}), "options: expected none but .*, found countdown"),
        (task(60, options={"queue": object()}), "queue: expected a name"),
        (task(60, options={"expires": "2031-01-01"}), "expires: expected seconds"),
        (task(60, options={"priority": "high"}), "priority: expected 0 to 255"),
        ({"schedule": 60}, "task: expected its name, found None"),
        (object(), "task: expected its name, found None"),
    ],
)
def test_what_has_no_equal_is_named(entry: object, why: str) -> None:
    result = translate(one=task(60), other=entry)
    assert [each.name for each in result.schedules] == ["one"]
    ((where, found),) = result.untranslated
    assert where == "other"
    assert re.search(why, found), found
