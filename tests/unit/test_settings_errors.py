"""Bad configurations and, to the letter, what is said about them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from delayer.core.forms import DELAY_FORMS
from delayer.settings import ConfigError, Problem, load, loading, mask

DURATION = 'a duration such as "250ms", "10s", "5m", "12h" or "30d"'
KNOWN = "a known key"
OF_CELERY = 'none, or beside cascade = "celery" a short one of letters, digits and -_.:'
UNKNOWN = "an unknown one"
LISTEN = '"host:port" (IPv6 as "[::1]:port"), or "" for none'
BROKER_URL = "a URL like amqp://user:password@host:5672/vhost, or amqps:// for TLS"
STORE_URL = "a URL like postgresql://user:password@host:5432/database"
FORMS = f"a list of {', '.join(DELAY_FORMS)} and json:/pointer, each at most once"
RETRY = '[[route]]\nfrom = "a"\nretry = '
ROUTES = "one or more routes: [[route]] tables in the file, a JSON list of objects elsewhere"


@pytest.fixture(autouse=True)
def _no_system_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "SYSTEM_FILE", tmp_path / "none.toml")


def problems(config: Path | None, environ: dict[str, str], flags: dict[str, str]) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load(config, environ, flags)
    assert str(caught.value) == "\n".join(map(str, caught.value.problems))
    return caught.value.problems


# text of the file, then (key, expected, found, hint) of each problem in it
FILES: list[tuple[str, list[tuple[str, str, str, str]]]] = [
    ('mode = "stor"', [("mode", '"native" or "store"', '"stor"', "")]),
    ("mode = 1", [("mode", '"native" or "store"', "1", "")]),
    ("workers = 0", [("workers", "a whole number of at least 1", "0", "")]),
    ("workers = 65", [("workers", "a whole number of at most 64", "65", "")]),
    ("workers = true", [("workers", "a whole number", "true", "")]),
    ('workers = "2"', [("workers", "a whole number", '"2"', "")]),
    ('mod = "store"', [("mod", KNOWN, UNKNOWN, "did you mean mode?")]),
    ("prefetch = 5", [("prefetch", KNOWN, UNKNOWN, "did you mean intake.prefetch?")]),
    ('broker = "amqp://u:pw@h"', [("broker", "a table", '"amqp://u:***@h"', "")]),
    ('[brokr]\nurl = "x"', [("brokr", KNOWN, UNKNOWN, "did you mean broker?")]),
    ('[broker]\nurl = "http://u:pw@h"', [("broker.url", BROKER_URL, '"http://u:***@h"', "")]),
    ('[broker]\nurl = "secret"', [("broker.url", BROKER_URL, "a text that is no URL (not shown)", "")]),
    ('[broker]\nurl = ""', [("broker.url", BROKER_URL, '""', "")]),
    ("[broker]\nurl = 5672", [("broker.url", BROKER_URL, "5672", "")]),
    ('[broker]\nurl = "amqp://h/a b"', [("broker.url", BROKER_URL, '"amqp://h/a b"', "")]),
    (
        '[broker]\nurl = "amqp://h/a/b"',
        [
            (
                "broker.url",
                'a URL with one virtual host at its end; a "/" in its name is written %2F',
                '"amqp://h/a/b"',
                "",
            )
        ],
    ),
    (
        '[broker]\nurl = "amqp://u:p/w@h"',
        [
            (
                "broker.url",
                f"{BROKER_URL}; characters like / @ : # in a password are written %2F %40 %3A %23",
                '"amqp://u:***@h"',
                "",
            )
        ],
    ),
    ('[broker]\npasswrd = "hunter2"', [("broker.passwrd", KNOWN, UNKNOWN, "")]),
    (
        '[broker]\nurl = "amqp://h"\nurl_file = "/dev/null"',
        [("broker.url_file", "either url or url_file", "both", "")],
    ),
    (
        '[broker]\nurl_file = "/nowhere/x"',
        [("broker.url_file", "a file that can be read", '"/nowhere/x"', "No such file or directory")],
    ),
    (
        '[broker]\nurl_file = "${CREDENTIALS_DIRECTORY}/x"',
        [
            (
                "broker.url_file",
                "CREDENTIALS_DIRECTORY to be set",
                '"${CREDENTIALS_DIRECTORY}/x"',
                "LoadCredential= in the unit sets it for the daemon; in a shell: sudo "
                "CREDENTIALS_DIRECTORY=/etc/delayer delayer check",
            )
        ],
    ),
    (
        '[broker]\nca_file = "/nowhere/ca"',
        [("broker.ca_file", "a file that can be read", '"/nowhere/ca"', "No such file or directory")],
    ),
    (
        '[broker]\nkey_file = "/dev/null"',
        [("broker.key_file", "cert_file beside key_file", '"/dev/null"', "")],
    ),
    ("[broker]\nverify = 1", [("broker.verify", "true or false", "1", "")]),
    ('[broker]\nverify = "yes"', [("broker.verify", "true or false", '"yes"', "")]),
    (
        '[store]\nrestore_ahead = "4m"',
        [("store.restore_ahead", 'a duration of at least "5m": what is restored later would be late', '"4m"', "")],
    ),
    (
        '[broker]\nheartbeat = "500ms"',
        [("broker.heartbeat", 'whole seconds from "0s" (off) to "65535s"', '"500ms"', "")],
    ),
    (
        '[broker]\nmanagement_url = "amqp://u:pw@h"',
        [("broker.management_url", 'a URL like http://user:password@host:15672, or ""', '"amqp://u:***@h"', "")],
    ),
    (
        '[intake]\nqueue = ""',
        [
            (
                "intake.queue",
                'the name of a queue: not empty, and not beginning with "amq.", which the broker keeps for itself',
                '""',
                "",
            )
        ],
    ),
    (
        '[intake]\nqueue = "a\\nb"',
        [("intake.queue", "the name of a queue without control characters", '"a\\nb"', "")],
    ),
    (
        f'[intake]\nqueue = "{"é" * 128}"',
        [("intake.queue", "the name of a queue of at most 255 bytes", json.dumps("é" * 128)[:79] + "…", "")],
    ),
    ('[intake]\ngive_back_after = "999ms"', [("intake.give_back_after", 'a duration of at least "1s"', '"999ms"', "")]),
    ("[intake]\nprefetch = 0", [("intake.prefetch", "a whole number of at least 1", "0", "")]),
    ("[intake]\nprefetch = 65536", [("intake.prefetch", "a whole number of at most 65535", "65536", "")]),
    ("[intake]\nprefetch = true", [("intake.prefetch", "a whole number", "true", "")]),
    ('[intake]\nprefetch = "5"', [("intake.prefetch", "a whole number", '"5"', "")]),
    ("[intake]\nprefetch = 5.0", [("intake.prefetch", "a whole number", "5.0", "")]),
    (
        "[intake]\nmax_delay = 10",
        [("intake.max_delay", f'{DURATION} (a bare number has no unit: write "10s" or "10ms")', "10", "")],
    ),
    ('[intake]\nmax_delay = "10 years"', [("intake.max_delay", DURATION, '"10 years"', "")]),
    ("[intake]\nmax_delay = 2026-01-01", [("intake.max_delay", DURATION, "2026-01-01", "")]),
    ('[intake]\nmax_delay = "40000d"', [("intake.max_delay", "a duration of at most 36500d", '"40000d"', "")]),
    ("route = []", [("route", ROUTES, "a list of 0", "")]),
    ('[route]\nfrom = "a"', [("route", ROUTES, "a table", "")]),
    ("route = [1]", [("route[0]", "a table", "1", "")]),
    ('[[route]]\nto = "a"', [("route[0].from", "a value", "nothing", "")]),
    ('[[route]]\nfrom = "a"\nfinsh = "daemon"', [("route[0].finsh", KNOWN, UNKNOWN, "did you mean finish?")]),
    (
        '[[route]]\nfrom = "a"\n[[route]]\nfrom = "b"\nfinish = "brocker"',
        [("route[1].finish", '"broker" or "daemon"', '"brocker"', "")],
    ),
    (
        '[[route]]\nfrom = "a"\nto = "b"\nfinish = "broker"',
        [
            (
                "route[0].finish",
                '"daemon": only a queue (to = "") can end a cascade inside the broker',
                '"broker"',
                "",
            )
        ],
    ),
    (
        '[[route]]\nfrom = "a"\nto = "a"',
        [
            (
                "route[0].to",
                "an exchange other than the route's own from: due messages would come in again for ever",
                '"a"',
                "",
            )
        ],
    ),
    (
        '[[route]]\nfrom = "a"\nrouting_key = "delays"',
        [("route[0].routing_key", "a queue other than the intake queue", '"delays"', "")],
    ),
    (
        '[[route]]\nfrom = "a"\n[[route]]\nfrom = "b"\n[[route]]\nfrom = "a"',
        [("route[2].from", "an exchange that no other route has (route[0])", '"a"', "")],
    ),
    (
        '[[route]]\nfrom = "a"\ndelay_from = ["x-dely"]',
        [("route[0].delay_from", f'{FORMS} ("x-dely" is none of them)', "a list of 1", "")],
    ),
    (
        '[[route]]\nfrom = "a"\ndelay_from = ["json:nextattempt.time"]',
        [("route[0].delay_from", f'{FORMS} ("json:nextattempt.time" is none of them)', "a list of 1", "")],
    ),
    (f"{RETRY}{{}}", [("route[0].retry.exhausted", "a value", "nothing", "")]),
    (
        f'{RETRY}{{exhausted = "parked", factor = 0.5, jitter = 2, attempts = 0, first = 5, last = "1h"}}',
        [
            ("route[0].retry.first", f'{DURATION} (a bare number has no unit: write "5s" or "5ms")', "5", ""),
            ("route[0].retry.factor", "a factor from 1 to 100", "0.5", ""),
            ("route[0].retry.jitter", "a part from 0 to 1", "2", ""),
            ("route[0].retry.attempts", "a whole number of at least 1", "0", ""),
            (
                "route[0].retry.last",
                KNOWN,
                UNKNOWN,
                "known here: first, factor, max, jitter, attempts, exhausted",
            ),
        ],
    ),
    (
        f'{RETRY}{{exhausted = "parked", first = "2h", max = "1h"}}',
        [("route[0].retry.max", "a duration that is not less than first", '"1h"', "")],
    ),
    (
        f'{RETRY}{{exhausted = "parked"}}\nto = "b"',
        [
            (
                "route[0].retry",
                "no to, routing_key, default_delay or allow_exchanges beside it: dead letters go back to their queue",
                "a table",
                "",
            )
        ],
    ),
    (
        f'{RETRY}{{exhausted = "delays.refused"}}',
        [("route[0].retry.exhausted", "another queue than refused.queue", '"delays.refused"', "")],
    ),
    (
        '[[takeover]]\ncascade = "delayer"\nlevels_from = 28',
        [
            ("takeover[0].cascade", '"nservicebus-v2", "nservicebus-v1" or "celery"', '"delayer"', ""),
            ("takeover[0].levels_from", "a whole number of at most 27", "28", ""),
        ],
    ),
    (
        'takeover = "celery"',
        [("takeover", "a list of tables: [[…]] in the file, a JSON list of objects elsewhere", '"celery"', "")],
    ),
    (
        '[[takeover]]\ncascade = "celery"\n[[takeover]]\ncascade = "celery"',
        [("takeover[1].cascade", "a cascade that no other takeover has", '"celery"', "")],
    ),
    (
        '[[takeover]]\ncascade = "celery"\nprefix = "shop"\n[[takeover]]\ncascade = "celery"\nprefix = "shop"',
        [("takeover[1].cascade", "a cascade that no other takeover has", '"celery"', "")],
    ),
    (
        '[[takeover]]\ncascade = "nservicebus-v2"\nprefix = "shop"\n[[takeover]]\ncascade = "celery"\nprefix = "a b"',
        [(f"takeover[{index}].prefix", OF_CELERY, found, "") for index, found in enumerate(('"shop"', '"a b"'))],
    ),
    (
        'mode = "native"\n[[takeover]]\ncascade = "celery"',
        [("takeover", "a store for what is taken over: store.url, where the mode is native", "none", "")],
    ),
    (
        '[[takeover]]\ncascade = "celery"\n[[route]]\nfrom = "celery_delayed_27"\n[intake]\nqueue = "celery_delayed_3"',
        [
            (
                "intake.queue",
                "a name that is not one of cascade celery's, which is its owner's",
                '"celery_delayed_3"',
                "",
            ),
            (
                "route[0].from",
                "a name that is not one of cascade celery's, which is its owner's",
                '"celery_delayed_27"',
                "",
            ),
        ],
    ),
    (
        '[[destination]]\nqueue = "amq.mine"\ntype = "headers"\nkeys = "outbox"',
        [
            ("destination[0].type", '"topic", "direct" or "fanout"', '"headers"', ""),
            (
                "destination[0].queue",
                'the name of a queue: not empty, and not beginning with "amq.", which the broker keeps for itself',
                '"amq.mine"',
                "",
            ),
            ("destination[0].keys", "a list of routing keys", '"outbox"', ""),
        ],
    ),
    ('[[route]]\nfrom = "a"\ndelay_from = "x-delay"', [("route[0].delay_from", FORMS, '"x-delay"', "")]),
    (
        '[[route]]\nfrom = "a"\ndelay_from = ["x-delay", "x-delay"]',
        [("route[0].delay_from", f'{FORMS} ("x-delay" is there twice)', "a list of 2", "")],
    ),
    (
        '[[route]]\nfrom = "a"\nallow_exchanges = "b"',
        [("route[0].allow_exchanges", "a list of patterns of exchange names", '"b"', "")],
    ),
    (
        '[intake]\nmax_delay = "1h"\n[[route]]\nfrom = "a"\ndefault_delay = "61m"',
        [("route[0].default_delay", "at most intake.max_delay, 1h", '"61m"', "")],
    ),
    (
        '[native]\ncascade = "nservicebus"',
        [("native.cascade", '"delayer", "nservicebus-v2", "nservicebus-v1" or "celery"', '"nservicebus"', "")],
    ),
    (
        f'[native]\nprefix = "{"p" * 114}"',
        [("native.prefix", "a prefix of names of at most 113 bytes", '"' + "p" * 78 + "…", "")],
    ),
    (
        '[native]\nprefix = "amq."',
        [
            (
                "native.prefix",
                'a prefix that does not begin with "amq.", which the broker keeps for itself',
                '"amq."',
                "",
            )
        ],
    ),
    ('[native]\ndue_queue = "delays"', [("native.due_queue", "another queue than intake.queue", '"delays"', "")]),
    (
        '[[route]]\nfrom = "a"\nto = "b"\n[[route]]\nfrom = "b"\nto = "a"',
        [
            ("route[0].to", 'an exchange that does not lead back here ("a" to "b" to "a")', '"b"', ""),
            ("route[1].to", 'an exchange that does not lead back here ("b" to "a" to "b")', '"a"', ""),
        ],
    ),
    (
        '[intake]\nqueue = "delayer.delay-level-03"',
        [("intake.queue", "a name that is not one of the cascade's", '"delayer.delay-level-03"', "")],
    ),
    (
        '[[route]]\nfrom = "delayer.delay-strays"\nto = "delayer.delay-delivery"',
        [
            ("route[0].from", "a name that is not one of the cascade's", '"delayer.delay-strays"', ""),
            ("route[0].to", "a name that is not one of the cascade's", '"delayer.delay-delivery"', ""),
        ],
    ),
    (
        '[[route]]\nfrom = "in"\nto = ""\nrouting_key = "delays.due"',
        [("route[0].routing_key", "a name that is not one of the cascade's", '"delays.due"', "")],
    ),
    (
        '[refused]\nqueue = "in"\n[[route]]\nfrom = "in"\nto = "out"',
        [("route[0].from", "another name than refused.queue, whose exchange takes it", '"in"', "")],
    ),
    ('[intake]\nqueue = "delays.due"', [("native.due_queue", "another queue than intake.queue", '"delays.due"', "")]),
    (
        '[native]\ndue_queue = "x"\n[refused]\nqueue = "x"',
        [("refused.queue", "another queue than native.due_queue", '"x"', "")],
    ),
    ('[store]\nurl = "mysql://h"', [("store.url", STORE_URL, '"mysql://h"', "")]),
    ("[store]\nlanes = 0", [("store.lanes", "a whole number of at least 1", "0", "")]),
    ('[http]\nlisten = "9419"', [("http.listen", LISTEN, '"9419"', "")]),
    ('[http]\nlisten = "::1:9419"', [("http.listen", LISTEN, '"::1:9419"', "")]),
    ('[http]\nlisten = "h:65536"', [("http.listen", f"{LISTEN}, the port at most 65535", '"h:65536"', "")]),
    ('[log]\nlevel = "loud"', [("log.level", '"debug", "info", "warning" or "error"', '"loud"', "")]),
    ('[log]\nformat = "xml"', [("log.format", '"json" or "console"', '"xml"', "")]),
]


@pytest.mark.parametrize(("text", "expected"), FILES, ids=[text.replace("\n", " ")[:60] for text, _ in FILES])
def test_file(text: str, expected: list[tuple[str, str, str, str]], tmp_path: Path) -> None:
    file = tmp_path / "delayer.toml"
    file.write_text(text)
    found = [(one.key, one.expected, one.found, one.hint) for one in problems(file, {}, {})]
    if expected[0][0] == "broker.passwrd":
        found = [(*found[0][:3], "")]  # its hint lists the section's keys
    assert found == expected
    if expected[0][0] not in ("native.due_queue",):
        assert all(one.source == str(file) for one in problems(file, {}, {}))


def test_everything_at_once(tmp_path: Path) -> None:
    """All of the table's mistakes that fit into one file, and two more layers of them."""
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


