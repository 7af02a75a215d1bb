"""The command line without any server: parsing, messages, exit codes."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import asyncpg
import click
import pytest
from click.testing import CliRunner, Result

import delayer
from delayer.amqp.properties import Properties
from delayer.broker.errors import BrokerRefused, BrokerUnreachable, TopologyFinding, TopologyMismatch
from delayer.cli.errors import ExitCode, Misused, failure
from delayer.cli.main import cli
from delayer.cli.options import Stoppable
from delayer.cli.send import PORTION, PORTION_BYTES, Composer, Draft, portions_of
from delayer.config.errors import ConfigError, Expected, Problem
from delayer.config.model import Settings
from delayer.config.texts import Scalar, instant_ms
from delayer.core.errors import StoreLost, certificate_advice
from delayer.store.errors import BadStoreUrl, SchemaOutdated, to_store_lost
from tests.support.logged import logging_as_it_was

NOWHERE = ["--broker-url", "amqp://user:hunter2@127.0.0.1:1", "--store-url", "postgresql://user:hunter2@127.0.0.1:1/d"]
VERBS = [
    "run", "check", "topology", "db", "send", "status", "list", "show", "cancel", "reschedule", "held", "schedule",
    "refused", "strays", "audit-log", "drain", "audit", "backlog", "compact", "restore", "import", "export",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ignore this machine's configuration, and restore logging afterwards."""
    monkeypatch.setenv("DELAYER_CONFIG", os.devnull)
    with logging_as_it_was():
        yield


