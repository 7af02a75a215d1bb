"""Figures and names for people."""

from __future__ import annotations

import pytest

from delayer.audit import words
from delayer.audit.rules import DESTINATIONS, RULES
from delayer.audit.words import ADVICE
from delayer.core.readable import duration, format_relative_time, instant


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0 ms"), (0.04, "40 ms"), (0.9996, "1 s"), (1.25, "1.25 s"), (9.99, "9.99 s"), (115, "115 s"), (120, "2 min"),
     (6900, "115 min"), (7200, "2 h"), (86_400, "24 h"), (90_000, "25 h"), (3_456_000, "40 d"),
     (86_400_000, "2.74 years"), (315_576_000, "10 years"), (None, "–")],
)  # fmt: skip
def test_durations(seconds: float | None, expected: str) -> None:
    assert duration(seconds) == expected


def test_instants_and_their_distance() -> None:
    assert instant(None) == "–"
    assert instant(0) == "1970-01-01T00:00:00Z"
    assert instant(1_763_769_602_481) == "2025-11-22T00:00:02Z"
    assert instant(1_763_769_602_481, exact=True) == "2025-11-22T00:00:02.481Z"
    assert (instant(-1), instant(-1, exact=True)) == ("1969-12-31T23:59:59Z", "1969-12-31T23:59:59.999Z")
    assert instant(-62_135_596_800_000) == "0001-01-01T00:00:00Z"
    assert instant(10**18) == "1000000000000000000 ms", "beyond the calendar"
    assert format_relative_time(7_200_000, 0) == "in 2 h"
    assert format_relative_time(0, 7_200_000) == "2 h ago"
    assert format_relative_time(500, 0) == "now"
    seconds = (59, 114, 120, 3_601, 180_000, 1 << 25, 1 << 26)
    assert [format_relative_time(count * 1000, 0) for count in seconds] == [
        "in 59 s", "in 1 min 54 s", "in 2 min", "in 1 h", "in 2 d 2 h", "in 1 year 23 d", "in 2 years 46 d",
    ]  # fmt: skip
    assert format_relative_time(None, 0) == ""


def test_names_are_one_printable_line() -> None:
    assert words.name(b"a\x00b\x1b[2J\n\xff") == r"a\x00b\x1b[2J\n\xff"
    assert words.name("\u202eevil") == r"\u202eevil", "no character reverses the line"
    assert words.name(b"") == "(empty)"
    assert words.destination(b"", b"q") == "queue q"
    assert words.destination(b"x", b"") == "x · (empty)"


def test_details_in_words() -> None:
    table = {"first_due_ms": 0, "drain_seconds": 115.0, "none": None, "some": [81_230_411, 2], "empty": [],
             "examples": [81_230_411, [3, 9]], "deep": {"a": 1_200, "b": [True]}, "raw": "\x00"}  # fmt: skip
    assert list(words.details(table)) == [
        ("first due", "1970-01-01T00:00:00Z"),
        ("drain", "115 s"),
        ("some", "81230411, 2"),
        ("examples", "id:81230411, id:3, id:9"),
        ("deep", "a: 1,200, b: yes"),
        ("raw", r"\x00"),
    ]


def test_every_rule_has_its_advice() -> None:
    assert set(ADVICE) == {*RULES, DESTINATIONS}
