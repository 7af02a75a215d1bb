"""The fields of schedules, as options and files have them."""

from __future__ import annotations

from uuid import UUID

import pytest

from delayer.config.errors import Expected
from delayer.core.message import Target
from delayer.fields.schedules import FIELDS, differences, new_schedule, read_schedules, texts_of, with_fields
from delayer.format.reading import decode_properties
from delayer.schedule.occurrence import occurrence
from delayer.schedule.rhythm import Cron, Every
from delayer.schedule.schedule import MOST_CAUGHT_UP, Schedule, problems
from delayer.store.errors import ScheduleRefused

FILE = b"""
[schedule.berlin]
cron = "30 2 * * *"
zone = "Europe/Berlin"
first = 2027-01-01T00:00:00Z
last = "2030-01-01"
to = "delayer.out"
routing_key = "k"
headers = { kind = "daily", retries = 3, urgent = true }
properties = { content_type = "application/json", priority = 5 }
body = "{}"
catch_up = "all"
jitter = "5m"
max = 10

[schedule."tick.1"]
every = "1s"
to = ""
body_b64 = "AP8="
"""


HALF = "\ud800"
"""Half of a surrogate pair, as JSON may have it."""


def read(text: str) -> Schedule:
    [one] = read_schedules(text.encode())
    return one


def plain(**fields: object) -> Schedule:
    given = {"every": "1m", "to": "out", **fields}
    return new_schedule("x", {name: FIELDS[name](value) for name, value in given.items()})


@pytest.mark.parametrize("name", ["type", "content_type", "app_id", "correlation_id"])
def test_a_property_that_is_not_utf_8_is_refused(name: str) -> None:
    """An argument may have any bytes."""
    with pytest.raises(Expected, match="as UTF-8 text of at most 255 bytes"):
        plain(properties={name: "\udcff"})


def test_a_file_has_every_field() -> None:
    berlin, tick = read_schedules(FILE)
    assert berlin.rhythm == Cron("30 2 * * *", "Europe/Berlin", 1_798_761_600_000)
    assert (berlin.target, berlin.body, berlin.last_ms) == (Target(b"delayer.out", b"k"), b"{}", 1_893_456_000_000)
    assert (berlin.catch_up, berlin.jitter_ms, berlin.max_occurrences) == (MOST_CAUGHT_UP, 300_000, 10)
    said = decode_properties(berlin.properties, whole=True)
    assert said.properties == {"content_type": "application/json", "delivery_mode": 2, "priority": 5}
    assert {one.name: one.value for one in said.headers} == {"kind": "daily", "retries": 3, "urgent": True}
    assert (tick.name, tick.rhythm, tick.body) == ("tick.1", Every(1_000), b"\0\xff")
    assert [problems(one, 0) for one in (berlin, tick)] == [[], []]
    assert decode_properties(occurrence(berlin, 0).properties, whole=True).properties["priority"] == 5


def test_every_mistake_of_a_file_is_named() -> None:
    text = b"""
    other = 1
    [schedule.a]
    evry = "1s"
    to = 5
    [schedule.b]
    every = 5
    to = "x"
    [schedule.c]
    cron = "@daily"
    every = "1s"
    to = "x"
    [schedule.d]
    to = "x"
    jitter = "2d"
    [schedule."e!"]
    cron = "@daily"
    to = "x"
    body = "a"
    body_b64 = "YQ=="
    [schedule.f]
    cron = "@daily"
    zone = "Nowhere"
    to = "x"
    """
    with pytest.raises(ScheduleRefused) as refused:
        read_schedules(text)
    assert list(refused.value.problems) == [
        "other: expected nothing but tables [schedule.NAME], found it",
        "a: evry: expected a known field, found this one (did you mean every?)",
        "a: to: expected a text, found 5",
        "a: cron: expected a rhythm, by cron or every, found neither",
        'b: every: expected a duration in whole numbers such as "250ms", "10s", "5m", "12h" or "30d" (a bare number has'
        ' no unit: write "5s" or "5ms"), found 5',
        "c: cron: expected cron or every, found both",
        "d: cron: expected a rhythm, by cron or every, found neither",
        "d: jitter: expected 0 to 86400000 ms, less than an interval and at most a day, found 172800000 ms",
        "e!: body: expected body or body_b64, found both",
        "e!: name: expected 1 to 100 letters, digits, dots, dashes and underscores, the first a letter or a digit, "
        "found 'e!'",
        "f: zone: expected an IANA name such as Europe/Berlin or UTC, found 'Nowhere'",
    ]


