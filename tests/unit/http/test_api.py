"""The API with a stand-in for the daemon: messages, tokens, problems, and the OpenAPI document."""

from __future__ import annotations

import asyncio
import json
import re
from functools import partial
from typing import Any, cast

import pytest
from openapi_spec_validator import validate
from starlette.requests import Request

from delayer.amqp.properties import Properties, decoded
from delayer.amqp.values import Outgoing
from delayer.core.errors import StoreLost
from delayer.core.hold import NACKED, returned
from delayer.fields.schedules import new_schedule
from delayer.http import api_messages, api_schedules, endpoints, forms, problems
from delayer.http.view import QUERIES
from delayer.schedule.schedule import problems as problems_of
from delayer.store.requests import OtherRequest, Requests
from tests.support.fakes import until
from tests.support.web import Answer, Web, tokens_file
from tests.unit.http.inside import NOW_MS, TOKEN, Inside, opened, served

ROUTES = [{"from": "delayer.in", "to": "delayer.out"}, {"from": "strict.in", "to": "o", "require_delay": True}]
AUTH = {"Authorization": f"Bearer {TOKEN}"}
JSON = {**AUTH, "Content-Type": "application/json"}
LINES = {**AUTH, "Content-Type": "application/x-ndjson"}
FORM = {**AUTH, "Content-Type": "application/x-www-form-urlencoded"}
DAY = 86_400_000


def daemon(**more: Any) -> Inside:
    return Inside(**{"route": ROUTES, **more})


async def send(web: Web, message: Any, **headers: str) -> Answer:
    return await web.ask("POST", "/api/messages", json.dumps(message).encode(), JSON | headers)


async def send_lines(web: Web, *messages: Any) -> Answer:
    text = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in messages)
    return await web.ask("POST", "/api/messages", text.encode(), LINES)


def sent(message: Outgoing, *names: bytes) -> dict[bytes, object]:
    return decoded(Properties.parse(message.properties), names)


