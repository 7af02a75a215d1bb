"""Delays and instants, ours and those of Celery and MailerQ: difficult input in tables, and laws."""

from __future__ import annotations

import gzip
import json
import math
import random
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayer.amqp.values import Timestamp
from delayer.broker.consumer import BATCH_BYTES
from delayer.core.delay_headers import (
    UnreadableDelay,
    in_words,
    quote_value,
    read_delay_ms,
    read_eta_ms,
    read_instant_ms,
    whole_seconds_until,
)
from delayer.core.delay_sources import LONGEST_BODY, PACKED, SHORT_BODY, instant_in_json_ms, steps

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MS = timedelta(milliseconds=1)
AT = "/nextattempt/time"


@pytest.mark.parametrize(
    ("said", "delay_ms"),
    [
        (0, 0), (-(1 << 63), -(1 << 63)), ((1 << 64) - 1, (1 << 64) - 1),
        (-0.0, 0), (0.25, 1), (-0.25, 0), (-1.5, -1), (5e-324, 1),
        (1e30, 10**30 + 19884624838656),  # the float's exact value, not rounded to fewer digits
        ("0", 0), ("+5", 5), ("-5", -5), ("007", 7), ("1500.0000000000000000000001", 1501), ("9" * 30, 10**30 - 1),
        (Decimal("1.2"), 2), (Decimal(1).scaleb(-255), 1),
    ],
    ids=repr,
)  # fmt: skip
def test_a_relative_delay_is_read(said: object, delay_ms: int) -> None:
    assert read_delay_ms(said) == delay_ms


NOT_A_NUMBER: list[object] = [
    None, True, b"1500", "", " 5", "5\n", "5_000", "1e3", "0x10", ".5", "5.", "NaN", "9" * 31, "1." + "9" * 31, [5],
    "٣",  # str.isdigit() and int() accept this digit
    math.nan, math.inf, Decimal("NaN"), Decimal("sNaN"), Timestamp(5),
]  # fmt: skip


@pytest.mark.parametrize("said", NOT_A_NUMBER, ids=repr)
def test_a_relative_delay_is_unreadable(said: object) -> None:
    with pytest.raises(
        UnreadableDelay, match="expected milliseconds as an integer, a numeric string or a float, found"
    ):
        read_delay_ms(said)


@pytest.mark.parametrize(
    ("said", "due_ms"),
    [
        (0, 0), (-5, -5), (1_700_000_000_123, 1_700_000_000_123),
        (Timestamp(0), 0), (Timestamp(1_700_000_000), 1_700_000_000_000),
        (Timestamp((1 << 64) - 1), ((1 << 64) - 1) * 1000),
        ("1970-01-01T00:00:00Z", 0), ("1970-01-01t00:00:00z", 0), ("1970-01-01 00:00:01Z", 1000),
        ("1970-01-01T01:00:00+01:00", 0), ("1969-12-31T23:59:00-00:01", 0), ("1970-01-02T23:59:00+23:59", 86_400_000),
        ("1969-12-31T23:59:59.9991Z", 0), ("1970-01-01T00:00:00.1Z", 100), ("1970-01-01T00:00:00.1230001Z", 124),
        ("1970-01-01T00:00:00.000000001Z", 1), ("1970-01-01T00:00:00.9999Z", 1000),
        ("2016-12-31T23:59:60Z", 1_483_228_800_000),  # a leap second is the first instant of the next minute
        ("2016-12-31T23:59:60.5Z", 1_483_228_800_500),
        ("2026-03-29T01:59:59+01:00", 1_774_745_999_000),  # clocks go forward after this second
        ("2026-03-29T03:00:00+02:00", 1_774_746_000_000),  # this is the next second
        ("2026-10-25T02:30:00+02:00", 1_792_888_200_000),  # this half hour occurs twice
        ("2026-10-25T02:30:00+01:00", 1_792_891_800_000),  # the offset distinguishes them
        ("0000-01-01T00:00:00Z", -62_167_219_200_000),
        ("9999-12-31T23:59:59.999Z", 253_402_300_799_999),
        ("9999-12-31T23:59:59-23:59", 253_402_387_139_000),
    ],
    ids=repr,
)  # fmt: skip
def test_an_instant_is_read(said: object, due_ms: int) -> None:
    assert read_instant_ms(said) == due_ms


