"""Settings: layers, defaults, files, and changes that a running daemon can adopt."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import pytest

from delayer.amqp.address import Address
from delayer.cli.options import Request
from delayer.config.errors import ConfigError
from delayer.config.loading import SYSTEM_FILE, config_file, load
from delayer.config.model import AuditRuleTable, DestinationTable, RetryTable, RouteTable, Settings, TakeoverTable
from delayer.config.sources import env_name, keys_of, known_keys
from delayer.config.texts import duration_text, names_of
from delayer.config.tokens import parse_tokens
from delayer.config.values import duration_ms
from delayer.daemon.app import changed, live_part
from tests.support.logged import capture_logs

ROOT = Path(__file__).parents[3]
NO_FILE = Path(os.devnull)
DAY_MS = 86_400_000


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "amount_ms"),
    [
        ("0s", 0), ("0ms", 0), ("250ms", 250), ("1s", 1000), ("10s", 10_000), ("5m", 300_000), ("12h", 43_200_000),
        ("3650d", 3650 * DAY_MS), ("268435455s", 268_435_455_000), ("36500d", 36_500 * DAY_MS), (" 10s ", 10_000),
    ],
)  # fmt: skip
def test_duration(text: str, amount_ms: int) -> None:
    assert duration_ms(text) == amount_ms
    assert duration_ms(duration_text(amount_ms)) == amount_ms


BAD = (
    10, 0, 1.5, True, None, "", "10", "s", "-1s", "1.5s", "10 s", "1h30m",
    "10S", "1w", "٣s", "36501d", "9" * 99 + "s",
)  # fmt: skip


@pytest.mark.parametrize("value", BAD)
def test_not_a_duration(value: object) -> None:
    with pytest.raises(ValueError, match="duration"):
        duration_ms(value)


TOP_LEVEL = {("mode",), ("route",)}


@pytest.mark.parametrize("count", range(1, 4))
def test_the_later_layer_wins(count: int, tmp_path: Path) -> None:
    """The last layer wins for a shared key, and keys in only one layer are kept."""
    file = write(tmp_path / "f.toml", '[intake]\nqueue = "q"\n[refused]\nqueue = "file"\n')
    environ = {"DELAYER_REFUSED__QUEUE": "environment", "DELAYER_INTAKE__MAX_DELAY": "7d"}
    flags = {"refused.queue": "flags", "intake.prefetch": "77"}
    found = load(file, environ if count > 1 else {}, flags if count > 2 else {})
    assert found.refused.queue == ("file", "environment", "flags")[count - 1]
    own = (found.intake.queue, found.intake.max_delay_ms, found.intake.prefetch)
    assert own[:count] == ("q", 7 * DAY_MS, 77)[:count]
    assert own[count:] == ("delays", 3650 * DAY_MS, 5000)[count:]


SOME = {"broker": "amqp://h", "http": "ops act open-sesame-open-sesame"}
"""What the files of a section contain."""


@pytest.mark.parametrize("key", [key for key in known_keys() if len(key) == 2 or key in TOP_LEVEL])
def test_every_key_can_be_set_by_environment_and_flag(key: tuple[str, ...], tmp_path: Path) -> None:
    some_file = str(write(tmp_path / "some", SOME.get(key[0], "postgresql://localhost")))
    texts = {
        ("mode",): "native", ("route",): '[{"from": "a", "to": "b"}]', ("broker", "url"): "amqps://h",
        ("broker", "verify"): "false", ("broker", "heartbeat"): "5s", ("broker", "management_url"): "http://h:15672",
        ("intake", "prefetch"): "9", ("intake", "max_delay"): "9d", ("native", "prefix"): "other.",
        ("native", "strategy"): "queue", ("store", "url"): "postgres://h/d", ("store", "park_beyond"): "9s",
        ("store", "lanes"): "9", ("store", "restore_ahead"): "9d", ("store", "history_days"): "9",
        ("http", "listen"): "[::1]:80",
        ("http", "metrics_listen"): "[::1]:81", ("http", "metrics_routes"): "3", ("http", "open"): "true",
        ("intake", "give_back_after"): "9m", ("intake", "queue_type"): "classic",
        ("intake", "consumers"): "shared", ("log", "format"): "console", ("log", "level"): "debug",
        ("audit", "rule"): '[{"name": "a", "sql": "SELECT 1"}]',
    }  # fmt: skip
    text = some_file if key[1:] and key[1].endswith("_file") else texts.get(key, "another")
    base = {"DELAYER_BROKER__CERT_FILE": some_file} if key[-1] == "key_file" else {}
    plain = load(NO_FILE, base, {})
    by_environment = load(NO_FILE, base | {env_name(key): text}, {})
    assert by_environment == load(NO_FILE, base, {".".join(key): text})
    assert ".".join(key) in changed(plain, by_environment)


def test_routes_of_a_later_layer_replace_all_earlier_ones(tmp_path: Path) -> None:
    file = write(tmp_path / "f.toml", '[[route]]\nfrom = "a"\n[[route]]\nfrom = "b"\n')
    assert [route.from_ for route in load(file, {}, {}).routes] == ["a", "b"]
    environ = {"DELAYER_ROUTE": json.dumps([{"from": "c", "to": "d", "default_delay": "5m"}])}
    (route,) = load(file, environ, {}).routes
    assert (route.from_, route.to, route.default_delay_ms) == ("c", "d", 300_000)


def test_the_configuration_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Path("/etc/delayer/delayer.toml") == SYSTEM_FILE
    system = tmp_path / "system.toml"
    environ = {"DELAYER_CONFIG": "/of/the/environment"}
    assert config_file(None, {}, system) is None
    assert config_file(None, {"DELAYER_CONFIG": ""}, system) is None
    write(system, 'mode = "native"')
    assert config_file(None, {}, system) == system
    assert config_file(None, environ, system) == Path("/of/the/environment")
    assert config_file(Path("/given"), environ, system) == Path("/given")
    monkeypatch.setenv("DELAYER_CONFIG", str(system))
    assert Request().settings().mode == "native"


def test_foreign_environment_variables_are_ignored() -> None:
    environ = {
        "DELAYER_SERVICE_HOST": "10.0.0.1",
        "DELAYER_SERVICE_PORT_HTTP": "9419",
        "DELAYER_PORT": "tcp://10.0.0.1:9419",
        "DELAYER_PORT_9419_TCP_ADDR": "10.0.0.1",
        "DELAYER_FAULT": "park.copied",
        "PATH": "/bin",
    }
    assert load(NO_FILE, environ, {}) == load(NO_FILE, {}, {})


@pytest.mark.parametrize(
    ("mode", "flags", "expected"),
    [
        ("store", {}, "postgresql://localhost/delayer"),
        ("native", {}, None),
        ("native", {"store.url": "postgresql://h/d"}, "postgresql://h/d"),
        ("store", {"store.url": "postgresql://h/d"}, "postgresql://h/d"),
    ],
)
def test_native_mode_has_a_store_only_if_one_is_configured(
    mode: str, flags: dict[str, str], expected: str | None
) -> None:
    assert load(NO_FILE, {"DELAYER_MODE": mode}, flags).store_url == expected


def test_urls_from_files(tmp_path: Path) -> None:
    write(tmp_path / "broker", "amqp://u:pw1@h/v\n")
    write(tmp_path / "store", "postgresql://u:pw2@h/d")
    file = write(
        tmp_path / "f.toml",
        '[broker]\nurl_file = "${CREDENTIALS_DIRECTORY}/broker"\n'
        '[store]\nurl_file = "${CREDENTIALS_DIRECTORY}/store"\n',
    )
    for environ in {}, {"CREDENTIALS_DIRECTORY": str(tmp_path)}:
        settings = load(file, environ, {})
        assert settings.broker_url == "amqp://u:pw1@h/v?heartbeat=10"
        assert settings.store_url == "postgresql://u:pw2@h/d"


def test_a_url_in_a_later_layer_beats_a_url_file_in_an_earlier_one(tmp_path: Path) -> None:
    secret = write(tmp_path / "secret", "amqp://of-the-file")
    file = write(tmp_path / "f.toml", f'[broker]\nurl_file = "{secret}"\n')
    assert load(file, {}, {}).broker.url.reveal() == "amqp://of-the-file"
    assert load(file, {"DELAYER_BROKER__URL": "amqp://later"}, {}).broker.url.reveal() == "amqp://later"
    file = write(tmp_path / "f.toml", '[broker]\nurl = "amqp://earlier"\n')
    assert load(file, {"DELAYER_BROKER__URL_FILE": str(secret)}, {}).broker.url.reveal() == "amqp://of-the-file"


def test_a_changed_url_file_is_read_at_every_access(tmp_path: Path) -> None:
    broker, store = tmp_path / "broker", tmp_path / "store"
    write(broker, "amqp://u:one@h/v\n")
    write(store, "postgresql://u:one@h,i/d?target_session_attrs=primary")
    file = write(tmp_path / "f.toml", f'[broker]\nurl_file = "{broker}"\n[store]\nurl_file = "{store}"\n')
    settings = load(file, {}, {})

    def password() -> tuple[bool, bool]:
        return ":two@" in settings.broker_url, ":two@" in (settings.store_url or "")

    assert password() == (False, False)
    for path in broker, store:
        write(path, path.read_text().replace("one", "two"))
    assert password() == (True, True)
    for content in ("", "half a", b"\xff", "amqp://u:three@h/other", "postgresql://u:three@h/other"):
        for path in broker, store:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        assert password() == (True, True), "the last good one, and never another virtual host or database"
    for path in broker, store:
        path.unlink()
    assert password() == (True, True)
    write(broker, "amqp://u:two@i/v,amqp://u:two@j/v")
    assert settings.broker_url == "amqp://u:two@i/v?heartbeat=10,amqp://u:two@j/v?heartbeat=10"


@pytest.mark.parametrize("kind", ["broker", "store"])
@pytest.mark.parametrize(
    ("old", "new"), [("/%2F", ""), ("", "/%2f"), ("/", ""), ("/a-b", "/a%2Db"), ("/%c3%a9", "/%C3%A9")]
)
def test_a_url_file_may_spell_its_place_in_another_way(kind: str, old: str, new: str, tmp_path: Path) -> None:
    secret, scheme = tmp_path / "secret", {"broker": "amqp", "store": "postgresql"}[kind]
    file = write(tmp_path / "f.toml", f'[{kind}]\nurl_file = "{write(secret, f"{scheme}://u:one@h{old}")}"\n')
    settings = load(file, {}, {})
    write(secret, f"{scheme}://u:two@h{new}")
    with capture_logs() as logs:
        assert ":two@" in str(getattr(settings, f"{kind}_url"))
    assert logs == []
    assert changed(live_part(settings, load(file, {}, {})), load(file, {}, {})) == []


def test_each_reason_against_a_url_file_is_logged_once(tmp_path: Path) -> None:
    secret = write(tmp_path / "secret", "amqp://u:one@h/v")
    settings = load(write(tmp_path / "f.toml", f'[broker]\nurl_file = "{secret}"\n'), {}, {})
    told = []
    for content in (b"amqp://u:t/wo@h/v", b"amqp://u:two@h/w", b"\xff", None, b"amqp://u:two@h/v", None):
        secret.unlink() if content is None else secret.write_bytes(content)
        with capture_logs() as logs:
            assert settings.broker_url == settings.broker_url
        assert {one["event"] for one in logs} <= {"url file not used"}
        told += [one["reason"] for one in logs]
    assert ["written %2F" in told[0], "same virtual host" in told[1]] == [True, True]
    assert told[2:] == ["expected UTF-8", "No such file or directory", "No such file or directory"]


@pytest.mark.parametrize(
    ("text", "environ"),
    [
        ('[broker]\nurl = ["amqp://u:p%2Cw@a/v", "amqps://b:1/v?heartbeat=3"]', {}),
        ("", {"DELAYER_BROKER__URL": "amqp://u:p%2Cw@a/v, amqps://b:1/v?heartbeat=3"}),
        ("", {"DELAYER_BROKER__URL": '["amqp://u:p%2Cw@a/v", "amqps://b:1/v?heartbeat=3"]'}),
    ],
)
def test_several_urls_of_one_broker(text: str, environ: dict[str, str], tmp_path: Path) -> None:
    settings = load(write(tmp_path / "f.toml", text), environ, {})
    assert settings.broker_url == "amqp://u:p%2Cw@a/v?heartbeat=10,amqps://b:1/v?heartbeat=3"
    assert str(settings.broker.url) == "amqp://u:***@a/v, amqps://b:1/v?***"
    assert [one.password for one in Address.parse_all(settings.broker_url)] == ["p,w", "guest"]
    assert names_of(settings)["broker"] == "a:5672, b:1"
    assert names_of(settings)["virtual_host"] == "v"


@pytest.mark.parametrize(("one", "other"), [("", "/"), ("/%2F", ""), ("/%2f", "/%2F"), ("/a-b", "/a%2Db")])
def test_urls_of_one_broker_may_spell_its_virtual_host_in_two_ways(one: str, other: str) -> None:
    urls = Settings.model_validate({"broker": {"url": [f"amqp://a{one}", f"amqp://b{other}"]}}).broker_url
    assert len({address.vhost for address in Address.parse_all(urls)}) == 1


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ('["amqp://a/v", "amqp://b/w"]', "same virtual host"),
        ('["amqp://u:hunter,2@a/v"]', "%2C"),
        ('"amqp://u:hunter,2@a/v"', "a comma in a URL is written %2C"),
        ('"amqp://u:271828,314159@a/v"', "a comma in a URL is written %2C"),
        ("[]", "a list of URLs"),
        ("'[amqp://a/v'", "a list of URLs in JSON"),
        ("7", "a URL"),
        ('["amqp://a/v", 7]', "a URL"),
        ('["amqp://a/v", "http://b/v"]', "a URL like amqp://"),
    ],
)
def test_wrong_lists_of_urls(url: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        load(write(tmp_path / "f.toml", f"[broker]\nurl = {url}"), {}, {})
    assert not any(piece in str(caught.value) for piece in ("hunter", "271828", "314159"))


def test_broker_url_carries_tls_and_heartbeat() -> None:
    broker = {
        "url": "amqps://u:p%40ss@h/v%2Fw",
        "ca_file": "/etc/ca.pem",
        "cert_file": "/etc/cert.pem",
        "key_file": "/etc/the key.pem",
        "verify": False,
        "heartbeat": "5s",
    }
    assert Settings.model_validate({"broker": broker}).broker_url == (
        "amqps://u:p%40ss@h/v%2Fw?heartbeat=5&cafile=%2Fetc%2Fca.pem&certfile=%2Fetc%2Fcert.pem"
        "&keyfile=%2Fetc%2Fthe%20key.pem&verify=false"
    )


def test_parameters_of_the_url_win() -> None:
    assert load(NO_FILE, {}, {"broker.url": "amqp://h?heartbeat=3"}).broker_url == "amqp://h?heartbeat=3"


def test_tls_files_are_read_with_the_configuration(tmp_path: Path) -> None:
    """Loading the configuration checks the certificate; a later reconnect would be too late for an error."""
    ca = write(tmp_path / "ca.pem", "not a certificate")
    with pytest.raises(ConfigError, match="cafile to be a readable PEM file"):
        load(NO_FILE, {}, {"broker.url": "amqps://h", "broker.ca_file": str(ca)})
    assert load(NO_FILE, {}, {"broker.url": "amqp://h", "broker.ca_file": str(ca)}).broker.ca_file == str(ca)


def test_no_password_in_any_text_of_the_settings() -> None:
    flags = {
        "broker.url": "amqp://user:hunter2@h",
        "broker.management_url": "http://user:hunter2@h",
        "store.url": "postgresql://user:hunter2@h/d?password=hunter2",
    }
    settings = load(NO_FILE, {}, flags)
    for text in (repr(settings), str(settings), f"{settings.broker}", repr(settings.store), str(settings.model_dump())):
        assert "hunter2" not in text
        assert "user" in text
    assert "hunter2" in settings.broker_url
    assert settings.management_url == "http://user:hunter2@h"


def test_the_shipped_file_loads_and_has_the_defaults() -> None:
    shipped = load(ROOT / "config" / "delayer.toml", {}, {})
    assert changed(load(NO_FILE, {}, {}), shipped) == ["store.url"], (
        "it names the default store, so that native mode would have one too"
    )


def test_the_shipped_file_names_every_key() -> None:
    text = (ROOT / "config" / "delayer.toml").read_text()
    # Commented keys count: they are lines of the form "# key = value".
    lines = [line.removeprefix("# ").split(" = ")[0] for line in text.splitlines() if " = " in line]
    for key in known_keys():
        if key == ("audit", "rule"):
            assert "\n# [[audit.rule]]" in text
        elif len(key) == 2:
            assert key[1] in lines, key
        elif key == ("route",):
            assert "\n[[route]]" in text
        elif key in (("takeover",), ("destination",)):
            assert f"\n# [[{key[0]}]]" in text
        else:
            assert f"[{key[0]}]" in text or key[0] in lines, key
    for table in (RouteTable, RetryTable, TakeoverTable, DestinationTable, AuditRuleTable):
        for name in keys_of(table):
            assert name in lines or table is RetryTable, name


def test_the_shipped_file_loads_with_its_comments_as_settings() -> None:
    """The commented keys of routes are valid too, and have their defaults."""
    text = (ROOT / "config" / "delayer.toml").read_text()
    route = text.partition("[[route]]")[2].partition("# [[route]]")[0]
    opened = "\n".join(line.removeprefix("# ") for line in route.splitlines() if " = [" in line or " = " in line)
    table = tomllib.loads(
        "\n".join(line for line in opened.splitlines() if line.split(" = ")[0] in keys_of(RouteTable))
    )
    assert set(table) == set(keys_of(RouteTable)) - {"retry"}
    assert RouteTable.model_validate(table) == load(NO_FILE, {}, {}).routes[0]


def test_the_commented_tables_are_valid_and_have_every_key(tmp_path: Path) -> None:
    before, mark, rest = (ROOT / "config" / "delayer.toml").read_text().partition("# [[route]]")
    comments, native, after = (mark + rest).partition("[native]")
    opened = [line for line in comments.splitlines() if line.startswith("# [[") or " = " in line]
    text = before + "\n".join(line.removeprefix("# ") for line in opened) + "\n" + native + after
    settings = load(write(tmp_path / "opened.toml", text), {}, {})
    table = tomllib.loads(text)
    assert set(table["route"][1]["retry"]) == set(keys_of(RetryTable))
    assert set(table["takeover"][0]) == set(keys_of(TakeoverTable))
    assert set(table["destination"][0]) == set(keys_of(DestinationTable))
    assert set(table["audit"]["rule"][0]) == set(keys_of(AuditRuleTable))
    assert settings.audit.rules[0].severity == "warning"
    assert settings.routes[1].retry == RetryTable(exhausted="parking-lot")
    assert settings.takeovers == (TakeoverTable(cascade="nservicebus-v2"),)


@pytest.mark.parametrize("file", sorted((ROOT / "config" / "examples").glob("*.toml")), ids=lambda file: file.stem)
def test_the_examples_are_valid(file: Path) -> None:
    settings = load(file, {}, {})
    assert settings.mode == "store"
    assert settings != load(NO_FILE, {}, {"store.url": "postgresql://localhost/delayer"})


def test_no_token_is_shown() -> None:
    [token], _ = parse_tokens("ops act open-sesame-open-sesame\n")
    assert token.plain is not None and token.plain.reveal() == "open-sesame-open-sesame"
    assert "sesame" not in f"{token!r} {token}"