async def test_a_message_goes_to_its_route_with_the_headers_of_a_publisher() -> None:
    inside = daemon()
    new = {
        "routing_key": "orders.reminder", "delay": "1h", "headers": {"a": "b", "n": 3, "yes": True},
        "body_json": {"order": 4711, "ä": [1.5, None]}, "message_id": "m-1", "correlation_id": "c", "priority": 7,
    }  # fmt: skip
    async with served(inside) as web:
        answer = await send(web, new)
    assert (answer.status, answer.headers["content-type"]) == (202, "application/json")
    told = answer.json
    assert (told.pop("due_ms"), told.pop("due")) == (NOW_MS + 3_600_000, "2027-01-15T09:00:00.000Z")
    assert told == {
        "message_id": "m-1", "exchange": "delayer.in", "routing_key": "orders.reminder", "cancels": None,
        "where": "broker",
    }  # fmt: skip
    [message] = inside.sent
    assert (message.exchange, message.routing_key) == (b"delayer.in", b"orders.reminder")
    assert message.body == '{"order":4711,"ä":[1.5,null]}'.encode()
    found = sent(message, b"x-delay", b"a", b"n", b"yes", b"x-delayer-id")
    assert found == {b"x-delay": 3_600_000, b"a": "b", b"n": 3, b"yes": True, b"x-delayer-id": message.token.decode()}
    properties = Properties.parse(message.properties)
    assert [properties.short(name) for name in ("message_id", "correlation_id", "content_type")] == [
        b"m-1", b"c", b"application/json",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("form", "told"), [("x-deliver-at", NOW_MS + 3_600_001), ("timestamp", NOW_MS // 1000 + 3_601)]
)
async def test_an_instant_counts_from_the_clock_that_decides(form: str, told: int) -> None:
    """A host's clock that is behind would make the message early."""
    inside = daemon(route=[{"from": "in", "to": "out", "delay_from": [form]}])
    async with served(inside) as web:
        assert (await send(web, {"delay": 3_600_001})).status == 202
    found = sent(inside.sent[0], b"x-deliver-at")
    stamp = Properties.parse(inside.sent[0].properties).timestamp
    assert (found.get(b"x-deliver-at") or stamp) == told


@pytest.mark.parametrize(
    ("new", "headers", "body"),
    [
        ({"delay": 5}, {b"x-delay": 5}, b""),
        ({"due": 2_000_000_000_000}, {b"x-deliver-at": 2_000_000_000_000}, b""),
        ({"due": "2031-01-31T08:00:00+01:00"}, {b"x-deliver-at": 1_927_609_200_000}, b""),
        ({"body": "ü\n"}, {}, "ü\n".encode()),
        ({"body_b64": "AAH/"}, {}, b"\0\1\xff"),
        ({"body_json": None}, {}, b"null"),
        ({"key": "k", "key_mode": "debounce", "key_ceiling": "5m", "delay": 1},
         {b"x-delay-key": "k", b"x-delay-key-mode": "debounce", b"x-delay-key-ceiling": 300_000, b"x-delay": 1}, b""),
        ({"headers": {"x-delay-cancel": "k"}}, {b"x-delay-cancel": "k"}, b""),
    ],
)  # fmt: skip
async def test_forms_of_delays_and_bodies(new: dict[str, Any], headers: dict[bytes, Any], body: bytes) -> None:
    inside = daemon(store={"url": "postgresql://nowhere/x"})
    async with served(inside) as web:
        answer = await send(web, new)
        assert answer.status == 202, answer.text
    [message] = inside.sent
    names = (b"x-delay", b"x-deliver-at", b"x-delay-key", b"x-delay-key-mode", b"x-delay-key-ceiling")
    assert (sent(message, *names, b"x-delay-cancel"), message.body) == (headers, body)
    assert answer.json["cancels"] == ("k" if b"x-delay-cancel" in headers else None)


STORE = {"mode": "store", "store": {"url": "postgresql://nowhere/x", "park_beyond": "10m"}}


@pytest.mark.parametrize(
    ("new", "native", "store"),
    [
        ({"delay": 0}, "destination", "destination"),
        ({"delay": 50}, "destination", "destination"),
        ({"delay": "9m"}, "broker", "broker"),
        ({"delay": "11m"}, "broker", "store"),
        ({"delay": 0, "key": "k"}, "store", "store"),
        ({"exchange": "late.in", "due": NOW_MS - 60_000}, "held", "held"),
        ({"headers": {"x-delay-cancel": "k"}}, None, None),
    ],
)
async def test_the_answer_says_where_a_message_goes(new: dict[str, Any], native: str | None, store: str | None) -> None:
    late = {"from": "late.in", "to": "o", "late_limit": "1s", "late_action": "hold"}
    for mode, where in (("native", native), ("store", store)):
        async with served(daemon(**STORE | {"mode": mode, "route": [*ROUTES, late]})) as web:
            answer = await send(web, new)
        assert (answer.status, answer.json["where"]) == (202, where), answer.text


async def test_two_mistakes_of_fields_that_exclude_each_other_are_two_errors() -> None:
    async with served(daemon()) as web:
        answer = await send(web, {"delay": 1, "due": 1, "body": "a", "body_json": None})
        assert answer.json["errors"] == [
            {"where": "delay, due", "expected": "one of delay, due", "found": "delay and due"},
            {"where": "body, body_json", "expected": "one of body, body_json, body_b64", "found": "body and body_json"},
        ]
        answer = await send_lines(web, {"delay": 1, "due": 1})
        assert [one["where"] for one in answer.json["errors"]] == ["line 1 delay, due"]


@pytest.mark.parametrize(
    ("new", "where"),
    [({"delay": "2d"}, "delay"), ({"due": NOW_MS + 2 * DAY}, "due"), ({"headers": {"x-delay": 2 * DAY}}, "delay")],
)
async def test_a_refusal_names_the_field_that_asks_for_the_delay(new: dict[str, Any], where: str) -> None:
    async with served(daemon(intake={"max_delay": "1d"})) as web:
        answer = await send(web, new)
    [wrong] = answer.json["errors"]
    assert (wrong["where"], "the delay is too long" in wrong["found"]) == (where, True), answer.text


class Body(bytes):
    """Notes into how many lines it was split."""

    def split(self, *arguments: Any) -> list[bytes]:  # type: ignore[override]
        found = super().split(*arguments)
        assert len(found) <= 2 * api_messages.MOST_LINES + 1
        return found


async def test_too_many_lines_are_refused_before_they_are_split() -> None:
    api = api_messages.MessagesApi(cast(Any, None), asyncio.Semaphore(), asyncio.Semaphore())
    for line in (b"1\n", b"\n", b" \r\n"):
        call = endpoints.Call(cast(Any, None), None, None, Body(line * 100_000))
        with pytest.raises(problems.HttpProblem, match="found 100001"):
            await api._compose(call, b"", partial(asyncio.sleep, 0))
    inside = daemon()
    async with served(inside) as web:
        for ends in ("\n\n", "\r\n\r\n"):
            answer = await web.ask("POST", "/api/messages", (f"{{}}{ends}" * api_messages.MOST_LINES).encode(), LINES)
            assert (answer.status, answer.json["sent"]) == (202, api_messages.MOST_LINES)


async def test_lines_are_all_checked_before_one_is_sent() -> None:
    inside = daemon()
    async with served(inside) as web:
        answer = await send_lines(web, {"body": "a"}, "", {"body": "b", "delay": "x"}, "{", {"dealy": 1, "x": 2})
        assert (answer.status, inside.sent) == (422, [])
        places = [one["where"] for one in answer.json["errors"]]
        assert places == ["line 3 delay", "line 4", "line 5 dealy", "line 5 x"]
        assert answer.json["errors"][1]["found"].startswith("a mistake at column 1: ")
        for lines in ([], ["{}"] * (api_messages.MOST_LINES + 1)):
            assert (await send_lines(web, *lines)).status == 422
        answer = await send_lines(web, {"body": "a"}, "", {"body": "b"})
        assert (answer.status, [one.body for one in inside.sent]) == (202, [b"a", b"b"])
        assert (answer.json["sent"], answer.json["failed"]) == (2, 0)
        assert [one["line"] for one in answer.json["results"]] == [1, 3]


async def test_what_the_broker_does_not_take_is_an_error() -> None:
    inside = daemon()
    inside.outcomes = {b"back": returned(312, "NO_ROUTE"), b"nack": NACKED}
    async with served(inside) as web:
        for body, says in (("back", "returned: 312 NO_ROUTE"), ("nack", "nacked")):
            answer = await send(web, {"body": body})
            assert (answer.status, says in answer.json["detail"], "next" in answer.json) == (503, True, True)
            assert answer.headers["retry-after"] == "5"
        answer = await send_lines(web, {"body": "fine"}, {"body": "back"})
        assert answer.status == 503
        fine, back = answer.json["results"]
        assert (fine["error"], back["sent"], back["error"]) == (None, None, "returned: 312 NO_ROUTE")
        assert fine["sent"]["exchange"] == "delayer.in"
        inside.lost = True
        answer = await send(web, {"body": "lost"})
        assert (answer.status, "no connection" in answer.json["detail"]) == (503, True)


@pytest.mark.parametrize(
    ("role", "method", "path", "status"),
    [
        ("read", "POST", "/api/messages", 403), ("read", "GET", "/api/refused", 200),
        ("read", "DELETE", "/api/messages?key=a", 403), ("publish", "POST", "/api/messages", 202),
        ("publish", "GET", "/api/refused", 403), ("publish", "PATCH", "/api/messages?key=a", 403),
        ("publish", "POST", "/api/schedules", 403), ("act", "POST", "/api/messages", 202),
        ("act", "GET", "/api/refused", 200), ("act", "DELETE", "/api/messages?key=a", 404),
        ("read", "POST", "/actions/refused", 403), ("publish", "POST", "/actions/refused", 403),
    ],
)  # fmt: skip
async def test_a_role_allows_no_more(role: str, method: str, path: str, status: int) -> None:
    inside = daemon()
    http = inside.settings.http.model_copy(update={"tokens_file": tokens_file(f"mine {role} {TOKEN}")})
    inside.settings = inside.settings.model_copy(update={"http": http})
    async with served(inside) as web:
        answer = await web.ask(method, path, None if method in ("GET", "DELETE") else b"{}", JSON)
        assert answer.status == status, answer.text
        if status == 403:
            assert f"found the token mine, of the role {role}" in answer.json["detail"]
            assert (inside.sent, inside.done) == ([], [])


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/api/messages", {"Authorization": "Bearer x"}, 401),
        ("POST", "/api/messages", {"Authorization": ""}, 401),
        ("POST", "/api/messages", {"Authorization": "Basic b3BzOng="}, 401),
        ("POST", "/api/messages", {"Content-Type": "text/plain"}, 415),
        ("POST", "/api/messages", {"Content-Type": ""}, 415),
        ("POST", "/api/messages", {"Accept": "text/html"}, 406), ("PUT", "/api/messages", {}, 405),
        ("POST", "/api/messages?x=1", {}, 400), ("POST", "/api/nothing", {}, 404), ("GET", "/api/", {}, 404),
        ("POST", "/api/messages", {"Host": "evil.example"}, 421),
        ("POST", "/api/messages", {"Origin": "https://evil.example"}, 403),
        ("POST", "/api/messages", {"Content-Length": str(5 << 20)}, 413),
        ("POST", "/api/schedules", {"Content-Length": str(300 << 10)}, 413),
        ("POST", "/api/messages", {"Content-Length": "-1"}, 400),
        ("POST", "/api/messages", {"Transfer-Encoding": "chunked"}, 411),
        ("POST", "/api/messages", {"Idempotency-Key": "k"}, 400),
        ("DELETE", "/api/messages", {}, 400), ("DELETE", "/api/messages?key=a&message_id=b", {}, 400),
        ("DELETE", "/api/messages?key=a&key=b", {}, 400), ("DELETE", "/api/messages?key=a", {}, 404),
        ("GET", "/api/schedules?state=lost", {}, 400), ("GET", "/api/messages/../../etc/passwd", {}, 404),
    ],
)  # fmt: skip
async def test_every_error_is_a_problem(method: str, path: str, headers: dict[str, str], status: int) -> None:
    inside = daemon()
    async with served(inside) as web:
        answer = await web.ask(method, path, b"{}" if method in ("POST", "PUT", "PATCH") else None, JSON | headers)
    assert answer.status == status, answer.text
    if status == 400 and headers.get("Content-Length"):
        return  # h11 answers itself.
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json["status"] == status and answer.json["title"] and answer.json["detail"] and answer.json["next"]
    assert ("www-authenticate" in answer.headers) == (status == 401)
    assert ("allow" in answer.headers) == (status == 405)
    assert "docs/" not in answer.text, "an installed package has no docs"
    assert inside.sent == []


