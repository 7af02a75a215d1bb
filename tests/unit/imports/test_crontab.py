"""Crontabs as schedules."""

from __future__ import annotations

from uuid import uuid4

import pytest

from delayer.amqp.properties import Properties
from delayer.core.message import Target
from delayer.imports.crontab import translate_crontab
from delayer.imports.translation import Translation
from delayer.schedule.rhythm import Cron
from delayer.schedule.schedule import SKIP, Schedule

TARGET = Target(b"jobs", b"cron")
NOW = 1_772_000_000_000


def translate(text: str, *, is_system: bool = False) -> Translation:
    result = Translation(NOW, uuid4)
    translate_crontab(result, text, TARGET, zone="Europe/Berlin", is_system=is_system)
    return result


def one(text: str, *, is_system: bool = False) -> Schedule:
    result = translate(text, is_system=is_system)
    assert result.untranslated == []
    (schedule,) = result.schedules
    return schedule


def headers(schedule: Schedule) -> dict[bytes, object]:
    return {header.name: header.value for header in Properties.parse(schedule.properties).headers_items()}


@pytest.mark.parametrize(
    ("line", "expression", "name", "body"),
    [
        ("0 7 * * 1-5 /usr/bin/report --all", "0 7 * * 1-5", "report", b"/usr/bin/report --all"),
        ("  */10\t0-23/2 1,15 jan-MAR mon,7   run  it ", "*/10 0-23/2 1,15 jan-MAR mon,7", "run", b"run  it"),
        ("@daily backup", "0 0 * * *", "backup", b"backup"),
        ("@MIDNIGHT backup", "0 0 * * *", "backup", b"backup"),
        ("@annually x", "0 0 1 1 *", "x", b"x"),
        ("5 4 * * sun A=1 B=2 ./run.sh; echo", "5 4 * * sun", "run.sh", b"A=1 B=2 ./run.sh; echo"),
        ("* * * * * date +\\%F", "* * * * *", "date", b"date +%F"),
        ("* * * * * caf\udce9", "* * * * *", "caf", b"caf\xe9"),
    ],
)
def test_a_line_of_a_user(line: str, expression: str, name: str, body: bytes) -> None:
    schedule = one(line)
    assert (schedule.rhythm, schedule.name, schedule.body) == (Cron(expression, "Europe/Berlin"), name, body)
    assert (schedule.target, schedule.catch_up, schedule.jitter_ms) == (TARGET, SKIP, 0)
    assert headers(schedule) == {}
    assert Properties.parse(schedule.properties).short("content_type") == b"text/plain"


@pytest.mark.parametrize("times", ["17 * * * *", "@hourly"])
def test_a_line_of_a_system_names_a_user(times: str) -> None:
    schedule = one(f"{times} root cd / && run-parts --report /etc/cron.hourly", is_system=True)
    assert schedule.body == b"cd / && run-parts --report /etc/cron.hourly"
    assert headers(schedule) == {b"x-cron-user": "root"}


def test_standard_input_follows_a_percent_sign() -> None:
    schedule = one("0 9 * * 1 mail -s 100\\% team%Hello,%%see you at 10\\%.")
    assert schedule.body == b"mail -s 100% team"
    assert headers(schedule) == {b"x-cron-stdin": "Hello,\n\nsee you at 10%.\n"}


def test_variables_hold_for_the_lines_behind_them() -> None:
    result = translate(
        "# a comment\n\n0 1 * * * a\nCRON_TZ=Asia/Kathmandu\n0 1 * * * b\n"
        "RANDOM_DELAY = '5'\n CRON_TZ = \"UTC\" \n0 1 * * * c\nMAILTO=me@example.org\n"
    )
    assert [(each.name, each.rhythm, each.jitter_ms) for each in result.schedules] == [
        ("a", Cron("0 1 * * *", "Europe/Berlin"), 0),
        ("b", Cron("0 1 * * *", "Asia/Kathmandu"), 0),
        ("c", Cron("0 1 * * *", "UTC"), 300_000),
    ]
    assert [where for where, _ in result.untranslated] == ["line 9"]


def test_names_are_unique() -> None:
    result = translate("@daily /bin/a 1\n@daily /usr/bin/a 2\n@daily a 3\n@daily ; x")
    assert [each.name for each in result.schedules] == ["a", "a-2", "a-3", "x"]
    assert len({each.id for each in result.schedules}) == 4


@pytest.mark.words
@pytest.mark.parametrize(
    ("text", "where", "why"),
    [
        ("@reboot start", "line 1", "@reboot: a start of a host is no time"),
        ("\nPATH=/usr/bin:/bin", "line 2", "PATH='/usr/bin:/bin': a message has no environment"),
        ("RANDOM_DELAY=soon", "line 1", "RANDOM_DELAY='soon'"),
        ("0 7 * * *", "line 1", "expected a time and a command, found '0 7 * * *'"),
        ("@daily", "line 1", "expected a time and a command"),
        ("0 25 * * * x", "line 1", "cron: hour: expected 0 to 23"),
        ("0~59 1 * * * x", "line 1", "for a random part write a fixed time and a jitter"),
        ("0 0 30 2 * x", "line 1", "this date never comes"),
        ("@fortnightly x", "line 1", "cron: expected five fields"),
        ("CRON_TZ=Mars/Olympus", "line 1", "CRON_TZ: expected an IANA name such as Europe/Berlin or UTC, found"),
        ("CRON_TZ=", "line 1", "CRON_TZ: expected an IANA name"),
        ("CRON_TZ=UTC 0 7 * * * x", "line 1", "CRON_TZ: expected an IANA name"),
    ],
)
def test_what_has_no_equal_is_named(text: str, where: str, why: str) -> None:
    result = translate(text)
    assert result.schedules == []
    ((found_where, found_why),) = result.untranslated
    assert found_where == where and why in found_why


@pytest.mark.parametrize("value", ["Mars/Olympus", "", "UTC 0 7 * * * y"])
def test_lines_in_a_zone_that_cannot_be_read_are_left_out(value: str) -> None:
    result = translate(f"CRON_TZ={value}\n@daily x\nCRON_TZ=UTC\n@daily z")
    assert [where for where, _ in result.untranslated] == ["line 1", "line 2"]
    assert [(each.name, each.rhythm) for each in result.schedules] == [("z", Cron("0 0 * * *", "UTC"))]


def test_a_line_of_a_system_without_a_command_is_named() -> None:
    ((where, why),) = translate("@daily root", is_system=True).untranslated
    assert (where, why) == ("line 1", "expected a time, a user and a command, found '@daily root'")
