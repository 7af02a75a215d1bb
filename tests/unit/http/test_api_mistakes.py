"""Messages over HTTP that are wrong, or more than the daemon reads: each is a problem, and nothing is sent."""

from __future__ import annotations

import json

import pytest

from delayer.http import api_messages, endpoints
from tests.unit.http.inside import served
from tests.unit.http.test_api import JSON, daemon, send, send_lines

WRONG: dict[str, tuple[int, str]] = {
    "": (400, "the whole body: expected JSON, found a mistake at line 1 column 1: EOF"),
    "{": (400, "expected JSON, found a mistake at line 1 column 1: EOF"),
    '{"body": "\\ud800"}': (400, "expected JSON, found a mistake at line 1 column 17: unexpected end of hex escape"),
    '{"routing_key": "hello", "delay": "1s", }': (400, "found a mistake at line 1 column 41: trailing comma"),
    "[" * 10_000: (400, "expected JSON, found a mistake at line 1 column 202: recursion limit exceeded"),
    "[]": (422, "the whole body: expected an object, found a list of 0"),
    '{"dely": 1}': (
        422,
        'Body: unknown field "dely"; did you mean "delay"? Expected one of exchange, routing_key, delay',
    ),
    '{"delay": "soon"}': (422, 'delay: expected a duration in whole numbers such as "250ms"'),
    '{"delay": "-1s"}': (422, 'delay: expected a duration in whole numbers, not negative, such as "250ms"'),
    '{"delay": -1}': (422, "delay: expected a delay in whole milliseconds, not negative, or a duration"),
    '{"delay": 30.5}': (422, "delay: expected a delay in whole milliseconds, not negative, or a duration"),
    '{"delay": true}': (422, "delay: expected a delay in whole milliseconds"),
    '{"key": "k", "key_mode": "debounce", "delay": 1}': (
        422,
        "Body: key_ceiling: expected a duration, because key_mode is debounce, found none.",
    ),
    '{"due": "tomorrow"}': (422, "due: expected an instant with its offset"),
    '{"due": "0001-01-01T00:00:00Z"}': (422, "due: expected an instant"),
    '{"due": 1700000000}': (422, "due: the daemon would refuse it: "),
    '{"delay": 1, "due": 1}': (422, "delay, due: expected one of delay, due, found delay and due"),
    '{"delay": 1, "due": 1, "body": "a", "body_b64": ""}': (422, "found delay and due; and 1 more."),
    '{"body": "a", "body_json": null}': (422, "found body and body_json"),
    '{"body_json": NaN}': (422, "body_json: expected a finite number"),
    '{"body_json": [1e999]}': (422, "body_json: expected a finite number"),
    '{"body_b64": "a"}': (422, 'body_b64: expected base64, found "a"'),
    '{"body": 1}': (422, "body: expected a string, found 1"),
    '{"key_mode": "x"}': (422, "key_mode: expected 'replace', 'keep' or 'debounce', found \"x\""),
    '{"key": ""}': (422, 'key: expected at least 1 character, found ""'),
    '{"headers": {"a": null}}': (422, 'headers: expected a string, a number, true or false for "a", found nothing'),
    '{"headers": {"a": [1]}}': (422, 'headers: expected a string, a number, true or false for "a", found a list of 1'),
    '{"headers": {"a": 1e999}}': (422, "headers: expected a finite number"),
    '{"headers": {"a": 9223372036854775808}}': (422, "headers: expected an integer of 64 bits"),
    '{"headers": {"x-delay": 1}, "delay": 1}': (
        422,
        "headers: expected the delay once, as a field or in a header, found it also in x-delay",
    ),
    '{"headers": {"x-dealy": 1}}': (422, "Body: headers: the daemon would refuse it: "),
    '{"headers": {"x-delay": "soon"}}': (422, "headers: the daemon would refuse it: x-delay"),
    '{"body": {}}': (422, "body: expected a string, found an object"),
    '{"routing_key": "%s"}' % ("ü" * 128): (422, "routing_key: expected at most 255 bytes, found 256"),
    '{"exchange": "delayer.out"}': (422, "exchange: expected one that a route comes from"),
    '{"exchange": "strict.in"}': (422, "delay: the daemon would refuse it: "),
    '{"key": "k", "delay": 1}': (
        422,
        "Body: key: the daemon would refuse it: x-delay-key: keys and cancels need a store, but none is configured.",
    ),
    '{"priority": 256}': (422, "priority: expected less than or equal to 255, found 256"),
    '{"priority": "a"}': (422, 'priority: expected a whole number, found "a"'),
    '{"expiration": 1000}': (422, 'expiration: expected milliseconds in a string, such as "1000", found 1000'),
    '{"expiration": "1s"}': (422, "the daemon would refuse it: expiration: expected 0 to 315360000000 milliseconds"),
    '{"expiration": "1s", "headers": {"x-delay-cancel": "k"}}': (
        422,
        "the daemon would refuse it: expiration: expected",
    ),
    '{"headers": {"CC": "a"}}': (422, "Body: headers: the daemon would refuse it: "),
    '{"reply_to": "amq.rabbitmq.reply-to"}': (422, "the daemon would refuse it: reply_to: expected a queue"),
    '{"user_id": "guest"}': (422, 'unknown field "user_id". Expected one of'),
    json.dumps({f"{n}": 0 for n in range(101)}): (422, "the whole body: expected at most 100 names, found 101"),
    json.dumps({"headers": {f"{n}": 0 for n in range(101)}}): (422, "headers: expected at most 100 names, found 101"),
}


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text[:60])
async def test_a_wrong_message_is_a_problem_and_is_not_sent(text: str) -> None:
    inside = daemon()
    status, says = WRONG[text]
    async with served(inside) as web:
        answer = await web.ask("POST", "/api/messages", text.encode(), JSON)
    assert (answer.status, answer.headers["content-type"]) == (status, "application/problem+json"), answer.text
    assert says in answer.json["detail"] and answer.json["errors"], answer.text
    assert "nput should" not in answer.text and answer.json["next"], answer.text
    assert all(one["found"] and "found" not in one["expected"] for one in answer.json["errors"]), answer.text
    assert inside.sent == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/messages"),
        ("PATCH", "/api/messages?key=k"),
        ("POST", "/api/schedules"),
        ("PUT", "/api/schedules/a"),
        ("PATCH", "/api/schedules/a"),
    ],
)
async def test_json_of_too_many_values_is_not_parsed(method: str, path: str) -> None:
    inside = daemon()
    text = b'{"body_json": [' + b",".join([b"[]"] * (endpoints.MOST_MARKS // 2 + 1)) + b"]"  # Without its end.
    async with served(inside) as web:
        answer = await web.ask(method, path, text, JSON)
        [wrong] = answer.json["errors"]
        assert (answer.status, wrong["where"]) == (422, "the whole body"), answer.text
        assert "characters [ { , : outside strings" in wrong["expected"] and "`body_b64`" in answer.json["next"]
    assert inside.sent == []


async def test_each_line_has_few_values() -> None:
    inside = daemon()
    large = {"body_json": [0] * endpoints.MOST_MARKS}
    async with served(inside) as web:
        answer = await send_lines(web, {"body": "a"}, large)
        assert (answer.status, [one["where"] for one in answer.json["errors"]]) == (422, ["line 2"]), answer.text
    assert inside.sent == []


async def test_marks_inside_strings_do_not_count() -> None:
    inside = daemon()
    texts = ['a,b:[{\\",\\\\' * endpoints.MOST_MARKS, "\\" * 999, '"' * 99_999]
    async with served(inside) as web:
        assert [(await send(web, {"body": text})).status for text in texts] == [202] * 3
        assert (await send(web, {"body_json": texts})).status == 202
    assert [one.body.decode() for one in inside.sent[:3]] == texts


def test_a_body_is_encoded_when_it_is_read() -> None:
    """Its values take up to forty times the memory of their text, and a message waits for its confirm."""
    read = endpoints.read_json(api_messages.NewMessage, b'{"body_json": [1, {"a": null}]}')
    assert read.body_json == read.content == b'[1,{"a":null}]'