@pytest.mark.parametrize(
    ("method", "path", "headers", "detail"),
    [
        ("PUT", "/api/messages", AUTH, "/api/messages: expected the method DELETE, GET, HEAD, PATCH, POST, found PUT."),
        ("GET", "/api/nothing", AUTH, "/api/nothing: expected a path of the API, found none there."),
        ("GET", "/api", AUTH, "/api: expected a path of the API, found none there."),
        ("GET", "/api/messages", {"Authorization": "Basic b3BzOng="},
         'GET /api/messages needs a token. Expected a token of the role read, found Authorization of '
         'the scheme "Basic".'),
        ("GET", "/api/messages", {"Authorization": "bearer x"},
         "GET /api/messages needs a token. Expected a token of the role read, found one that is "
         "not in [http] tokens_file."),
        ("GET", "/api/schedules/a/preview?count=0", AUTH,
         'Query: count: expected greater than or equal to 1, found "0".'),
    ],
)  # fmt: skip
async def test_an_error_says_what_is_there_instead(
    method: str, path: str, headers: dict[str, str], detail: str
) -> None:
    async with served(daemon()) as web:
        answer = await web.ask(method, path, None, headers)
    assert answer.json["detail"] == detail
    assert ("/api/openapi.json" in answer.json["next"]) == (headers is AUTH)


