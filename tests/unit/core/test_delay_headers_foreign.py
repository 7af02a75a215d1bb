"""Instants as Celery and MailerQ write them."""

from __future__ import annotations

import doctest
import gzip
import json

import pytest

from delayer.core import delay_headers, levels
from delayer.core.delay_headers import LONGEST_BODY, UnreadableDelay, instant_in_json_ms, steps
from delayer.core.levels import eta_ms

AT = "/nextattempt/time"


def test_the_examples_in_the_modules_are_true() -> None:
    assert doctest.testmod(levels).failed == 0
    assert doctest.testmod(delay_headers).failed == 0


@pytest.mark.parametrize(
    ("value", "due_ms"),
    [
        ("2026-11-21T22:30:00.123456+00:00", 1_795_300_200_124),
        ("2026-11-21T22:30:00.123456", 1_795_300_200_124),
        ("2026-11-21T23:30:00+01:00", 1_795_300_200_000),
        ("2026-11-21T22:30:00Z", 1_795_300_200_000),
        ("2026-11-21 22:30:00", 1_795_300_200_000),
        (None, None),
    ],
)
def test_an_eta(value: object, due_ms: int | None) -> None:
    assert eta_ms(value) == due_ms


@pytest.mark.parametrize("value", ["", "soon", "2026-11-21", 1_795_300_200, b"\xff", True, "2026-13-21T22:30:00"])
def test_an_unreadable_eta(value: object) -> None:
    with pytest.raises(UnreadableDelay, match="expected an instant in ISO 8601, found"):
        eta_ms(value)


@pytest.mark.parametrize(
    ("body", "at", "due_ms"),
    [
        ('{"nextattempt": {"time": "2026-11-21 22:30:00"}}', AT, 1_795_300_200_000),
        ('{"nextattempt": {"time": "2026-11-21T22:30:00.5+00:00"}}', AT, 1_795_300_200_500),
        ('{"nextattempt": {"time": 1795300200000}}', AT, 1_795_300_200_000),
        ('{"nextattempt": {"time": null}}', AT, None),
        ('{"nextattempt": {}}', AT, None),
        ('{"nextattempt": 5}', AT, None),
        ('{"nextattempt": {"time": "2026-11-21 22:30:00"}}', "/nextattempt/time/more", None),
        ("{}", AT, None),
        ("[]", AT, None),
        ('["2026-11-21 22:30:00"]', "/0", 1_795_300_200_000),
        ('["2026-11-21 22:30:00"]', "/1", None),
        ('["2026-11-21 22:30:00"]', "/-1", None),
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
        (b"\xff\xfe\x00", None, "expected a JSON body"),
        (b"From: me\r\n\r\nmail", None, "expected a JSON body"),
        (b"[" * 100_000, None, "expected a JSON body"),
        (b"1" * 5_000, None, "expected a JSON body"),
        (b'{"nextattempt": {"time": "tomorrow"}}', None, "found 'tomorrow'"),
        (b'{"nextattempt": {"time": "1795300200000"}}', None, "found '1795300200000'"),
        (b'{"nextattempt": {"time": true}}', None, "found True"),
        (b'{"nextattempt": {"time": 1.5}}', None, "found 1.5"),
        (b'{"nextattempt": {"time": {}}}', None, "found {}"),
        (b"{}", b"gzip", "expected a body in gzip"),
        (gzip.compress(b"{}", mtime=0)[:-3], b"gzip", "expected a whole body in gzip"),
        (gzip.compress(b" " * (LONGEST_BODY + 1), mtime=0), b"gzip", "at most"),
    ],
)
def test_a_body_that_may_have_meant_an_instant(body: bytes, encoding: bytes | None, found: str) -> None:
    with pytest.raises(UnreadableDelay, match=found):
        instant_in_json_ms(body, AT, encoding)


def test_a_pointer_begins_with_a_slash() -> None:
    assert steps(json.loads('"/a/0/"')) == ("a", "0", "")
    with pytest.raises(ValueError, match="JSON pointer"):
        steps("nextattempt.time")