@pytest.mark.parametrize(
    ("content", "source", "found"),
    [
        (b'mode = "store"\n\nbroker url\n', ", line 3", "a syntax error: Expected '=' after a key in a key/value pair"),
        (b'mode = "store', ", end", "a syntax error: Unterminated string"),
        (b"[a]\n[a]\n", ", line 2", "a syntax error: Cannot declare ('a',) twice"),
        (b"workers = " + b"9" * 5_000, "", "Exceeds the limit (4300 digits) for integer string conversion"),
        (b"a = " + b"[" * 5_000, "", "deeper ones"),
        (b"a = " + b"[" * 40 + b"]" * 40, "", "deeper ones"),
        (b".".join([b"a"] * 5_000) + b" = 1", "", "deeper ones"),
        (b'mode = "\xff"\n', "", "other bytes from position 8 on"),
    ],
)
def test_not_toml(content: bytes, source: str, found: str, tmp_path: Path) -> None:
    file = tmp_path / "delayer.toml"
    file.write_bytes(content)
    (problem,) = problems(file, {}, {})
    assert (problem.source, problem.found) == (f"{file}{source}", found)


def test_no_such_file(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path / "missing.toml", {}, {})
    assert str(problem) == (
        f"{tmp_path}/missing.toml: expected a readable configuration file, found No such file or directory"
    )
    (problem,) = problems(None, {"DELAYER_CONFIG": str(tmp_path)}, {})
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
    (problem,) = problems(None, {name: "hunter2"}, {})
    assert problem == Problem(f"environment variable {name}", "", KNOWN, UNKNOWN, hint)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"workers": "many"}, 'flag --workers: workers: expected a whole number, found "many"'),
        ({"mode": "x"}, 'flag --mode: mode: expected "native" or "store", found "x"'),
        ({"broker.url": "x"}, f"flag --broker-url: broker.url: expected {BROKER_URL}, found {'a text that is no URL'}"),
        ({"intake.prefetch": "many"}, 'flag --set: intake.prefetch: expected a whole number, found "m'),
        ({"broker.verify": "maybe"}, 'flag --set: broker.verify: expected true or false, found "maybe"'),
        ({"route": "x"}, "flag --set: route: expected a JSON list, found something else"),
        ({"route": "{}"}, "flag --set: route: expected a JSON list, found something else"),
        ({"broker": "[]"}, "flag --set: broker: expected a JSON table, found something else"),
        (
            {"route": '[{"from": "a", "finish": "x"}]'},
            'flag --set: route[0].finish: expected "broker" or "daemon", found "x"',
        ),
    ],
)
def test_flags(flags: dict[str, str], line: str) -> None:
    (problem,) = problems(None, {}, flags)
    assert str(problem).startswith(line)


