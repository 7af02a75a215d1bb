"""Schedules: what is wrong with them, and their messages."""

from __future__ import annotations

import re
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayer.amqp.properties import Properties, encode_headers, entry, long_string
from delayer.core.message import Target
from delayer.core.units import LATEST_MS
from delayer.schedule.occurrence import MESSAGE_ID, due_ms, message_id, occurrence
from delayer.schedule.rhythm import Cron, Every
from delayer.schedule.schedule import next_time, problems
from tests.unit.schedule.scene import ms, schedule

NOW = ms("2026-03-28T12:00Z")
MINUTE = 60_000
HOUR = 60 * MINUTE


def header(name: bytes, value: bytes = b"x") -> bytes:
    return encode_headers(entry(name, long_string(value)))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"name": "a"},
        {"name": "Billing.night_2-b"},
        {"rhythm": Every(1_000, NOW + 500)},
        {"rhythm": Cron("0 30 2 * * MON-FRI", "Europe/Berlin")},
        {"rhythm": Cron("@daily", "Asia/Kathmandu"), "last_ms": NOW + 86_400_000, "jitter_ms": 86_400_000},
        {"rhythm": Cron("0 0 29 2 MON#5"), "max_occurrences": 1},
        {"target": Target(b"", b"orders")},
        {"rhythm": Every(HOUR, LATEST_MS), "max_occurrences": (1 << 63) - 1},
        {"catch_up": 0},
        {"catch_up": 1_000},
        {"properties": b"\0\0"},
        {"properties": header(b"x-tenant")},
        {"body": b""},
    ],
)
def test_a_sound_schedule_has_no_problems(values: dict[str, Any]) -> None:
    assert problems(schedule(**values), NOW) == []


@pytest.mark.words
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"name": ""}, "name: expected 1 to 100 letters, digits, dots, dashes and underscores, .* found ''"),
        ({"name": "-a"}, "name: .* found '-a'"),
        ({"name": "a/b"}, "name: "),
        ({"name": "ä"}, "name: "),
        ({"name": "a\n"}, "name: "),
        ({"name": "a" * 101}, "name: "),
        ({"rhythm": Every(0)}, "every: expected 1s to 36500d, found 0 ms"),
        ({"rhythm": Every(999)}, "every: .* found 999 ms"),
        ({"rhythm": Every(-1_000)}, "every: "),
        ({"rhythm": Every(36_501 * 86_400_000)}, "every: "),
        ({"rhythm": Cron("0 24 * * *")}, "cron: hour: expected 0 to 23, .* found '24'"),
        ({"rhythm": Cron("0 0 30 2 *")}, "cron: day-of-month: .* this date never comes"),
        ({"rhythm": Cron("@daily", "Europe/Belin")}, "zone: expected an IANA name .* did you mean Europe/Berlin"),
        ({"rhythm": Cron("0 0 */31 * MON#5")}, "last: .* found none \\(no such date within fifty years\\)"),
        ({"last_ms": NOW - 1}, "last: expected a time .* found none \\(its last is 2026-03-28T11:59:59Z\\)"),
        ({"rhythm": Cron("@daily", first_ms=NOW + 1_000), "last_ms": NOW + 2_000}, "last: "),
        ({"jitter_ms": -1}, "jitter: expected 0 to "),
        ({"rhythm": Every(1_000), "jitter_ms": 1_000}, "jitter: expected 0 to 999 ms"),
        ({"rhythm": Cron("@weekly"), "jitter_ms": 86_400_001}, "jitter: "),
        ({"catch_up": -1}, "catch_up: expected skip, once, all, or a number of at most 1000, found -1"),
        ({"catch_up": 1_001}, "catch_up: "),
        ({"max_occurrences": 0}, "max: expected 1 to 9223372036854775807 occurrences, found 0"),
        ({"max_occurrences": 1 << 63}, "max: .* found 9223372036854775808"),
        ({"rhythm": Every(1_000, -1)}, "first: expected an instant of the years 1970 to 9999, found 1969-12-31T23:59"),
        ({"rhythm": Cron("@daily", first_ms=LATEST_MS + 1)}, "first: .* found 253402300800000 ms"),
        ({"last_ms": LATEST_MS + 1}, "last: expected an instant of the years 1970 to 9999"),
        ({"rhythm": Every(HOUR, LATEST_MS), "jitter_ms": 1}, "last: expected a time of the rhythm .* found none"),
        ({"target": Target(b"x" * 256, b"")}, "exchange: expected at most 255 bytes, found 256"),
        ({"target": Target(b"", b"x" * 256)}, "routing_key: "),
        ({"target": Target(b"", b"amq.rabbitmq.reply-to.x")}, "routing_key: expected a queue that stays"),
        ({"properties": b"\xff"}, "properties: expected those of an AMQP message"),
        ({"properties": b"\0\x80\3abc"}, "message_id: expected none, because each occurrence gets its own"),
        ({"properties": b"\x02\x00\x15amq.rabbitmq.reply-to"}, "reply_to: expected a queue, found the direct reply"),
        (
            {"properties": b"\x01\x00\x021s"},
            "expiration: expected 0 to 315360000000 milliseconds in digits, found '1s'",
        ),
        ({"properties": header(b"CC")}, "CC: expected an array of routing keys, found 'x'"),
        ({"properties": header(b"x-delay")}, "headers: expected none of delayer's own, .* found x-delay; leave"),
        ({"properties": header(b"x-delayer-schedule")}, "headers: "),
    ],
)
def test_each_problem_names_field_and_value(values: dict[str, Any], words: str) -> None:
    (found,) = problems(schedule(**values), NOW)
    assert re.match(words, found), found