@pytest.mark.parametrize(
    ("method", "path", "body", "where", "expected"),
    [
        ("GET", "/api/messages?due_after=soon", None, "due_after", "an instant with its offset"),
        ("GET", "/api/messages?header=x", None, "header", 'NAME=VALUE, found "x"'),
        ("GET", "/api/messages?after=x", None, "after", "the place that the page before gave"),
        ("GET", "/api/held?kind=x", None, "kind", "one of returned, nacked, unanswered, "),
        ("GET", "/api/messages?key=a&key=b", None, "key", "once, found 2 times"),
        ("PATCH", "/api/messages?key=a", {}, "the whole body", "either delay or due, found neither"),
        ("PATCH", "/api/messages?key=a", {"delay": 1, "due": 1}, "the whole body", "either delay or due, found both"),
        ("DELETE", "/api/messages", None, "key, message_id", "exactly one, and not empty, found neither"),
        ("DELETE", "/api/messages?key=a&message_id=b", None, "key, message_id", "not empty, found both"),
        ("PATCH", "/api/schedules/a", {}, "the whole body", "either fields to change, or a state, found neither"),
        ("PATCH", "/api/schedules/a", {"state": "paused", "every": "1h"}, "the whole body", "or a state, found both"),
    ],
)  # fmt: skip
async def test_a_mistake_names_the_field_what_is_expected_and_what_is_found(
    method: str, path: str, body: Any, where: str, expected: str
) -> None:
    async with served(daemon(store={"url": "postgresql://127.0.0.1:1/x"})) as web:
        answer = await web.ask(method, path, None if body is None else json.dumps(body).encode(), JSON)
    [wrong] = answer.json["errors"]
    told = f"{wrong['expected']}, found {wrong['found']}"
    assert (wrong["where"], expected in told, "found" in wrong["expected"]) == (where, True, False), answer.text
    assert f"{where}: expected" in answer.json["detail"] and "correct what `errors` names" in answer.json["next"]


