"""What lists say about a message."""

from __future__ import annotations

import pytest

from delayer.amqp.properties import encode_headers, entry, int64, long_string
from delayer.format.reading import route_text, schedule_of
from delayer.schedule.schedule import SCHEDULE


def made_by(name: bytes) -> bytes:
    """The properties of a message with this name in the header."""
    return encode_headers(entry(SCHEDULE, long_string(name)))


def test_a_message_without_a_route_has_the_name_of_its_schedule() -> None:
    assert schedule_of(made_by(b"tick")) == "tick"
    assert route_text(b"", made_by(b"tick")) == "(schedule tick)"
    assert route_text(b"delayer.in", made_by(b"tick")) == "delayer.in"


@pytest.mark.parametrize(
    "properties",
    [
        *map(made_by, (b"", b"-tick", b"tick tock", b"tick)\n", b"t\0", b"\xff", b"a" * 101)),
        encode_headers(entry(SCHEDULE, int64(7)) + entry(SCHEDULE + b"x", long_string(b"tick")))[:-1],
        encode_headers(entry(b"of", long_string(SCHEDULE))),
        SCHEDULE,
    ],
)
def test_what_is_no_name_of_a_schedule_is_left_out(properties: bytes) -> None:
    """A publisher may send the header."""
    assert schedule_of(properties) == ""
    assert route_text(b"", properties, none="-") == "-"