def call(*arguments: str, env: dict[str, str] | None = None, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(cli, arguments, env=env, input=stdin, prog_name="delayer")


def test_version() -> None:
    result = call("--version")
    assert (result.exit_code, result.stdout) == (0, f"delayer {delayer.__version__}\n")


def test_help_names_every_verb_and_the_exit_codes() -> None:
    result = call("--help")
    assert result.exit_code == 0
    listed = [line.split()[0] for line in result.stdout.partition("Commands:")[2].splitlines() if line.strip()]
    assert listed == VERBS
    assert "Exit codes: 0 done, 1 a check found something, 2 usage or configuration" in result.stdout


@pytest.mark.parametrize(
    "path",
    [[], *([verb] for verb in VERBS), *(["topology", verb] for verb in ("apply", "verify", "show", "remove"))],
    ids=" ".join,
)
def test_help_reads_no_configuration_and_shows_no_secret(path: list[str]) -> None:
    env = {"DELAYER_CONFIG": "/nowhere.toml", "DELAYER_BROKER__URL": "amqp://u:hunter2@h", "DELAYER_NONSENSE": "1"}
    result = call(*NOWHERE, *path, "--help", env=env)
    assert result.exit_code == 0
    assert "hunter2" not in result.output


MISTAKES = {
    "No such command 'nonsense'": [["nonsense"]],
    "No such option '--nonsense'": [["--nonsense", "check"]],
    "expected --set KEY=VALUE, found": [["--set", "mode", "check"], ["--set", "=x", "check"]],
    "'--delay': expected a duration": [["send", "--delay", "10"], ["send", "--delay", "soon"]],
    "'--at': expected an instant": [["send", "--at", "tomorrow"], ["send", "--at", "2031-01-31T08:00:00"]],
    "--delay or --at, not both": [["send", "--delay", "1s", "--at", "2031-01-31T08:00:00Z"]],
    "--body or --body-file, not both": [["send", "--body", "x", "--body-file", "-"]],
    "expected NAME=VALUE or NAME:TYPE=VALUE": [["send", "--header", "novalue"]],
    "n: expected a value of type": [["send", "--header", "n:int=x"], ["send", "--header", "n:bool=yes"]],
    'expected a finite number for "n", found': [
        *(["send", "--header", f"n:float={value}"] for value in ("nan", "-inf", "1e999")),
        ["refused", "retry", "--all", "--set-header", "n:float=nan"],
    ],
    ": expected a TYPE of str": [["send", "--header", text] for text in ("n:integer=3", "n:=3", ":int=3")],
    'expected one that a route comes from': [["send", "--route", "nonsense"]],
    "flag --mode: mode: expected": [["--mode", "nonsense", "status"]],
    "/nowhere.toml: expected a file": [["--config", "/nowhere.toml", "status"]],
    "no store is configured. Next: set store.url. Without a store see": [
        ["--mode", "native", *verb.split()] for verb in ("db upgrade", "db current", "compact", "restore --all")
    ],
    "schedules need a store": [
        ["--mode", "native", "schedule", *verb.split()]
        for verb in (
            "add x --every 1s --to e", "list", "show x", "edit x --every 1s", "pause x", "resume x", "remove x",
            "run x", "preview x", "apply /dev/null",
        )
    ],
    "expected a field to change": [["schedule", "edit", "x"]],
    "to: expected the exchange of its messages": [["schedule", "add", "x", "--every", "1s"]],
    "cron: expected a rhythm": [["schedule", "add", "x", "--to", "e"]],
    "zone: expected with cron only": [["schedule", "add", "x", "--to", "e", "--every", "1s", "--zone", "UTC"]],
    "  every: expected a duration": [["schedule", "add", "x", "--to", "e", "--every", "5"]],
    "  catch_up: expected skip, once, all": [["schedule", "add", "x", "--catch-up", "twice"]],
    "  properties: expected properties of": [["schedule", "add", "x", "--property", "message_id=1"]],
    "/nowhere.toml: expected a file that can be read": [["schedule", "apply", "/nowhere.toml"]],
    "--route: expected one": [["--set", 'route=[{"from": "a"}, {"from": "b"}]', "send"]],
    'expected what route "a" reads (x-delay), found an instant': [
        ["--set", 'route=[{"from": "a", "delay_from": ["x-delay"]}]', "send", "--at", "2031-01-31T08:00:00Z"],
    ],
    'expected what route "a" reads (none), found a duration': [
        ["--set", 'route=[{"from": "a", "delay_from": []}]', "send", "--delay", "1s"],
    ],
    "as a field or in a header, found it also in x-delay": [["send", "--delay", "1s", "--header", "x-delay:int=5"]],
    "--header: expected the delay once, as a field or in a header, found it also in x-due": [
        ["--set", 'route=[{"from": "a", "delay_from": ["header:x-due"]}]', "send", "--at", "2031-01-31T08:00:00Z",
         "--header", "x-due:int=5"],
    ],
    "the daemon would refuse it: x-delay: expected milliseconds": [["send", "--header", "x-delay=soon"]],
    "the daemon would refuse it: the message has no delay: expected one": [
        ["--set", 'route=[{"from": "a", "require_delay": true}]', "send"]
    ],
    "the daemon would refuse it: the delay is too long": [["send", "--header", "x-delay:int=315360000001"]],
    "--delay-key-ceiling: expected a duration, because key_mode is debounce, found none": [
        ["--store-url", "postgresql://localhost/x", "send", "--delay-key", "k", "--delay-key-mode", "debounce"]
    ],
    "--routing-key: expected at most 255 bytes": [["send", "--routing-key", "k" * 256]],
    "--message-id: expected at most 255 bytes, found 256": [["send", "--message-id", "é" * 128]],
    "--delay-key: expected at most 255 bytes, found 300": [
        ["--store-url", "postgresql://localhost/x", "send", "--delay-key", "k" * 300]
    ],
    "the daemon would refuse it: x-delay-key: keys and cancels need a store": [
        ["--mode", "native", "send", "--delay-key", "k"]
    ],
    "the daemon would refuse it: the properties are too long to carry": [
        ["send", *(word for n in range(227) for word in ("--header", f"h{n}={'x' * 1_000}"))]
    ],
    "--file: give the bodies and the ids of messages in their lines": [
        ["send", "--file", "-", "--body", "x"], ["send", "--file", "-", "--message-id", "x"]
    ],
    "'--after': expected a duration": [["compact", "--after", "7"]],
    "expected more than store.restore_ahead": [
        ["compact", "--after", "1d"], ["--set", "store.restore_ahead=8d", "compact"]
    ],
    "'--rows': 1 is not in the range": [["compact", "--rows", "1"]],
    "'--conf': expected KEY=VALUE": [["compact", "--conf", "nonsense"], ["compact", "--conf", "=1"]],
    "say what to restore": [["restore"], ["restore", "--all", "--within", "1d"]],
    "'--within': expected a duration": [["restore", "--within", "soon"]],
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "text"), [(one, text) for text, every in MISTAKES.items() for one in every])
def test_usage_and_configuration_exit_2(arguments: list[str], text: str) -> None:
    result = call(*arguments)
    assert (result.exit_code, result.stdout) == (ExitCode.USAGE, ""), result.output
    assert text in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("2027-01-15", 1_799_971_200_000), ("2027-01-15T08:00:00Z", 1_800_000_000_000),
        ("2027-01-15T09:00:00.0001+01:00", 1_800_000_000_001), ("2027-01-15T08:00:00", None), ("20270115", None),
        ("2027-02-30", None), ("tomorrow", None),
    ],
)  # fmt: skip
def test_an_instant_needs_an_offset_unless_it_is_a_date(text: str, found: int | None) -> None:
    if found is None:
        with pytest.raises(Expected, match="an instant with its offset"):
            instant_ms(text)
    else:
        assert instant_ms(text) == found


