"""Bad configurations and, to the letter, what is said about them."""

from __future__ import annotations

from pathlib import Path

import pytest

from delayer.config import ConfigError, Problem, load, loading, mask
from tests.unit.config.settings_mistakes import BROKER_URL, FILES, KNOWN, UNKNOWN


@pytest.fixture(autouse=True)
def _no_system_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "SYSTEM_FILE", tmp_path / "none.toml")


def problems(config: Path | None, environ: dict[str, str], flags: dict[str, str]) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load(config, environ, flags)
    assert str(caught.value) == "\n".join(map(str, caught.value.problems))
    return caught.value.problems


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
        (b"[intake]\nprefetch = " + b"9" * 5_000, "", "Exceeds the limit (4300 digits) for integer string conversion"),
        (b"a = " + b"[" * 5_000, "", "thousands of brackets"),
        (b"a = " + b"[" * 40 + b"]" * 40, "", "an unknown one"),
        (b".".join([b"a"] * 5_000) + b" = 1", "", "an unknown one"),
        (b".".join([b"broker", *[b"a"] * 5_000]) + b" = 1", "", "an unknown one"),
        (b"[http]\ntoken = " + b"[" * 90 + b"]" * 90, "", "something else (not shown)"),
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
        ({"mode": "x"}, 'flag --mode: mode: expected "native" or "store", found "x"'),
        ({"broker.url": "x"}, f"flag --broker-url: broker.url: expected {BROKER_URL}, found {'a text that is no URL'}"),
        ({"intake.prefetch": "many"}, 'flag --set: intake.prefetch: expected a whole number, found "m'),
        ({"broker.verify": "maybe"}, 'flag --set: broker.verify: expected true or false, found "maybe"'),
        ({"route": "x"}, "flag --set: route: expected a JSON list, found something else"),
        ({"route": "{}"}, "flag --set: route: expected a JSON list, found something else"),
        ({"broker": "[]"}, "flag --set: broker: expected a JSON table, found something else"),
        (
            {"route": '[{"from": "a", "late_action": "x"}]'},
            'flag --set: route[0].late_action: expected "deliver" or "hold", found "x"',
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
        ("postgresql://h/d?password=x&a=1", "postgresql://h/d?password=***"),
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


def test_an_at_sign_in_a_vhost_is_escaped_as_well() -> None:
    """Unescaped it may be in the password, as what is before it: host and name would be pieces of that."""
    (problem,) = problems(None, {}, {"broker.url": "amqp://me:se@cr/et@host"})
    assert problem.expected.endswith("%2F %40 %3A %23; so is an @ behind the host, %40")
    assert load(None, {}, {"broker.url": "amqp://me:secret@host/a%40b"}).broker_url.startswith(
        "amqp://me:secret@host/a%40b"
    )
    assert load(None, {}, {"store.url": "postgresql://host/d?user=me@azure"}).store_url is not None


def test_the_debug_log_of_the_library_shows_no_secret(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYDANTIC_SETTINGS_DEBUG", "1")
    caplog.set_level("DEBUG", "pydantic_settings")
    load(None, {}, {"broker.url": "amqp://u:hunter2@h"})
    assert "hunter2" not in caplog.text + "".join(capfd.readouterr())
