"""The request in a message's headers."""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any

import pytest

from delayer.amqp.properties import Properties, entry, long_string
from delayer.amqp.values import Delivery
from delayer.core.delay_headers import DelayRequest
from delayer.core.retry_policy import RETRY_HEADERS
from delayer.intake.handle import read_request
from tests.unit.amqp.tables import sized, text, with_headers


def delivered(raw: bytes, body: bytes = b"") -> Delivery:
    return Delivery(1, False, b"orders.in", b"k", raw, body)


TWO_DELAYS = with_headers(
    entry(b"x-delay", b"I" + struct.pack(">i", 5)),
    text("other"),
    entry(b"x-delay", b"I" + struct.pack(">i", 9)),
    text("x-delay-key", "key"),
)


@pytest.mark.parametrize(
    ("raw", "asked"),
    [
        (TWO_DELAYS, {"headers": {b"x-delay": 5, b"x-delay-key": "key"}}),
        (b"\x42\x80" + b"\x04gzip" + b"\x04back" + b"\x04id-1", {}),
        (b"\x00\x40" + struct.pack(">Q", 77), {}),
    ],
)
def test_the_request_of_a_message(raw: bytes, asked: dict[str, Any]) -> None:
    found = Properties.parse(raw)
    expected = {"headers": {}, "properties": found, "body": b"body"} | asked
    assert read_request(delivered(raw, b"body"), found) == DelayRequest(b"orders.in", b"k", **expected)


def test_chance_is_for_dead_letters() -> None:
    raw = with_headers(entry(b"x-death", b"A" + sized(b"S" + sized(b"x"))))
    asked = read_request(delivered(raw), Properties.parse(raw))
    assert asked.headers == {b"x-death": ["x"]}
    assert 0 < asked.chance < 1
    plain = with_headers(entry(b"other", long_string(b"x")))
    assert read_request(delivered(plain), Properties.parse(plain)).chance == 0


def test_identical_messages_are_not_retried_together() -> None:
    """These messages have no id and were rejected in the same second."""
    raw = with_headers(entry(b"x-death", b"A" + sized(b"S" + sized(b"x"))))
    found = Properties.parse(raw)
    every = [delivered(raw)._replace(tag=tag) for tag in range(1, 1_001)]
    chances = sorted(read_request(one, found, RETRY_HEADERS).chance for one in every)
    assert len(set(chances)) == 1_000
    assert max(after - before for before, after in pairwise(chances)) < 0.02


@pytest.mark.parametrize(
    ("value", "copies"),
    [
        (b"A" + sized(long_string(b"k") + b"t\x01" + long_string(b"\xff")), {b"k", b"\xff"}),
        (b"A" + sized(b""), set()),
        (long_string(b"k"), set()),
        (b"F" + sized(text("k")), set()),
        (b"V", set()),
    ],
)
def test_the_keys_of_cc(value: bytes, copies: set[bytes]) -> None:
    raw = with_headers(entry(b"CC", value))
    assert read_request(delivered(raw), Properties.parse(raw)).copies == copies