def test_a_misspelt_verb_is_answered_with_a_suggestion() -> None:
    told = call("statsu")
    assert told.exit_code == ExitCode.USAGE
    assert "No such command 'statsu'. Did you mean status?" in told.stderr
    assert "Did you mean" not in call("nonsense").stderr


def test_every_mistake_at_once_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "f.toml"
    file.write_text('mode = "stor"\n[broker]\nurl = "http://u:hunter2@h"\n')
    result = call("--config", str(file), "--set", "intake.prefetch=0", "check", env={"DELAYER_LOG__LEVEL": "loud"})
    assert result.exit_code == ExitCode.USAGE
    first, *others = result.stderr.splitlines()
    assert first == "delayer: the configuration has 4 mistakes:"
    places = [f"{file}: mode", f"{file}: broker.url", "flag --set: intake.prefetch"]
    places.append("environment variable DELAYER_LOG__LEVEL: log.level")
    assert [line.partition(": expected")[0].strip() for line in others] == places
    assert "hunter2" not in result.stderr


def test_unknown_route_lists_the_routes() -> None:
    routes = 'route=[{"from": "orders.in", "to": "o"}, {"from": ""}]'
    result = call("--set", routes, "send", "--route", "order.in")
    assert result.exit_code == ExitCode.USAGE
    assert result.stderr == (
        'delayer: --route: expected one that a route comes from ("orders.in", ""), found "order.in"\n'
    )


@pytest.mark.parametrize(
    "verb",
    [
        ["check"],
        ["status"],
        ["send", "--delay", "1s"],
        ["db", "upgrade"],
        ["db", "current"],
        *(["topology", verb] for verb in ("apply", "verify", "show", "remove")),
    ],
    ids=" ".join,
)
def test_out_of_reach_exits_3_and_says_so_without_a_traceback(verb: list[str]) -> None:
    result = call(*NOWHERE, *verb)
    assert result.exit_code == ExitCode.OUT_OF_REACH, result.output
    assert "out of reach" in result.stderr.lower()
    assert "Traceback" not in result.output
    assert "hunter2" not in result.output


def test_stdout_has_only_json() -> None:
    for verb in ("check", "status"):
        result = call(*NOWHERE, verb, "--json")
        assert result.exit_code == ExitCode.OUT_OF_REACH
        assert isinstance(json.loads(result.stdout), dict)


