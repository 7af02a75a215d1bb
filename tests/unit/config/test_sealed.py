"""Credentials that systemd gives to the daemon alone: its ExecReload checks the configuration without them."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from delayer.cli.main import cli
from delayer.config.errors import ConfigError
from delayer.config.loading import load

CREDENTIALS = ("broker-url", "store-url", "client-key")
CONFIG = """
[broker]
url_file = "${CREDENTIALS_DIRECTORY}/broker-url"
cert_file = "/nowhere/client.pem"
key_file = "${CREDENTIALS_DIRECTORY}/client-key"
[store]
url_file = "${CREDENTIALS_DIRECTORY}/store-url"
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A service's configuration for a user who may not read the credentials, even if that user is root."""
    place = tmp_path / "credentials"
    place.mkdir()
    for name in CREDENTIALS:
        (place / name).write_text("amqp://nobody")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(place))
    path = tmp_path / "delayer.toml"
    path.write_text(CONFIG.replace("/nowhere/client.pem", str(path)))
    read = Path.read_text

    def closed(self: Path, *how: str, **more: str) -> str:
        if self.parent == place:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return read(self, *how, **more)

    monkeypatch.setattr(Path, "read_text", closed)
    return path


def test_the_check_names_the_variables_and_the_routes_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELAYER_STORE__URL", "postgresql:///delayer")
    path = tmp_path / "delayer.toml"
    path.write_text('[[route]]\nfrom = "delayer.celery"\n')
    _, output = checked(path)
    assert [(row["what"], row["found"]) for row in json.loads(output)["checks"][:2]] == [
        ("configuration", f'read from {path}; store mode; routes from "delayer.celery"'),
        ("environment", "sets DELAYER_STORE__URL"),
    ]


def checked(config: Path, *flags: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["--config", str(config), *flags, "check", "--offline", "--json"])
    return done.exit_code, done.output


def test_the_check_before_a_reload_passes_without_credentials(config: Path) -> None:
    code, output = checked(config)
    assert code == 0, output
    (row,) = [row for row in json.loads(output)["checks"] if row["what"] == "credentials"]
    assert row["result"] == "note"
    assert all(f"${{CREDENTIALS_DIRECTORY}}/{name}" in row["found"] for name in CREDENTIALS)


def test_the_check_still_reports_other_mistakes(config: Path) -> None:
    code, output = checked(config, "--set", "mode=nativ")
    assert code == 2
    assert 'expected "native" or "store"' in output
    config.write_text('[broker]\nurl_file = "/nowhere/broker-url"\n')
    code, output = checked(config)
    assert code == 2
    assert "/nowhere/broker-url" in output


def test_the_daemon_needs_its_credentials(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"broker\.url_file: expected a file that can be read.*Permission denied"):
        load(config, {"CREDENTIALS_DIRECTORY": str(config.parent / "credentials")}, {})