@pytest.mark.parametrize(
    "said",
    [
        *(one for one in NOT_A_NUMBER if not isinstance(one, Timestamp)),
        "1700000000000",  # seconds or milliseconds?
        1700000000.5,
        *(
            f"2024-01-01{rest}"
            for rest in (
                "", "T00:00:00", "T00:00Z", "T00:00:00.Z", "T00:00:00 Z", "T00:00:00+0100", "T00:00:00+24:00",
                "T00:00:00Z\n", "_00:00:00Z", "T24:00:00Z", "T00:60:00Z", "T00:00:61Z", "T00:00:00.٣Z",
                "T00:00:00." + "1" * 31 + "Z",
            )
        ),
        "-2024-01-01T00:00:00Z",
        "٢٠٢٤-01-01T00:00:00Z",
    ],
    ids=repr,
)  # fmt: skip
def test_an_instant_is_unreadable(said: object) -> None:
    with pytest.raises(UnreadableDelay, match="expected an instant as integer epoch milliseconds"):
        read_instant_ms(said)


offsets = st.integers(-(23 * 60 + 59), 23 * 60 + 59).map(lambda minutes: timezone(timedelta(minutes=minutes)))


@given(st.datetimes(min_value=datetime(1, 1, 3), max_value=datetime(9999, 12, 29)), offsets)  # noqa: DTZ001
def test_instants_equal_those_of_datetime_rounded_up(naive: datetime, zone: timezone) -> None:
    instant = naive.replace(tzinfo=zone)
    assert read_instant_ms(instant.isoformat()) == -((EPOCH - instant) // MS)


@given(st.integers(0, 9999), st.integers(1, 12), st.integers(1, 31))
def test_days_that_do_not_exist_are_unreadable(year: int, month: int, day: int) -> None:
    text = f"{year:04}-{month:02}-{day:02}T00:00:00Z"
    # The calendar repeats after 400 years, and datetime has no year 0.
    try:
        expected = (datetime(year or 400, month, day, tzinfo=UTC) - EPOCH) // MS - (0 if year else 146_097 * 86_400_000)
    except ValueError:
        with pytest.raises(UnreadableDelay):
            read_instant_ms(text)
    else:
        assert read_instant_ms(text) == expected


@given(st.floats(allow_nan=False, allow_infinity=False) | st.decimals(allow_nan=False, allow_infinity=False, places=9))
def test_rounding_goes_up_by_less_than_a_millisecond(said: float | Decimal) -> None:
    assert 0 <= read_delay_ms(said) - Fraction(said) < 1


@given(st.decimals(-(10**20), 10**20, places=12))
def test_a_numeric_string_equals_its_number(number: Decimal) -> None:
    assert read_delay_ms(f"{number:f}") == math.ceil(number)


@given(st.integers(), st.integers())
def test_whole_seconds_are_rounded_down(due_ms: int, now_ms: int) -> None:
    seconds = whole_seconds_until(due_ms, now_ms)
    assert seconds >= 0
    assert now_ms + seconds * 1000 <= max(due_ms, now_ms)
    assert now_ms + seconds * 1000 > due_ms - 1000


@given(st.one_of(st.none(), st.booleans(), st.text(), st.binary(), st.lists(st.text()), st.floats(), st.integers()))
def test_values_in_errors_are_short_and_printable(value: object) -> None:
    text = quote_value(value)
    assert len(text) <= 60
    assert text.isascii()
    assert text.isprintable()


@pytest.mark.parametrize(
    ("milliseconds", "words"),
    [
        (0, "0 s"), (59_999, "59.999 s"), (60_000, "0:01:00"), (315_360_000_000, "3650 days"),
        (315_360_000_001, "3650 days, 0:00:01"), (31_556_908_799_994, "365242 days"),
        (10**30, f"{10**30 // 86_400_000} days"),
    ],
)  # fmt: skip
def test_a_delay_in_words(milliseconds: int, words: str) -> None:
    assert in_words(milliseconds) == words


# Instants of Celery and MailerQ.


@pytest.mark.parametrize(
    ("value", "due_ms"),
    [
        ("2026-11-21T22:30:00.123456+00:00", 1_795_300_200_124), ("2026-11-21T22:30:00.123456", 1_795_300_200_124),
        ("2026-11-21T23:30:00+01:00", 1_795_300_200_000), ("2026-11-21T22:30:00Z", 1_795_300_200_000),
        ("2026-11-21 22:30:00", 1_795_300_200_000), (None, None),
    ],
)  # fmt: skip
def test_an_eta(value: object, due_ms: int | None) -> None:
    assert read_eta_ms(value) == due_ms


@pytest.mark.parametrize("value", ["", "soon", "2026-11-21", 1_795_300_200, b"\xff", True, "2026-13-21T22:30:00"])
def test_an_unreadable_eta(value: object) -> None:
    with pytest.raises(UnreadableDelay, match="expected an instant in ISO 8601, found"):
        read_eta_ms(value)


@pytest.mark.parametrize(
    ("body", "at", "due_ms"),
    [
        ('{"nextattempt": {"time": "2026-11-21 22:30:00"}}', AT, 1_795_300_200_000),
        ('{"nextattempt": {"time": "2026-11-21T22:30:00.5+00:00"}}', AT, 1_795_300_200_500),
        ('{"nextattempt": {"time": 1795300200000}}', AT, 1_795_300_200_000),
        ('{"nextattempt": {"time": null}}', AT, None),
        ('{"nextattempt": 5}', AT, None),
        ('{"nextattempt": {"time": "2026-11-21 22:30:00"}}', "/nextattempt/time/more", None),
        ("{}", AT, None),
        ('["2026-11-21 22:30:00"]', "/0", 1_795_300_200_000),
        ('["2026-11-21 22:30:00"]', "/1", None),
        ('"2026-11-21 22:30:00"', "", 1_795_300_200_000),
        ('{"": 7}', "/", 7),
        ('{"a/b": {"~": 7}}', "/a~1b/~0", 7),
        ('{"time": 1, "time": 2}', "/time", 2),
    ],
)
def test_an_instant_in_a_body(body: str, at: str, due_ms: int | None) -> None:
    assert instant_in_json_ms(body.encode(), at) == due_ms
    assert instant_in_json_ms(gzip.compress(body.encode()), at, b"GZIP") == due_ms


@pytest.mark.parametrize(
    ("body", "encoding", "found"),
    [
        (b"", None, "expected a JSON body"),
        (b"From: me\r\n\r\nmail", None, "expected a JSON body"),
        (b"[" * 100_000, None, "expected a JSON body"),
        (b"1" * 5_000, None, "expected a JSON body"),
        (b'{"nextattempt": {"time": "tomorrow"}}', None, "found 'tomorrow'"),
        (b'{"nextattempt": {"time": "1795300200000"}}', None, "found '1795300200000'"),
        (b'{"nextattempt": {"time": true}}', None, "found True"),
        (b'{"nextattempt": {"time": {}}}', None, "found {}"),
        (b"{}", b"gzip", "expected a body in gzip"),
        (gzip.compress(b"{}", mtime=0)[:-3], b"gzip", "expected a whole body in gzip"),
        (
            gzip.compress(random.Random(1).randbytes(LONGEST_BODY // 2).hex().encode() + b" ", 1, mtime=0),
            b"gzip",
            "at most",
        ),
        (gzip.compress(b"[]" * (1 << 20), mtime=0), b"gzip", "at most"),
        (b"[" + b"[]," * 9_000_000 + b"1]", None, f"expected a JSON body of at most {LONGEST_BODY} bytes, found 27000"),
    ],
)
def test_an_unreadable_body_is_an_error(body: bytes, encoding: bytes | None, found: str) -> None:
    with pytest.raises(UnreadableDelay, match=found):
        instant_in_json_ms(body, AT, encoding)


def test_a_small_packed_body_is_never_read_as_a_large_one() -> None:
    """A batch has up to 2,000 bodies of a hundred bytes, and all of them are read before anything else."""
    body = gzip.compress(b"[" + b"[]," * 2_000 + b"1]", mtime=0)
    assert len(body) < 110
    with pytest.raises(UnreadableDelay, match="a whole body in gzip of at most"):
        instant_in_json_ms(body, AT, b"gzip")
    worst = BATCH_BYTES * PACKED + LONGEST_BODY + 2_000 * SHORT_BODY
    assert worst < 30 << 20, "four seconds"


def test_a_pointer_begins_with_a_slash() -> None:
    assert steps(json.loads('"/a/0/"')) == ("a", "0", "")
    with pytest.raises(ValueError, match="JSON pointer"):
        steps("nextattempt.time")