SECRETS = [
    {"broker.url": "amqp://u:hunter2@h:x"},
    {"broker.url": "amqp://u:hun@ter2@h/a/b"},
    {"broker.url": "amqp://u:hunter2/x@h"},
    {"broker.url": "hunter2"},
    {"broker.url": "amqp:u:hunter2@h"},
    {"broker.url": "amqp://:hunter2@h/a/b"},
    {"store.url": "host=h password=hunter2"},
    {"store.url": "mysql://h/d?password=hunter2"},
    {"broker.management_url": "ftp://u:hunter2@h"},
    {"broker": '{"url": "amqp://u:hunter2@h'},
    {"broker": '"hunter2"'},
    {"broker": '{"password": "hunter2"}'},
    {"broker.password": "hunter2"},
    {"http.listen": "http://u:hunter2@h"},
    {"http.token": "hunter2"},
    {"log.level": "postgresql://u:hunter2@h/d"},
]


@pytest.mark.parametrize("flags", SECRETS, ids=str)
def test_no_error_shows_a_secret(flags: dict[str, str], tmp_path: Path) -> None:
    everything = [*problems(None, {}, flags)]
    file = tmp_path / "secret"
    for key, value in flags.items():
        if key in ("broker.url", "store.url", "http.token"):
            file.write_text(value)
            everything += problems(None, {}, {f"{key}_file": str(file)})
    text = "\n".join(str(one) + repr(one) for one in everything)
    assert "hunter2" not in text
    assert "ter2" not in text


