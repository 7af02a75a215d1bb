"""Bad configurations: every error is found, with its place and key, and secrets are never shown."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from delayer.config.errors import ConfigError, Problem
from delayer.config.loading import load
from delayer.core.readable import mask

NO_FILE = Path(os.devnull)


def problems(config: Path | None, environ: dict[str, str], flags: dict[str, str]) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load(config, environ, flags)
    assert str(caught.value) == "\n".join(map(str, caught.value.problems))
    assert all(one.expected for one in caught.value.problems)
    return caught.value.problems


def problems_of(text: str, tmp_path: Path) -> tuple[Problem, ...]:
    """The problems of a file with this content."""
    file = tmp_path / "delayer.toml"
    file.write_text(text)
    return problems(file, {}, {})


# Invalid values of each key, in the form of the file and of the error.
VALUES = {
    "mode": ['"stor"', "1"],
    "broker.url": ['""', "5672", '"amqp://h/a b"', '"amqp://h/a/b"'],
    "broker.url_file": ['"/nowhere/x"'],
    "broker.ca_file": ['"/nowhere/ca"'],
    "broker.key_file": ['"/dev/null"'],
    "broker.verify": ["1", '"yes"'],
    "broker.heartbeat": ['"500ms"'],
    "store.url": ['"mysql://h"'],
    "store.lanes": ["0"],
    "store.restore_ahead": ['"4m"'],
    "store.history_days": ["-1", '"7d"', "401"],
    "intake.queue": ['""', '"a\\nb"', '"delayer.delay-level-03"'],
    "intake.queue_type": ['"stream"'],
    "intake.consumers": ['"two"'],
    "intake.give_back_after": ['"999ms"'],
    "intake.prefetch": ["0", "65536", "true", '"5"', "5.0"],
    "intake.max_delay": ["10", '"10 years"', "2026-01-01", '"40000d"'],
    "native.prefix": ['"amq."', '"a b"'],
    "native.due_queue": ['"delays.*"', '"#"', '"delays"'],
    "takeover": ['"celery"'],
    "http.listen": ['"9419"', '"::1:9419"', '"h:65536"', '"a..b:9419"'],
    "log.level": ['"loud"'],
    "log.format": ['"xml"'],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in VALUES.items() for value in values])
def test_an_invalid_value_is_refused(key: str, value: str, tmp_path: Path) -> None:
    (problem,) = problems_of(f"{key} = {value}", tmp_path)
    assert (problem.source, problem.key, problem.found) == (str(tmp_path / "delayer.toml"), key, value)


UNKNOWN = "an unknown one"
IN_A, IN_B = '[[route]]\nfrom = "a"\n', '[[route]]\nfrom = "b"\n'
RETRY = f"{IN_A}retry = "
CELERY, NSB = '[[takeover]]\ncascade = "celery"\n', '[[takeover]]\ncascade = "nservicebus-v2"\n'
LONG = {"q" * 200: f'"{"q" * 78}…', "ü" * 100: '"' + r"\u00fc" * 13 + "…"}

OUT, DIRECT = (
    '[[destination]]\nexchange = "delayer.out"\n',
    '[[destination]]\nexchange = "delayer.out"\ntype = "direct"\n',
)
IN_OUT = '[[route]]\nfrom = "delayer.out"\nto = "c"\n'
DEAD = f'{RETRY}{{exhausted = "dead"}}\n[[destination]]\nqueue = "dead"\n'
# Contents of files that declare a name in two ways, in one of the modes; the key of the second, and the name.
TWICE = [
    (OUT + DIRECT, "destination[1]", "delayer.out"),
    (IN_OUT + OUT, "destination[0]", "delayer.out"),
    (DEAD, "destination[0]", "dead"),
    *((f'[[destination]]\nqueue = "{name}"', "destination[0]", name) for name in ("delays", "delays.due")),
    ('[[destination]]\nexchange = "delays.refused"', "destination[0]", "delays.refused"),
    (f'{RETRY}{{exhausted = "delayer.delay-level-03"}}', "route[0].retry.exhausted", "delayer.delay-level-03"),
]

# The content of a file; key and found value of each problem in it.
FILES: list[tuple[str, dict[str, str]]] = [
    ('broker = "amqp://u:pw@h"', {"broker": '"amqp://u:***@h"'}),
    ('[broker]\nurl = "http://u:pw@h"', {"broker.url": '"http://u:***@h"'}),
    ('[broker]\nurl = "secret"', {"broker.url": "a text that is no URL (not shown)"}),
    ('[broker]\nurl = "amqp://u:p/w@h"', {"broker.url": '"***"'}),
    ('[broker]\nurl = "amqp://h"\nurl_file = "/dev/null"', {"broker.url_file": "both"}),
    ('[broker]\nmanagement_url = "amqp://u:pw@h"', {"broker.management_url": '"amqp://u:***@h"'}),
    ('[intake]\nqueue = ["a"]', {"intake.queue": "a list of 1"}),
    (f'[intake]\nqueue = "{"é" * 128}"', {"intake.queue": json.dumps("é" * 128)[:79] + "…"}),
    ('[intake]\nqueue = "delays.due"', {"intake.queue": '"delays.due"'}),
    (f'[native]\nprefix = "{"p" * 114}"', {"native.prefix": '"' + "p" * 78 + "…"}),
    *((f'native.due_queue = "{name}"', {"native.due_queue": found}) for name, found in LONG.items()),
    ('[http]\nmetrics_listen = "127.0.0.1:9419"', {"http.metrics_listen": '"127.0.0.1:9419"'}),
    ('[native]\ndue_queue = "x"\n[refused]\nqueue = "x"', {"refused.queue": '"x"'}),
    # Routes.
    ("route = []", {"route": "a list of 0"}),
    ('[route]\nfrom = "a"', {"route": "a table"}),
    ("route = [1]", {"route[0]": "1"}),
    ('[[route]]\nto = "a"', {"route[0].from": "nothing"}),
    (
        f'[[route]]\nto = "a"\n{IN_A}routing_key = "delays"',
        {"route[0].from": "nothing", "route[1].routing_key": '"delays"'},
    ),
    (f'{IN_A}{IN_B}late_action = "drop"', {"route[1].late_action": '"drop"'}),
    (f'{IN_A}to = "a"', {"route[0].to": '"a"'}),
    (f'{IN_A}routing_key = "delays"', {"route[0].routing_key": '"delays"'}),
    (f"{IN_A}{IN_B}{IN_A}", {"route[2].from": '"a"'}),
    (f'{IN_A}to = "b"\n{IN_B}to = "a"', {"route[0].to": '"b"', "route[1].to": '"a"'}),
    (f'{IN_A}delay_from = "x-delay"', {"route[0].delay_from": '"x-delay"'}),
    (f'{IN_A}delay_from = ["x-dely"]', {"route[0].delay_from": "a list of 1"}),
    (f'{IN_A}delay_from = ["x-delay", "x-delay"]', {"route[0].delay_from": "a list of 2"}),
    (f'{IN_A}delay_from = ["json:nextattempt.time"]', {"route[0].delay_from": "a list of 1"}),
    *((f'{IN_A}delay_from = ["header:{one}"]', {"route[0].delay_from": "a list of 1"}) for one in (":s", "a:sec", "s")),
    (f'{IN_A}allow_exchanges = "b"', {"route[0].allow_exchanges": '"b"'}),
    (f'{IN_A}default_delay = "61m"\n[intake]\nmax_delay = "1h"', {"route[0].default_delay": '"61m"'}),
    (f'{IN_A}default_delay = "1m"\nrequire_delay = true', {"route[0].require_delay": "true"}),
    ('[[route]]\nfrom = "delayer.delay-strays"', {"route[0].from": '"delayer.delay-strays"'}),
    (f'{IN_A}to = "delayer.delay-delivery"', {"route[0].to": '"delayer.delay-delivery"'}),
    (f'{IN_A}to = ""\nrouting_key = "delays.due"', {"route[0].routing_key": '"delays.due"'}),
    (f'{IN_A}to = "out"\n[refused]\nqueue = "a"', {"route[0].from": '"a"'}),
    *((f'{IN_A}key_from = "{one}"', {"route[0].key_from": f'"{one}"'}) for one in ("header:", "id", "header:a\\nb")),
    (f"{IN_A}key_from = 5", {"route[0].key_from": "5"}),
    (f'mode = "native"\n{IN_B}{IN_A}key_from = "message_id"', {"route[1].key_from": "none"}),
    (f"{RETRY}{{}}", {"route[0].retry.exhausted": "nothing"}),
    (f'{RETRY}{{exhausted = "parked", first = "2h", max = "1h"}}', {"route[0].retry.max": '"1h"'}),
    *(
        (f'{RETRY}{{exhausted = "parked"}}\n{key} = "{other}"', {"route[0].retry": "a table"})
        for key, other in (("to", "b"), ("routing_key_header", "b"), ("key_from", "message_id"))
    ),
    (f'{RETRY}{{exhausted = "delays.refused"}}', {"route[0].retry.exhausted": '"delays.refused"'}),
    (
        f'{RETRY}{{exhausted = "parked", factor = 0.5, jitter = 2, attempts = 0, first = 5}}',
        {
            f"route[0].retry.{key}": found
            for key, found in zip(("first", "factor", "jitter", "attempts"), ("5", "0.5", "2", "0"), strict=True)
        },
    ),
    # Rules of the audit.
    (
        '[[audit.rule]]\nname = "A b"\nsql = " "\nseverity = "bad"\n',
        {"audit.rule[0].name": '"A b"', "audit.rule[0].sql": '" "', "audit.rule[0].severity": '"bad"'},
    ),
    # Takeovers and destinations.
    ('[[takeover]]\ncascade = "delayer"', {"takeover[0].cascade": '"delayer"'}),
    ('[[takeover]]\n[refused]\nqueue = "delays"', {"takeover[0].cascade": "nothing", "refused.queue": '"delays"'}),
    (f"{NSB}levels_from = 28", {"takeover[0].levels_from": "28"}),
    (f"{CELERY}{CELERY}", {"takeover[1].cascade": '"celery"'}),
    (f'{CELERY}prefix = "shop"\n{CELERY}prefix = "shop"', {"takeover[1].cascade": '"celery"'}),
    (f'{NSB}prefix = "shop"', {"takeover[0].prefix": '"shop"'}),
    (f'{CELERY}prefix = "a b"', {"takeover[0].prefix": '"a b"'}),
    (f'mode = "native"\n{CELERY}', {"takeover": "none"}),
    (f'mode = "native"\nstore = 1\n{CELERY}', {"store": "1", "takeover": "none"}),
    (f'{CELERY}[intake]\nqueue = "celery_delayed_3"', {"intake.queue": '"celery_delayed_3"'}),
    (f'{CELERY}[[route]]\nfrom = "celery_delayed_27"', {"route[0].from": '"celery_delayed_27"'}),
    (
        '[[destination]]\nqueue = "amq.mine"\ntype = "headers"\nkeys = "outbox"',
        {"destination[0].type": '"headers"', "destination[0].queue": '"amq.mine"', "destination[0].keys": '"outbox"'},
    ),
]


@pytest.mark.parametrize(("text", "found"), FILES, ids=[text.replace("\n", " ")[:60] for text, _ in FILES])
def test_every_mistake_of_a_file_is_found(text: str, found: dict[str, str], tmp_path: Path) -> None:
    assert {one.key: one.found for one in problems_of(text, tmp_path)} == found


@pytest.mark.parametrize(("text", "key", "name"), TWICE, ids=range(len(TWICE)))
@pytest.mark.parametrize("mode", ["native", "store"])
def test_a_name_declared_in_two_ways_is_a_mistake(mode: str, text: str, key: str, name: str, tmp_path: Path) -> None:
    [problem] = problems_of(f'mode = "{mode}"\nstore.url = "postgresql://h/d"\n{text}', tmp_path)
    assert problem.key == key
    assert f"{name!r} is declared in two ways" in problem.found


@pytest.mark.parametrize(
    ("text", "key", "hint"),
    [
        ('mod = "store"', "mod", "did you mean mode?"),
        ("prefetch = 5", "prefetch", "did you mean intake.prefetch?"),
        ('[brokr]\nurl = "x"', "brokr", "did you mean broker?"),
        ('[broker]\npasswrd = "hunter2"', "broker.passwrd", "known here: url, "),
        (f'{IN_A}late_actoin = "hold"', "route[0].late_actoin", "did you mean late_action?"),
        (f'{RETRY}{{exhausted = "parked", last = "1h"}}', "route[0].retry.last", "known here: first, factor"),
        ('[native]\ncascade = "celery"', "native.cascade", "known here: prefix, due_queue"),
    ],
)
def test_the_error_for_an_unknown_key_suggests_a_known_one(text: str, key: str, hint: str, tmp_path: Path) -> None:
    (problem,) = problems_of(text, tmp_path)
    assert (problem.key, problem.found) == (key, UNKNOWN)
    assert problem.hint.startswith(hint)


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    """Many errors in one file, and errors in two more layers."""
    file = tmp_path / "delayer.toml"
    file.write_text(
        'mode = "stor"\n[broker]\nurl = "x"\nverify = 1\n[intake]\nprefetch = 0\nmax_delay = 10\n'
        '[[route]]\nfrom = "a"\nto = "a"\n[[route]]\nfrom = "a"\nfinsh = ""\n[refused]\nqueue = "delays"\n'
    )
    environ = {"DELAYER_HTTP__LISTEN": "x", "DELAYER_BROKER_URL": "amqp://h", "DELAYER_ROUTE__0__FROM": "a"}
    flags = {"log.level": "loud", "log.levl": "info", "http": "{"}
    found = {(one.source, one.key) for one in problems(file, environ, flags)}
    assert found == {
        (str(file), "mode"),
        (str(file), "broker.url"),
        (str(file), "broker.verify"),
        (str(file), "intake.prefetch"),
        (str(file), "intake.max_delay"),
        (str(file), "route[0].to"),
        (str(file), "route[1].finsh"),
        (str(file), "route[1].from"),
        (str(file), "refused.queue"),
        ("environment variable DELAYER_HTTP__LISTEN", "http.listen"),
        ("environment variable DELAYER_BROKER_URL", ""),
        ("environment variable DELAYER_ROUTE__0__FROM", ""),
        ("flag --set", "log.level"),
        ("flag --set", "log.levl"),
        ("flag --set", "http"),
    }


DEEP = "an unknown one" if sys.version_info < (3, 14) else "thousands of levels"
"""A key of 5,000 parts. Python 3.14 reads no such key."""


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b'mode = "store"\n\nbroker url\n', "Expected '=' after a key in a key/value pair (at line 3, column 8)"),
        (b'mode = "store', "Unterminated string (at end of document)"),
        (b"[a]\n[a]\n", "Cannot declare ('a',) twice (at line 2, column 3)"),
        (b"[intake]\nprefetch = " + b"9" * 5_000, "Exceeds the limit (4300 digits) for integer string conversion"),
        (b"a = " + b"[" * 5_000, "thousands of levels"),
        (b"a = " + b"[" * 40 + b"]" * 40, "an unknown one"),
        (b".".join([b"a"] * 5_000) + b" = 1", DEEP),
        (b".".join([b"broker", *[b"a"] * 5_000]) + b" = 1", DEEP),
        (b"[http]\nlabel = " + b"[" * 90 + b"]" * 90, "a list of 1"),
        (b'mode = "\xff"\n', "'utf-8' codec can't decode byte 0xff in position 8: invalid start byte"),
    ],
)
def test_not_toml(content: bytes, found: str, tmp_path: Path) -> None:
    file = tmp_path / "delayer.toml"
    file.write_bytes(content)
    (problem,) = problems(file, {}, {})
    assert problem.source == str(file)
    assert problem.found.startswith(found)


def test_text_without_quotes_is_named(tmp_path: Path) -> None:
    file = tmp_path / "delayer.toml"
    file.write_text("mode = store")
    (problem,) = problems(file, {}, {})
    assert problem.expected == "TOML in UTF-8, with quotes around text"


def test_no_such_file(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path / "missing.toml", {}, {})
    assert (problem.source, problem.found) == (f"{tmp_path}/missing.toml", "No such file or directory")
    (problem,) = problems(tmp_path, {}, {})
    assert problem.found == "Is a directory"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("DELAYER_BROKER_URL", "did you mean DELAYER_BROKER__URL?"),
        ("DELAYER_MOD", "did you mean DELAYER_MODE?"),
        ("DELAYER_ROUTE__0__ROUTING_KEY", "routes are set together: DELAYER_ROUTE='[{…}]'"),
    ],
)
def test_unknown_variable(name: str, hint: str) -> None:
    (problem,) = problems(NO_FILE, {name: "hunter2"}, {})
    assert (problem.source, problem.found, problem.hint) == (f"environment variable {name}", UNKNOWN, hint)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('[{"exchange": "hunter2"', "no JSON: Expecting ',' delimiter: line 1 column 24 (char 23)"),
        ('{"exchange": "hunter2"}', "an object: put it in [ ]"),
        ('"hunter2"', "something else"),
        ("[" * 100_000, "thousands of levels"),
    ],
)
def test_text_that_is_no_list(text: str, found: str) -> None:
    (problem,) = problems(NO_FILE, {"DELAYER_DESTINATION": text}, {})
    assert (problem.expected, problem.found) == ("a JSON list", found)


@pytest.mark.parametrize(
    ("flag", "key", "value"),
    [
        ("--mode", "mode", "x"),
        ("--broker-url", "broker.url", "x"),
        ("--set", "intake.prefetch", "many"),
        ("--set", "broker.verify", "maybe"),
        ("--set", "route", "x"),
        ("--set", "route", "{}"),
        ("--set", "broker", "[]"),
    ],
)
def test_a_mistake_of_a_flag_names_it(flag: str, key: str, value: str) -> None:
    (problem,) = problems(NO_FILE, {}, {key: value})
    assert (problem.source, problem.key) == (f"flag {flag}", key)


SECRETS = [
    {"broker.url": "amqp://u:hun@ter2@h/a/b"},
    {"broker.url": "hunter2"},
    {"broker.url": "amqp://u:hunter2%40h"},
    {"store.url": "postgresql://u:12,hunter2%40h/d"},
    {"store.url": "postgresql://u:12,hunter2:@a,b/d"},
    {"store.url": "host=h password=hunter2"},
    {"broker": '{"url": "amqp://u:hunter2@h'},
    {"broker": '"hunter2"'},
    {"broker": '{"password": "hunter2"}'},
    {"broker.password": "hunter2"},
    {"http.listen": "http://u:hunter2@h"},
    {"http.tokens": "ops act hunter2"},
    {"log.level": "postgresql://u:hunter2@h/d"},
]
"""More than the secrets of tests/unit/imports/test_secrets.py."""


@pytest.mark.parametrize("flags", SECRETS, ids=str)
def test_no_error_shows_a_secret(flags: dict[str, str], tmp_path: Path) -> None:
    everything = [*problems(NO_FILE, {}, flags)]
    file = tmp_path / "secret"
    for key, value in flags.items():
        if key in ("broker.url", "store.url", "http.tokens"):
            file.write_text(value)
            everything += problems(NO_FILE, {}, {f"{key}_file": str(file)})
    text = "\n".join(str(one) + repr(one) for one in everything)
    assert "hunter2" not in text
    assert "ter2" not in text


@pytest.mark.parametrize("content", ["ops act short\n", None])
def test_only_the_daemon_needs_the_file_of_tokens(content: str | None, tmp_path: Path) -> None:
    """A mistake there must not stop `delayer cancel`."""
    file = tmp_path / "tokens"
    if content is not None:
        file.write_text(content)
    flags = {"http.tokens_file": str(file)}
    assert str(load(None, {}, flags, tokens=False).http.tokens_file) == str(file)
    [problem] = problems(None, {}, flags)
    assert problem.key == "http.tokens_file"


def test_the_source_of_a_bad_url_in_a_file_is_that_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("nonsense")
    (problem,) = problems(NO_FILE, {}, {"broker.url_file": str(file)})
    assert (problem.source, problem.key) == (str(file), "broker.url")


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("amqp://u:p@h/v", "amqp://u:***@h/v"),
        ("amqp://u@h/v", "amqp://u@h/v"),
        ("amqp://h:5672/v", "amqp://h:5672/v"),
        ("see amqp://u:p@h and http://a:b@c.", "see amqp://u:***@h and http://a:***@c."),
        ("postgresql://h/d?password=x&a=1", "postgresql://h/d?password=***"),
        ("host=h password='a b' user=u", "host=h password=*** user=u"),
        ("amqps://u:a/b@c@h", "amqps://u:***@h"),
        ("nothing to hide: a@b", "nothing to hide: a@b"),
    ],
)
def test_mask(text: str, masked: str) -> None:
    assert mask(text) == masked


@pytest.mark.parametrize("place", ["host:99999", "host:0", "[::1]:65536", "host:123456"])
def test_the_error_for_an_invalid_port_names_the_port(place: str) -> None:
    (problem,) = problems(NO_FILE, {}, {"broker.url": f"amqp://me:secret@{place}/"})
    assert "a port is a number from 1 to 65535" in problem.expected
    assert "password are written" not in problem.expected
    assert "secret" not in str(problem)


@pytest.mark.parametrize("password", ["12/3", "pa/ss", "1#2", "a#b", "1/2@3"])
@pytest.mark.parametrize(("key", "scheme"), [("broker.url", "amqp"), ("store.url", "postgresql")])
def test_the_error_for_an_unescaped_password_says_how_to_escape_it(key: str, scheme: str, password: str) -> None:
    (problem,) = problems(NO_FILE, {}, {key: f"{scheme}://me:{password}@host/name"})
    assert "a password are written %2F %40 %3A %23" in problem.expected
    assert password not in str(problem)


def test_an_at_sign_in_a_vhost_is_escaped_as_well() -> None:
    """An unescaped @ could belong to the password. Then the host and the user would be parts of the password."""
    (problem,) = problems(NO_FILE, {}, {"broker.url": "amqp://me:se@cr/et@host"})
    assert problem.expected.endswith("%2F %40 %3A %23; so is an @ behind the host, %40")
    assert load(NO_FILE, {}, {"broker.url": "amqp://me:secret@host/a%40b"}).broker_url.startswith(
        "amqp://me:secret@host/a%40b"
    )
    assert load(NO_FILE, {}, {"store.url": "postgresql://host/d?user=me@azure"}).store_url is not None


def test_the_debug_log_of_the_library_shows_no_secret(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYDANTIC_SETTINGS_DEBUG", "1")
    caplog.set_level("DEBUG", "pydantic_settings")
    load(NO_FILE, {}, {"broker.url": "amqp://u:hunter2@h"})
    assert "hunter2" not in caplog.text + "".join(capfd.readouterr())


ATTRIBUTES = "target_session_attrs=primary"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql://u:hunter2@a,b/db", "several hosts with target_session_attrs=primary"),
        ("postgresql://u:hunter2@a,b/db?target_session_attrs=", "several hosts with target_session_attrs=primary"),
        ("postgresql:///db?host=a,b", "several hosts with target_session_attrs=primary"),
        ("postgresql:///db?host=a%2Cb&port=1,2", "several hosts with target_session_attrs=primary"),
        (f"postgresql://u:hunter2@a,b,/db?{ATTRIBUTES}", "each of several hosts has a name"),
        (f"postgresql://u:hunter2@,a/db?{ATTRIBUTES}", "each of several hosts has a name"),
        (f"postgresql://u:hunter2@a,:5433/db?{ATTRIBUTES}", "each of several hosts has a name"),
        (f"postgresql:///db?host=a,&port=1,2&{ATTRIBUTES}", "each of several hosts has a name"),
    ],
)
def test_a_list_of_hosts_names_each_and_says_which_is_wanted(url: str, expected: str) -> None:
    [problem] = problems(NO_FILE, {}, {"store.url": url})
    assert expected in str(problem)
    assert "hunter2" not in str(problem)


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://a,b/db?{ATTRIBUTES}",
        f"postgresql:///db?host=a,/run/postgresql&port=1,2&{ATTRIBUTES}",
        "postgresql://a,b/db?target_session_attrs=prefer-standby",
        "postgresql://u:with,comma@a/db",
        "postgresql:///db",
        "postgresql://:5433/db",
    ],
)
def test_a_list_of_hosts_and_a_single_host_are_valid(url: str) -> None:
    assert load(None, {}, {"store.url": url}).store_url == url