@pytest.mark.parametrize(
    ("error", "code", "next_step"),
    [
        (ConfigError([Problem("f", "k", "a", "b")]), ExitCode.USAGE, "f: k: expected a, found b"),
        (BrokerUnreachable("h:1: refused"), ExitCode.OUT_OF_REACH, "check broker.url"),
        (BrokerRefused("h:1: login"), ExitCode.OUT_OF_REACH, "permissions"),
        (TopologyMismatch([TopologyFinding("queue", "q", "x", "y")]), ExitCode.FOUND, "delayer check"),
        (StoreLost("connect: refused"), ExitCode.OUT_OF_REACH, "check store.url"),
        (
            to_store_lost("connect", asyncpg.InvalidPasswordError("no")),
            ExitCode.OUT_OF_REACH,
            "check user and password",
        ),
        (to_store_lost("upgrade", asyncpg.InsufficientPrivilegeError("no")), ExitCode.OUT_OF_REACH, "docs/security.md"),
        (to_store_lost("connect", asyncpg.InvalidCatalogNameError("no")), ExitCode.OUT_OF_REACH, "createdb -O"),
        (SchemaOutdated(None, "0001"), ExitCode.FOUND, "delayer db upgrade"),
        (SchemaOutdated("0002", "0001", newer=True), ExitCode.FOUND, "use that version of delayer, or a newer one"),
        (BadStoreUrl("store.url cannot be read"), ExitCode.USAGE, "store.url"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_every_expected_error_has_a_code_and_a_next_step(error: Exception, code: int, next_step: str) -> None:
    made = failure(error)
    assert made.exit_code == code
    assert next_step in made.message


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["check", "--config", "x"], "--config stands before the verb: delayer --config … check"),
        (["topology", "apply", "--mode", "x"], "--mode stands before the verb: delayer --mode … topology apply"),
    ],
    ids=" ".join,
)
def test_the_error_for_an_option_after_its_verb_shows_its_place(arguments: list[str], told: str) -> None:
    result = call(*arguments)
    assert result.exit_code == ExitCode.USAGE
    assert f"Error: {told}\n" in result.stderr


def test_an_error_is_printable_and_shows_no_secret() -> None:
    made = failure(BrokerUnreachable("evil\x1b[2J\r\n amqp://u:hunter2@h"))
    assert made.message.isprintable()
    assert "hunter2" not in made.message


NOW_MS = 1_800_000_000_123
OPT = ["x-opt-delivery-delay", "x-opt-delivery-time"]


def composed(draft: Draft, **keys: object) -> tuple[dict[str, object], int | None, int | None]:
    """The headers, the timestamp and the due instant of the message for a route with these keys."""
    store = {"url": "postgresql://localhost/x"}
    settings = Settings.model_validate({"store": store, "route": [{"from": "in", "to": "out", **keys}]})
    message = Composer(settings).compose(draft, NOW_MS)
    properties = Properties.parse(message.properties)
    headers = {one.name.decode(): one.value for one in properties.headers_items()}
    return headers, properties.timestamp, message.told["due_ms"]


@pytest.mark.parametrize(
    ("keys", "delay_ms", "at_ms", "headers", "timestamp", "due_ms"),
    [
        ({}, 10_000, None, {"x-delay": 10_000}, None, NOW_MS + 10_000),
        ({}, 0, None, {"x-delay": 0}, None, NOW_MS),
        ({}, None, NOW_MS + 5, {"x-deliver-at": NOW_MS + 5}, None, NOW_MS + 5),
        ({"default_delay": "7s"}, None, None, {}, None, NOW_MS + 7000),
        ({"delay_from": OPT}, 5, None, {OPT[0]: 5}, None, NOW_MS + 5),
        ({"delay_from": OPT[1:]}, 5, None, {OPT[1]: NOW_MS + 5}, None, NOW_MS + 5),
        ({"delay_from": ["timestamp"]}, 5, None, {}, 1_800_000_001, 1_800_000_001_000),
    ],
)
def test_the_delay_is_sent_in_a_form_that_the_route_reads(
    keys: dict[str, object],
    delay_ms: int | None,
    at_ms: int | None,
    headers: dict[str, int],
    timestamp: int | None,
    due_ms: int,
) -> None:
    assert composed(Draft.model_construct(delay=delay_ms, due=at_ms), **keys) == (headers, timestamp, due_ms)