@pytest.mark.parametrize(
    "text", ["schedule = 1", "[schedule]\na = 1", "a = [", "\xff", "a = " + "9" * 5_000, "a = " + "[" * 100_000]
)
def test_what_is_no_file_of_schedules_is_refused(text: str) -> None:
    with pytest.raises(ScheduleRefused, match="expected"):
        read_schedules(text.encode("latin-1"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max", -1), ("max", True), ("max", 10**19), ("max", "9" * 5_000), ("catch_up", "never"), ("catch_up", [1]),
        ("body_b64", "?"), ("headers", {"a": [1]}), ("first", "soon"), ("every", 10**400), ("jitter", float("inf")),
        ("to", HALF), ("zone", HALF), ("body", HALF), ("headers", {HALF: 1}), ("headers", {"a": HALF}),
        ("properties", {"type": HALF}),
        ("properties", {"user_id": "x"}), ("properties", {"priority": 256}),
        ("properties", {"type": "x" * 256}), ("properties", 1), ("headers", 1),
    ],
)  # fmt: skip
def test_wrong_values_are_refused(field: str, value: object) -> None:
    with pytest.raises(Expected):
        FIELDS[field](value)


def test_an_edit_changes_what_was_given() -> None:
    before = plain(headers={"a": 1}, properties={"type": "t"}, body="b", routing_key="k", last="2030-01-01", max="3")
    for name, value in {
        "every": 5_000, "first": 7, "last": None, "to": "other", "routing_key": "q", "body": b"c", "catch_up": 0,
        "jitter": 9, "max": 0,
    }.items():  # fmt: skip
        after = with_fields(before, {name: value})
        assert [field for field, *_ in differences(before, after)] == [name]
        assert with_fields(after, {name: value}) == after
    assert with_fields(before, {"cron": "@daily"}).rhythm == Cron("@daily", "UTC", 0)
    berlin = with_fields(before, {"cron": "@daily", "zone": "Europe/Berlin"})
    assert with_fields(berlin, {"cron": "@hourly"}).rhythm == Cron("@hourly", "Europe/Berlin", 0)
    assert with_fields(berlin, {"every": 1_000}).rhythm == Every(1_000)
    with pytest.raises(ScheduleRefused, match="zone"):
        with_fields(before, {"zone": "UTC"})
    assert before.id != plain().id != UUID(int=0)


def test_an_edit_replaces_all_headers_and_single_properties() -> None:
    before = plain(headers={"a": 1, "b": "x"}, properties={"type": "t", "app_id": "app"})
    after = with_fields(before, {"headers": {"c": 2}, "properties": {"type": "", "content_type": "text/plain"}})
    said = decode_properties(after.properties, whole=True)
    assert said.properties == {"content_type": "text/plain", "delivery_mode": 2, "app_id": "app"}
    assert [(one.name, one.value) for one in said.headers] == [("c", 2)]
    assert not decode_properties(with_fields(after, {"headers": {}}).properties, whole=True).headers


def test_a_file_of_the_same_fields_makes_the_same_schedule() -> None:
    by_options = plain(headers={"n": 3}, properties={"priority": "5"}, catch_up="7", body="é")
    by_file = read(
        '[schedule.x]\nevery="1m"\nto="out"\nheaders={n=3}\nproperties={priority=5}\ncatch_up=7\nbody="é"\nrouting_key=""'
    )
    assert not [*differences(by_options, by_file)]
    assert by_options.properties == by_file.properties
    assert texts_of(by_file) == {
        "every": "1m", "to": "out", "headers": '{"n": 3}', "properties": '{"priority": 5}', "body": "é",
        "catch_up": "7",
    }  # fmt: skip


def test_a_difference_that_texts_do_not_show_is_named() -> None:
    long = plain(body="x" * 1_000)
    [difference] = differences(long, with_fields(long, {"body": b"x" * 999 + b"y"}))
    assert difference == ("body", "1000 bytes", "1000 other bytes")
    one = plain(headers={"n": 1})
    [difference] = differences(one, with_fields(one, {"headers": {"n": 1.0}}))
    assert difference[0] == "headers"
