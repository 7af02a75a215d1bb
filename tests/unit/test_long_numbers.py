"""A number of 5,000 digits gets the error of other bad numbers, in each way by which text from outside becomes a number
or a time. Python raises ValueError beyond 4,300 digits, and OverflowError where a number becomes a float or a duration.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from uuid import UUID

import pytest
from click.testing import CliRunner

from delayer.amqp.handshake import server_version
from delayer.amqp.values import Delivery
from delayer.cli.main import cli
from delayer.config.errors import ConfigError
from delayer.config.loading import load
from delayer.core.importing import ImportSelection
from delayer.core.message import Target
from delayer.core.plan import Mode, Policy, Refuse, Route
from delayer.daemon.systemd import Notifier
from delayer.fields.schedules import read_schedules
from delayer.format.inbox import delivery_of_row
from delayer.format.lines import NotALine, parse_line
from delayer.imports.beat import translate_beat
from delayer.imports.crontab import translate_crontab
from delayer.imports.files import DelayedExchange, Unreadable
from delayer.imports.raven import RavenExport
from delayer.imports.timeouts import StoredTimeout, item_of
from delayer.imports.translation import Translation
from delayer.intake.handle import classify
from delayer.store.errors import ScheduleRefused
from delayer.store.lanes.notify import parse_payload
from tests.support.logged import logging_as_it_was
from tests.support.raw import Props
from tests.support.raw import text as long_text
from tests.unit.http.inside import TOKEN, Inside, served

Way = Callable[[str], str | Awaitable[str]]
"""Takes the number in, and returns what is said about it."""
NOW_MS = 1_800_000_000_000
NOWHERE = "postgresql://u@127.0.0.1:1/d"
SELECTION: dict[str, Any] = {"path": Path("unused"), "notes": None, "meant": ImportSelection()}


def raised(act: Callable[[str], object]) -> Way:
    """The text of the error."""

    def way(number: str) -> str:
        try:
            return f"accepted: {act(number)}"
        except (ConfigError, ScheduleRefused, NotALine, Unreadable) as error:
            return f"{type(error).__name__}: {error}"

    return way


def watchdog(number: str) -> str:
    return str(Notifier({"NOTIFY_SOCKET": "@nowhere", "WATCHDOG_USEC": number}).watchdog_interval)


def hexadecimal(number: str) -> str:
    """Python reads any number of hexadecimal digits, and cannot write the number."""
    return "0x" + "f" * len(number)


def in_file(text: str) -> Way:
    def read(number: str) -> object:
        with NamedTemporaryFile("w", suffix=".toml") as file:
            file.write(text.replace("HEX", hexadecimal(number)).replace("§", number))
            file.flush()
            return load(Path(file.name), {}, {})

    return raised(read)


def in_variable(name: str, text: str) -> Way:
    return raised(lambda number: load(Path(os.devnull), {name: text.replace("§", number)}, {}))


def in_schedules(text: str) -> Way:
    return raised(lambda number: read_schedules(text.replace("HEX", hexadecimal(number)).replace("§", number).encode()))


def planned(delivery: Delivery, *forms: str) -> str:
    route = Route(b"in", b"out", **({"delay_from": forms} if forms else {}))
    plan = classify(delivery, Policy(Mode.STORE, {b"in": route}, 10**9), NOW_MS, 1 << 16)[2]
    return plan.reason if isinstance(plan, Refuse) else f"{plan}"


def in_header(name: bytes, *forms: str, before: str = "", **more: bytes) -> Way:
    def way(number: str) -> str:
        given = ((name, long_text(before + number)), *((one.encode(), long_text(by)) for one, by in more.items()))
        return planned(Delivery(1, False, b"in", b"k", Props(headers=given).encode(), b""), *forms)

    return way


def in_body(body: str, form: str) -> Way:
    return lambda number: planned(
        Delivery(1, False, b"in", b"k", Props().encode(), body.replace("§", number).encode()), form.replace("§", number)
    )


def by_sql(headers: str, properties: str = "{}") -> Way:
    def way(number: str) -> str:
        row = {"exchange": "in", "routing_key": "k", "body": b"", "properties": properties.replace("§", number)}
        return planned(delivery_of_row(1, {**row, "headers": headers.replace("§", number)}))

    return way


def on_command_line(*words: str) -> Way:
    def way(number: str) -> str:
        env = {"DELAYER_CONFIG": os.devnull, "DELAYER_STORE__URL": NOWHERE, "DELAYER_BROKER__URL": "amqp://127.0.0.1:1"}
        given = [word.replace("§", number) for word in words]
        with logging_as_it_was():
            done = CliRunner().invoke(cli, given, env=env, prog_name="delayer")
        return f"exit code {done.exit_code}: {done.output}"

    return way


def over_http(method: str, path: str, body: str | None = None, **headers: str) -> Way:
    async def way(number: str) -> str:
        routes = [{"from": "delayer.in", "to": "delayer.out"}]
        async with served(Inside(route=routes, store={"url": NOWHERE})) as web:
            kind = "application/x-www-form-urlencoded" if path.startswith("/actions") else "application/json"
            given = {name.replace("_", "-"): value.replace("§", number) for name, value in headers.items()}
            given = {"Authorization": f"Bearer {TOKEN}", "Content-Type": kind} | given
            content = None if body is None else body.replace("§", number).encode()
            answer = await web.ask(method, path.replace("§", number), content, given)
        return f"{answer.status}: {answer.text}"

    return way


def translated(translate: Callable[[Translation, str], None]) -> Way:
    def way(number: str) -> str:
        result = Translation(NOW_MS, lambda: UUID(int=1))
        translate(result, number)
        return str(result.untranslated)

    return way


def beat(**entry: Callable[[int], object]) -> Way:
    def translate(result: Translation, number: str) -> None:
        given = {name: of(int(hexadecimal(number), 16)) for name, of in entry.items()}
        translate_beat(result, {"a": {"task": "t", "schedule": timedelta(1)} | given}, zone="UTC", queue="q")

    return translated(translate)


def crontab(line: str) -> Way:
    target = Target(b"a", b"b")
    return translated(
        lambda result, number: translate_crontab(result, line.replace("§", number), target, zone="UTC", is_system=False)
    )


DURATION = "expected a duration in whole numbers"
INSTANT = "expected an instant"
MILLISECONDS = "expected milliseconds as an integer, a numeric string or a float, found"
DIGITS = "Exceeds the limit (4300 digits)"
TOO_LONG = "found a number of more than 4,300 digits"
PORT = "characters like / @ : # in a password are written"
JSON = "400: .*expected JSON, found a mistake at line 1 column [0-9]+: number out of range"
ROUTE = '[[route]]\nfrom = "a"\nto = "b"\n'

WAYS: Mapping[str, Mapping[str, tuple[Way, str]]] = {
    "file": {
        "integer": (in_file("[intake]\nprefetch = §\n"), f"expected TOML in UTF-8.*{re.escape(DIGITS)}"),
        "hexadecimal": (in_file("[intake]\nprefetch = HEX\n"), f"intake.prefetch: expected .*{TOO_LONG}"),
        "of another type": (in_file("mode = HEX\n"), f"mode: expected .*{TOO_LONG}"),
        "float": (in_file(f"{ROUTE}max_rate = §.5\n"), "max_rate: expected a whole number"),
        "date": (in_file("[intake]\nmax_delay = §-01-01\n"), "expected TOML in UTF-8"),
        "duration": (in_file('[intake]\nmax_delay = "§s"\n'), f"max_delay: {DURATION}"),
        "listen": (in_file('[http]\nlisten = "h:§"\n'), 'listen: expected "host:port"'),
        "broker's port": (in_file('[broker]\nurl = "amqp://h:§/"\n'), PORT),
        "its port behind a user": (
            in_file('[broker]\nurl = "amqp://u:p@h:§/"\n'), "a port is a number from 1 to 65535"
        ),
        "heartbeat": (in_file('[broker]\nurl = "amqp://h/?heartbeat=§"\n'), "expected heartbeat to be a number"),
        "management": (in_file('[broker]\nmanagement_url = "http://u:p@h:§"\n'), "a port is a number"),
        "store's port": (in_file('[store]\nurl = "postgresql://u:p@h:§/d"\n'), "a port is a number"),
        "its port as a parameter": (
            in_file('[store]\nurl = "postgresql:///d?port=§"\n'), "expected port to be a number"
        ),
    },
    "environment": {
        "integer": (in_variable("DELAYER_INTAKE__PREFETCH", "§"), "prefetch: expected a whole number"),
        "list": (in_variable("DELAYER_ROUTE", '[{"from": "a", "max_rate": §}]'), "a JSON list, found no JSON: Exceeds"),
        "URLs": (in_variable("DELAYER_BROKER__URL", '["amqp://h", §]'), "expected a list of URLs in JSON"),
        "watchdog": (watchdog, "None"),
        "watchdog as a float": (lambda number: watchdog(number[:400]), "None"),
    },
    "AMQP": {
        "x-delay": (in_header(b"x-delay"), f"x-delay: {MILLISECONDS}"),
        "negative": (in_header(b"x-delay", before="-"), f"x-delay: {MILLISECONDS}"),
        "x-deliver-at": (in_header(b"x-deliver-at"), f"x-deliver-at: {INSTANT}"),
        "fraction": (in_header(b"x-deliver-at", before="2031-01-31T08:00:00."), f"x-deliver-at: {INSTANT}"),
        "x-opt-delivery-delay": (in_header(b"x-opt-delivery-delay"), MILLISECONDS),
        "header": (in_header(b"when", "header:when"), f"header:when: {MILLISECONDS}"),
        "eta": (in_header(b"eta", "celery-eta"), "celery-eta: expected an instant in ISO 8601"),
        "NServiceBus": (
            in_header(b"NServiceBus.Transport.RabbitMQ.DelayInSeconds", "nservicebus"), "expected seconds as"
        ),
        "its timeout": (
            in_header(b"NServiceBus.Timeout.Expire", "nservicebus-timeout"), "expected an instant like 2026"
        ),
        "last due instant": (in_header(b"x-delayer-due"), "AtOnce"),
        "JSON": (in_body('{"at": §}', "json:/at"), "json:/at: expected a JSON body, found"),
        "pointer": (in_body("[1]", "json:/§"), "AtOnce"),
        "version": (lambda number: str(server_version({"version": f"4.{number}"})[0]), "4"),
    },
    "SQL": {
        "integer": (by_sql('{"x-delay": §}'), "malformed properties"),
        "text": (by_sql('{"x-delay": "§"}'), f"x-delay: {MILLISECONDS}"),
        "float": (by_sql('{"x-delay": §.5}'), f"x-delay: {MILLISECONDS} inf"),
        "priority": (by_sql("{}", '{"priority": §}'), "malformed properties"),
        "expiration": (by_sql("{}", '{"expiration": "§"}'), "malformed properties"),
        "notification": (lambda number: str(parse_payload(f"waiting {number}")), "None"),
    },
    "schedules": {
        "integer": (in_schedules("[schedule.a]\nmax = §\n"), f"expected TOML.*{re.escape(DIGITS)}"),
        "hexadecimal": (in_schedules("[schedule.a]\nmax = HEX\n"), f"max: expected a whole number.*{TOO_LONG}"),
        "header": (in_schedules("[schedule.a.headers]\nh = HEX\n"), f"expected an integer of 64 bits.*{TOO_LONG}"),
        "duration": (in_schedules('[schedule.a]\nevery = "§s"\n'), f"every: {DURATION}"),
        "instant": (in_schedules('[schedule.a]\nfirst = "§-01-01T00:00:00Z"\n'), f"first: {INSTANT}"),
    },
    "imports": {
        "JSON lines": (
            raised(lambda number: parse_line(b'{"due_ms": %s}' % number.encode())), "NotALine: .*JSON.*digits"
        ),
        "plugin": (raised(lambda number: DelayedExchange(**SELECTION, vhost=b"/").read(number.encode())), "6 fields"),
        "its due instant": (
            raised(lambda number: DelayedExchange(**SELECTION, vhost=b"/").read(f"{number} Lw== 0 0 0 0".encode())),
            "Unreadable: expected the due instant in milliseconds",
        ),
        "RavenDB": (
            raised(lambda number: RavenExport(**SELECTION).read(b'{"Time": %s}' % number.encode())),
            "Unreadable: .*JSON",
        ),
        "headers": (
            lambda number: str(
                item_of(StoredTimeout("a", "q", 0, f'{{"a": {number}}}', b""), b"", ImportSelection()).hold
            ),
            "its headers cannot be read: Exceeds",
        ),
        "beat's period": (beat(schedule=lambda number: number), "schedule: expected a number of seconds"),
        "beat's expiry": (beat(options=lambda number: {"expires": number}), f"expires: expected seconds.*{TOO_LONG}"),
        "beat's arguments": (beat(args=lambda number: [number]), f"expected values of JSON, {TOO_LONG}"),
        "crontab": (crontab("0 § * * * x"), "cron: expected at most 200 characters"),
        "its delay": (crontab("RANDOM_DELAY=§"), "RANDOM_DELAY="),
    },
    "commands": {
        " ".join(words): (on_command_line(*words), f"exit code 2: .*{expected}")
        for *words, expected in (
            ("send", "--delay", "§", DURATION), ("send", "--at", "§", INSTANT),
            ("send", "--delay-key-ceiling", "§s", DURATION),
            ("send", "--header", "h:int=§", "expected a value of type int, found .{1,90}\n"),
            ("send", "--header", "h:float=§", "expected a finite number"),
            ("list", "--limit", "§", "not a valid integer"), ("list", "--due-before", "§", INSTANT),
            ("list", "--due-after", "§d", INSTANT), ("list", "--after", "§.§", "expected the place"),
            ("reschedule", "id:1", "--by", "§s", DURATION), ("reschedule", "id:1", "--at", "§", INSTANT),
            ("audit-log", "--before", "§", "not a valid integer"),
            ("audit-log", "--before", "9" * 30, "not in the range"),
            ("db", "lanes", "§", "not a valid integer"),
            ("db", "skip-ids", "--by", "§", "not a valid integer"),
            ("schedule", "add", "a", "--max", "§", "max: expected a"),
            ("schedule", "add", "a", "--every", "§s", f"every: {DURATION}"),
            ("schedule", "add", "a", "--first", "§", f"first: {INSTANT}"),
            ("schedule", "add", "a", "--catch-up", "§", "catch_up: expected skip"),
            ("schedule", "preview", "a", "--count", "§", "not a valid integer"),
            ("audit", "--sample", "§", "not in the range"),
            ("audit", "--release-rate", "§", "expected a number, found inf"),
            ("import", "jsonl", "run", "/dev/null", "--limit", "§", "not a valid"),
            ("refused", "retry", "x", "--delay", "§s", DURATION),
            ("--set", "intake.prefetch=§", "check", "expected a whole"),
        )
    },
    "messages over HTTP": {
        body: (over_http("POST", "/api/messages", body), expected)
        for body, expected in (
            ('{"delay": §}', JSON), ('{"delay": -§}', JSON), ('{"due": §}', JSON), ('{"priority": §}', JSON),
            ("[§]", JSON),
            ('{"headers": {"a": §}}', JSON), ('{"body_json": {"a": [§]}}', JSON), ('{"delay": §.5}', JSON),
            ('{"body_json": 1e§}', "422: .*expected a finite number"),
            ('{"delay": "§s"}', f"422: .*{DURATION}"),
            ('{"due": "§"}', f"422: .*{INSTANT}"), ('{"due": "§-01-01T00:00:00Z"}', f"422: .*{INSTANT}"),
            ('{"headers": {"x-delay": "§"}}', f"422: .*{MILLISECONDS}"), ('{"expiration": "§"}', "422: .*at most 255"),
        )
    },
    "schedules over HTTP": {
        body: (over_http("POST", "/api/schedules", body), expected)
        for body, expected in (
            ('{"name": "a", "max": §}', JSON), ('{"name": "a", "properties": {"priority": §}}', JSON),
            ('{"name": "a", "every": "§s"}', f"422: .*every: {DURATION}"), ('{"name": "a", "catch_up": §}', JSON),
        )
    },
    "HTTP": {
        f"{method} {path} {body or ''}": (over_http(method, path, body), expected)
        for method, path, body, expected in (
            ("GET", "/api/schedules/a/preview?count=§", None, "400: .*count: expected"),
            ("GET", "/api/messages?due_after=§", None, f"400: .*{INSTANT}"),
            ("GET", "/api/messages?after=§.§", None, "400: "),
            ("GET", "/api/held?after=§", None, "400: .*expected an id"), ("GET", "/audit-log?before=§", None, "400: "),
            ("GET", "/waiting?due_before=§d", None, "400: "), ("PATCH", "/api/messages?key=a", '{"delay": §}', JSON),
            ("POST", "/actions/messages", "verb=cancel&due_before=§d&confirmed=yes", f"400: .*{INSTANT}"),
            ("POST", "/actions/messages", "verb=cancel&id=id:§", "400: .*expected an id"),
            ("POST", "/actions/refused", "verb=retry&id=a&set_header=h:int=§", "400: .*of type int, found .{1,90}\""),
        )
    } | {
        "length": (over_http("POST", "/api/messages", "{}", Content_Length="§"), "400: "),
        "range": (over_http("GET", "/static/delayer.css", Range="bytes=0-§"), "400: "),
        "modified": (over_http("GET", "/static/delayer.css", If_Modified_Since="Mon, § Nov 2026"), "200: "),
        "key": (over_http("POST", "/api/messages", "{}", Idempotency_Key="§"), "400: .*1 to 255 characters"),
        "host": (over_http("GET", "/", Host="localhost:§"), "200: "),
    },
}  # fmt: skip
ALL = [(place, name) for place, ways in WAYS.items() for name in ways]


@pytest.mark.parametrize(("place", "name"), ALL, ids=lambda one: one)
async def test_a_number_of_thousands_of_digits_is_one_more_bad_number(place: str, name: str) -> None:
    way, expected = WAYS[place][name]
    told = await asyncio.to_thread(way, "9" * 5_000)
    told = told if isinstance(told, str) else await told
    assert re.search(expected, told, re.DOTALL), told[:1_000]
    assert "set_int_max_str_digits" not in told, "advice to a programmer"