@pytest.mark.parametrize(
    ("method", "path", "headers", "step"),
    [
        ("PATCH", "/api/messages/m-1", {}, "use PATCH or DELETE /api/messages?message_id=ID, or ?key=KEY"),
        ("DELETE", "/api/messages/m-1", {}, "use PATCH or DELETE /api/messages?message_id=ID, or ?key=KEY"),
        ("POST", "/api/messages/m-1", {}, problems.DOCUMENT),
        ("POST", "/api/messages", {"Content-Type": "text/plain"}, "send the header Content-Type: application/json"),
        ("POST", "/actions/messages", FORM, problems.CORRECT_FORM),
        ("POST", "/actions/schedules", FORM, problems.CORRECT_FORM),
        ("POST", "/actions/nothing", FORM, problems.ACTIONS),
    ],
)
async def test_the_next_step_of_an_error(method: str, path: str, headers: dict[str, str], step: str) -> None:
    async with served(daemon(store={"url": "postgresql://127.0.0.1:1/x"})) as web:
        answer = await web.ask(method, path, b"verb=x", JSON | headers)
    assert answer.json["next"] == step, answer.text


@pytest.mark.parametrize(
    "given", [TOKEN, "bearer\t{}", "Token {}", "Bearer={}", '"Bearer {}"', "Bearer {}x", "Basic {}"]
)
async def test_no_error_repeats_a_token(given: str) -> None:
    secret = f"{TOKEN}-2"
    async with served(daemon()) as web:
        for path in ("/api/messages", "/actions/messages"):
            answer = await web.ask("POST", path, b"{}", JSON | {"Authorization": given.format(secret)})
            assert answer.status == 401 and TOKEN not in answer.text, answer.text


async def test_large_bodies_wait_for_slow_ones_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = daemon()
    head = f"POST /api/messages HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {endpoints.SMALL + 1}\r\n\r\n{{"
    begun, read_body = [], forms.read_body

    async def begin(request: Request) -> bytes:
        begun.append(request)
        return await read_body(request)

    monkeypatch.setattr(forms, "read_body", begin)
    async with served(inside) as web:
        slow = [await opened(web, head.encode()) for _ in range(endpoints.OF_ONE)]
        await until(lambda: len(begun) == endpoints.OF_ONE)
        monkeypatch.setattr(forms, "BODY_SECONDS", 0.2)
        reader, writer = await opened(web, head.encode())
        async with asyncio.timeout(10):
            answer = await reader.read(-1)
        assert answer.startswith(b"HTTP/1.1 503") and b"large bodies" in answer, answer
        for _, one in (*slow, (reader, writer)):
            one.close()
    assert inside.sent == []


async def test_a_key_distinguishes_a_message_from_a_line_of_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bytes, bytes]] = []

    def attempt(_requests: Requests, *request: bytes) -> None:
        asked.append(request)
        raise OtherRequest

    monkeypatch.setattr(Requests, "attempt", attempt)
    async with served(daemon(store={"url": "postgresql://127.0.0.1:1/x"})) as web:
        for kind in (JSON, LINES, JSON):
            answer = await web.ask("POST", "/api/messages", b'{"body": "a"}', kind | {"Idempotency-Key": "k"})
            assert answer.status == 422, answer.text
    first, lines, again = asked
    assert first == again and first[0] == lines[0] and first[1] != lines[1]