@pytest.mark.parametrize(
    ("headers", "delay_from", "due_ms"),
    [
        ({"x-delay": 5}, ["x-delay"], NOW_MS + 5),
        ({"x-deliver-at": NOW_MS + 7}, ["x-delay", "x-deliver-at"], NOW_MS + 7),
        ({"x-due": 3, "x-dealy": 1}, ["header:x-due:s", "x-delay"], NOW_MS + 3000),
        ({"x-dealy": 1}, ["header:x-dealy"], NOW_MS + 1),
        ({"x-dealy": 1}, ["json:/at", "x-delay"], NOW_MS + 9),
        ({"x-delay": 5}, ["header:x-due"], NOW_MS + 60_000),
        ({"x-delay-cancel": "k", "X-Delay": 1}, ["x-delay"], None),
    ],
)
def test_a_delay_in_the_users_header_is_read_as_the_daemon_reads_it(
    headers: dict[str, Scalar], delay_from: list[str], due_ms: int | None
) -> None:
    draft = Draft.model_construct(headers=headers, body=b'{"at": %d}' % (NOW_MS + 9))
    found, _, due = composed(draft, delay_from=delay_from, default_delay="1m")
    assert (found, due) == (headers, due_ms)


LINES = {
    b"[]": "Input should be an object",
    b"{": "Invalid JSON: EOF while parsing an object",
    b'{"delya": "1s"}': 'message_id, found "delya"; did you mean "delay"?',
    b'{"delay": "soon"}': "delay: expected a duration",
    b'{"delay": 10}': "delay: expected a duration in whole numbers",
    b'{"due": 10}': "due: expected an instant",
    b'{"due": "tomorrow"}': "due: expected an instant",
    b'{"delay": "1s", "due": "2031-01-31T08:00:00Z"}': "expected delay or due, found both",
    b'{"headers": [1]}': "headers: expected a table of headers",
    b'{"headers": {"a": null}}': 'headers: expected a string, a number, true or false for "a"',
    b'{"headers": {"a": 9223372036854775808}}': 'headers: expected an integer of 64 bits for "a"',
    b'{"headers": {"a": "\\ud800"}}': "Invalid JSON: unexpected end of hex escape",
    b'{"body_b64": "Y!Q=="}': "body_b64: expected base64",
    b'{"body": 1}': "body: Input should be a valid bytes",
    b'{"headers": {"%s": 1}}' % (b"n" * 129): "headers: expected names of 1 to 128 bytes",
    b'{"body": "a", "body_b64": "YQ=="}': "expected body or body_b64, found both",
    b'{"message_id": "%s"}' % (b"m" * 256): "message_id: expected at most 255 bytes, found 256",
    b'{"exchange": "nowhere"}': "exchange: expected one that a route comes from",
    b'{"headers": {"x-delay": "soon"}}': "the daemon would refuse it: x-delay: expected milliseconds",
}


@pytest.mark.parametrize("line", LINES)
def test_a_wrong_line_is_named_and_nothing_is_sent(line: bytes, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b'{"delay": "1s"}\n\n' + line + b"\n")
    result = call(*NOWHERE, "send", "--file", str(file))
    assert result.exit_code == ExitCode.OUT_OF_REACH  # Nothing is read before a broker exists.
    composer = Composer(Settings.model_validate({"route": [{"from": "in", "to": "out"}]}))
    with file.open("rb") as opened, pytest.raises(Misused) as wrong:
        list(portions_of(opened, composer, Draft()))
    assert str(wrong.value).startswith("line 3: ") and LINES[line] in str(wrong.value)