def test_the_source_of_a_bad_url_in_a_file_is_that_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("nonsense")
    (problem,) = problems(None, {}, {"broker.url_file": str(file)})
    assert (problem.source, problem.key) == (str(file), "broker.url")


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("amqp://u:p@h/v", "amqp://u:***@h/v"),
        ("amqp://u@h/v", "amqp://u@h/v"),
        ("amqp://h:5672/v", "amqp://h:5672/v"),
        ("see amqp://u:p@h and http://a:b@c.", "see amqp://u:***@h and http://a:***@c."),
        ("postgresql://h/d?password=x&a=1", "postgresql://h/d?password=***&a=1"),
        ("host=h password='a b' user=u", "host=h password=*** user=u"),
        ("amqps://u:a/b@c@h", "amqps://u:***@h"),
        ("nothing to hide: a@b", "nothing to hide: a@b"),
    ],
)
def test_mask(text: str, masked: str) -> None:
    assert mask(text) == masked


@pytest.mark.parametrize("place", ["host:99999", "host:0", "[::1]:65536", "host:123456"])
def test_a_port_that_is_none_is_told_as_that(place: str) -> None:
    (problem,) = problems(None, {}, {"broker.url": f"amqp://me:secret@{place}/"})
    assert "a port is a number from 1 to 65535" in problem.expected
    assert "password are written" not in problem.expected
    assert "secret" not in str(problem)


@pytest.mark.parametrize("password", ["12/3", "pa/ss", "1#2", "a#b", "1/2@3"])
@pytest.mark.parametrize(("key", "scheme"), [("broker.url", "amqp"), ("store.url", "postgresql")])
def test_an_unescaped_password_is_told_how_to_escape_it(key: str, scheme: str, password: str) -> None:
    (problem,) = problems(None, {}, {key: f"{scheme}://me:{password}@host/name"})
    assert "a password are written %2F %40 %3A %23" in problem.expected
    assert password not in str(problem)


def test_an_at_sign_in_a_vhost_needs_no_escape() -> None:
    assert load(None, {}, {"broker.url": "amqp://me:secret@host/a@b"}).broker_url.startswith(
        "amqp://me:secret@host/a@b"
    )