async def test_slow_bodies_of_one_token_do_not_keep_out_the_others() -> None:
    inside = daemon()
    tokens = {"tokens_file": tokens_file(TOKEN, f"slow publish {TOKEN}-2")}
    inside.settings = inside.settings.model_copy(update={"http": inside.settings.http.model_copy(update=tokens)})
    large = json.dumps({"body": "x" * endpoints.SMALL}).encode()
    head = f"POST /api/messages HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}-2\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(large)}\r\n\r\n{{"
    async with served(inside) as web:
        slow = [await opened(web, head.encode()) for _ in range(2 * endpoints.MOST_BODIES)]
        for _ in range(3):
            async with asyncio.timeout(5):
                assert (await web.ask("POST", "/api/messages", large, JSON)).status == 202
        for _, writer in slow:
            writer.close()


async def test_requests_that_ask_for_the_stores_clock_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them opens a connection to Postgres."""
    asked, go, at_once = [], asyncio.Event(), []

    async def clock_ms(_url: str, _doing: str) -> int:
        asked.append(1)
        at_once.append(len(asked))
        await go.wait()
        asked.pop()
        raise StoreLost("away")

    monkeypatch.setattr(api_messages, "clock_ms", clock_ms)
    body = b'{"delay": "1h"}'
    head = f"PATCH /api/messages?key=k HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
    head += f"Connection: close\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    async with served(daemon(store={"url": "postgresql://127.0.0.1:1/x"})) as web:
        clients = [await opened(web, head.encode() + body) for _ in range(3 * QUERIES)]
        await until(lambda: len(asked) >= QUERIES)
        assert (await web.get("/health/live")).status == 200
        go.set()
        async with asyncio.timeout(20):
            assert {(await reader.read(-1)).split()[1] for reader, _ in clients} == {b"503"}
        for _, writer in clients:
            writer.close()
    assert (len(at_once), max(at_once)) == (3 * QUERIES, QUERIES)


async def test_a_body_that_does_not_come_in_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "BODY_SECONDS", 0.2)
    inside = daemon()
    head = f"POST /api/messages HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
    async with served(inside) as web:
        head += "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        reader, writer = await opened(web, head.encode())
        async with asyncio.timeout(10):
            assert (await reader.read(-1)).startswith(b"HTTP/1.1 408")
        writer.close()
    assert inside.sent == []


async def test_the_examples_of_the_document_are_accepted() -> None:
    async with served(daemon()) as web:
        schemas = (await web.get("/api/openapi.json")).json["components"]["schemas"]
        [message] = schemas["NewMessage"]["examples"]
        assert (await send(web, message)).status == 202
    for model in (api_schedules.WholeSchedule, api_schedules.NewSchedule):
        schema = schemas[model.__name__]
        [example] = schema["examples"]
        new = endpoints.read_json(model, json.dumps(example).encode())
        assert problems_of(new_schedule(example.get("name", "x"), new.given), NOW_MS) == []
        assert schema["oneOf"] == [{"required": ["to", "cron"]}, {"required": ["to", "every"]}]
    assert "oneOf" not in schemas["ScheduleChange"], "a change may have any field"


async def test_the_document_is_valid_and_has_every_path() -> None:
    async with served(daemon()) as web:
        document = (await web.get("/api/openapi.json")).json
    validate(document)
    assert document["openapi"].startswith("3.1")
    texts = re.findall(r'"description": "(.*?)"[,}]', json.dumps(document))
    assert len(texts) > 100 and not [one for one in texts if "\\n" in one or one != one.strip()]
    bodies = {
        path: one["post"]["requestBody"]["description"]
        for path, one in document["paths"].items()
        if "requestBody" in one.get("post", {})
    }
    assert bodies["/api/messages"] == "At most 4194304 bytes."
    assert bodies["/api/schedules"] == "At most 262144 bytes."
    for path, name in (("/api/messages", "NewMessage"), ("/api/schedules", "NewSchedule")):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{name}"}
        assert document["components"]["schemas"][name]["examples"], "a body to begin with"
    for method in ("delete", "patch"):
        parameters = document["paths"]["/api/messages"][method]["parameters"]
        which = {one["name"]: one["schema"] for one in parameters if one["in"] == "query"}
        assert which == {name: {"type": "string", "minLength": 1} for name in ("key", "message_id")}
    operations = [one for path in document["paths"].values() for one in path.values()]
    assert len({one["operationId"] for one in operations}) == len(operations) == 19
    for path, methods in document["paths"].items():
        for one in methods.values():
            assert one["summary"] and {"400", "401", "403", "503"} <= set(one["responses"]), path