def test_portions_are_bounded_and_have_each_message_id_once() -> None:
    composer = Composer(Settings.model_validate({"route": [{"from": "in", "to": "out"}]}))
    body = b'{"body": "%s"}\n' % (b"x" * (PORTION_BYTES // 3))
    text = b"{}\n" * (PORTION + 1) + body * 4 + b'{"message_id": "a"}\n' * 2
    portions = list(portions_of(io.BytesIO(text), composer, Draft.model_construct(delay=5)))
    assert [len(one) for one in portions] == [PORTION, 4, 2, 1]
    for portion in portions:
        assert sum(len(one.body) for one in portion) <= PORTION_BYTES
        assert len({one.message_id for one in portion}) == len(portion)
    assert [one.line for portion in portions for one in portion] == list(range(1, PORTION + 8))


def test_the_shortcuts_change_the_settings() -> None:
    words = "--set mode=store --mode native --broker-url amqp://a --store-url postgresql://b run"
    with cli.make_context("delayer", words.split()) as context:
        context.invoke(cli.callback, **context.params)
        seen = context.obj.settings()
    assert (seen.mode, str(seen.broker.url), seen.store_url) == ("native", "amqp://a", "postgresql://b")


def test_an_interrupted_import_names_the_next_step(tmp_path: Path) -> None:
    """The store does not answer, and Ctrl-C stops waiting."""

    def interrupt() -> None:
        with store.accept()[0] as connection:
            connection.recv(1)  # The client has asked, and waits.
            os.kill(os.getpid(), signal.SIGINT)
            while connection.recv(4096):
                pass

    with socket.create_server(("127.0.0.1", 0)) as store, ThreadPoolExecutor(1) as thread, ExitStack() as stack:
        # As in a new process: an earlier test may have run a daemon in this process, which ignores signals when it
        # exits.
        stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))
        store.settimeout(10)
        thread.submit(interrupt)
        url = f"postgresql://127.0.0.1:{store.getsockname()[1]}/d"
        done = call("--store-url", url, "import", "jsonl", "run", str(tmp_path / "backlog.jsonl"), "--yes")
    assert done.exit_code == 130
    assert "the same command, which resumes where it stopped" in done.stderr
    assert "Traceback" not in done.output


@pytest.mark.parametrize("inherited", [signal.default_int_handler, signal.SIG_IGN])
@pytest.mark.parametrize("waits", [False, True], ids=["plain", "asyncio"])
def test_sigterm_stops_a_command_that_a_script_started(waits: bool, inherited: Any) -> None:
    """A script's ``delayer … &`` inherits an ignored SIGINT, the signal by which such a command stops itself."""
    ended: list[str] = []

    async def wait() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        ended.append("as if there had been no signal")

    @click.command(cls=Stoppable)
    def work() -> None:
        if waits:
            asyncio.run(wait())
            return
        os.kill(os.getpid(), signal.SIGTERM)
        ended.append("as if there had been no signal")

    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, inherited))
        done = CliRunner().invoke(work)
    assert (done.exit_code, ended) == (143, [])
    assert "ended by SIGTERM" in done.stderr


SAID = "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: {} (_ssl.c:1006)"


@pytest.mark.parametrize(
    ("said", "next_step"),
    [
        (SAID.format("unable to get local issuer certificate"), "say in FILE who signed"),
        (SAID.format("Hostname mismatch, certificate is not valid for '10.0.0.1'."), "name the host in URL"),
        (SAID.format("IP address mismatch, certificate is not valid for '10.0.0.1'."), "name the host in URL"),
        (SAID.format("certificate has expired"), "renew"),
        ("SSL error: certificate verify failed", "say in FILE who signed"),
        ("Connect call failed", ""),
    ],
)
def test_a_refused_certificate_has_its_next_step(said: str, next_step: str) -> None:
    found = certificate_advice(said, "FILE", "URL")
    assert found.startswith(next_step)
    assert bool(found) is bool(next_step)


def test_certificate_errors_name_the_setting_of_the_peer() -> None:
    said = SAID.format("self-signed certificate")
    assert "broker.ca_file" in failure(BrokerUnreachable(f"h:1 vhost '/': {said}")).message
    assert "sslrootcert" in failure(to_store_lost("connect", ssl.SSLCertVerificationError(1, said))).message
