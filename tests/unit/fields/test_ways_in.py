"""A header that is written as JSON has the same bytes by every way in."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from typing import Any

import pytest

from delayer.amqp.properties import Properties
from delayer.cli.send import Composer, Draft
from delayer.config.model import Settings
from delayer.config.texts import typed_header
from delayer.fields.compose import compose
from delayer.fields.schedules import new_schedule, read_fields
from delayer.format.from_json import encode_value
from delayer.format.inbox import delivery_of_row
from delayer.format.refusal import RetryEdits
from delayer.http.api_messages import NewMessage

SETTINGS = Settings.model_validate({"mode": "native", "route": [{"from": "in", "to": "out"}]})


def by_sql(text: str) -> bytes:
    row = {"exchange": "in", "routing_key": "", "headers": f'{{"h": {text}}}', "properties": "{}", "body": b""}
    return delivery_of_row(1, row).properties


def by_http(text: str) -> bytes:
    new = NewMessage.model_validate_json(f'{{"headers": {{"h": {text}}}}}')
    return compose(SETTINGS, new, 0, new.properties).properties


def by_send(text: str) -> bytes:
    draft = Draft.model_construct().with_line(f'{{"headers": {{"h": {text}}}}}'.encode())
    return Composer(SETTINGS).compose(draft, 0).properties


def by_option(text: str) -> bytes:
    kind = type(json.loads(text)).__name__
    name, value = typed_header(f"h:{kind}={text}")
    return Composer(SETTINGS).compose(Draft.model_construct(headers={name: value}), 0).properties


def _of_schedule(fields: dict[str, Any]) -> bytes:
    given, unread = read_fields({"every": "1h", "to": "out", **fields})
    return new_schedule("s", given, unread).properties


def by_schedule(text: str) -> bytes:
    return _of_schedule({"headers": json.loads(f'{{"h": {text}}}')})


def by_schedules_file(text: str) -> bytes:
    return _of_schedule(tomllib.loads(f"headers = {{h = {text}}}"))


def by_retry(text: str) -> bytes:
    return RetryEdits.of(None, {"h": json.loads(text)}, (), {}).headers[b"h"].removeprefix(b"\x01h")


@pytest.mark.parametrize("way", [by_sql, by_http, by_send, by_option, by_schedule, by_schedules_file])
@pytest.mark.parametrize(
    ("text", "encoded"),
    [
        ("0.1", "64 3fb999999999999a"),
        ("1e300", "64 7e37e43c8800759c"),
        ("1", "6c 0000000000000001"),
        ("9223372036854775807", "6c 7fffffffffffffff"),
        ("-9223372036854775808", "6c 8000000000000000"),
        ("true", "74 01"),
    ],
)
def test_a_header_has_the_same_bytes_by_every_way_in(way: Callable[[str], bytes], text: str, encoded: str) -> None:
    header = Properties.parse(way(text)).get(b"h")
    assert header is not None
    assert header.type_and_value == bytes.fromhex(encoded) == by_retry(text)


def test_a_double_that_postgresql_prints_as_an_integer_stays_a_double() -> None:
    header = Properties.parse(by_sql(f"{10**300}")).get(b"h")
    assert header is not None
    assert header.type_and_value == encode_value(1e300)