def test_no_occurrence_is_due_beyond_the_calendar() -> None:
    one = schedule(rhythm=Every(HOUR, LATEST_MS - HOUR), jitter_ms=1)
    assert next_time(one, NOW) == LATEST_MS - HOUR
    assert next_time(one, LATEST_MS - HOUR) is None


def test_all_problems_are_listed() -> None:
    wrong = schedule(name="", rhythm=Cron("* *", "Nowhere"), catch_up=-1, properties=b"")
    assert [one.split(":")[0] for one in problems(wrong, NOW)] == ["name", "cron", "zone", "catch_up", "properties"]


def test_an_occurrence_is_the_message_with_its_id_and_its_schedule() -> None:
    none = b"00000000-0000-0000-0000-000000000000"
    base = encode_headers(entry(b"id", long_string(MESSAGE_ID)) + entry(b"x-tenant", long_string(none)))
    parcel = occurrence(schedule(properties=base), NOW)
    own = message_id(UUID(int=47), NOW).encode()
    properties = Properties.parse(parcel.properties)
    assert [(one.name, one.content) for one in properties.headers_items()] == [
        (b"id", own), (b"x-tenant", none), (b"x-delayer-schedule", b"tick"),
    ]  # fmt: skip
    assert properties.short("message_id") == own
    assert parcel.target == Target(b"delayer.out", b"k") == (parcel.exchange, parcel.routing_key)
    assert (parcel.body, parcel.due_ms) == (b"tick", NOW)


def test_an_occurrence_of_a_message_without_properties() -> None:
    properties = Properties.parse(occurrence(schedule(properties=b"\0\0"), NOW).properties)
    assert list(properties.places) == ["headers", "message_id"]


@given(st.integers(0, 1 << 42), st.integers(0, 86_400_000), st.uuids())
def test_jitter_only_adds_and_is_the_same_for_all(at_ms: int, jitter_ms: int, id: UUID) -> None:
    one = schedule(id=id, jitter_ms=jitter_ms)
    assert at_ms <= due_ms(one, at_ms) <= at_ms + jitter_ms
    assert occurrence(one, at_ms) == occurrence(schedule(id=UUID(str(id)), jitter_ms=jitter_ms), at_ms)


def test_jitter_spreads_over_its_whole_length() -> None:
    late = [due_ms(schedule(jitter_ms=9), at * MINUTE) - at * MINUTE for at in range(1_000)]
    assert set(late) == set(range(10))
    assert max(late.count(one) for one in range(10)) < 150


def test_ids_differ_by_schedule_and_time() -> None:
    ids = {message_id(UUID(int=schedule), at) for schedule in range(10) for at in range(10)}
    assert len(ids) == 100
