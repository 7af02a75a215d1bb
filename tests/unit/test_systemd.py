"""The unit file says what the daemon does."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[2] / "systemd" / "delayer.service"


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False, delimiters=("=",), comment_prefixes=("#", ";"))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return parser


def test_what_the_design_asks_for() -> None:
    service = unit()["Service"]
    assert service["Type"] == "notify"
    assert service["ExecStart"].endswith("delayer --config /etc/delayer/delayer.toml run")
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert service["WatchdogSec"] == "30"
    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"] == "2"
    assert service["TimeoutStopSec"] == "15"
    assert service["TimeoutStartSec"] == "infinity", "the daemon waits for its broker longer than systemd would"
    assert service["KillMode"] == "mixed", "the supervisor stops its workers; nobody else does"
    assert service["OOMPolicy"] == "continue"
    assert unit()["Install"]["WantedBy"] == "multi-user.target"


def test_nothing_but_sockets() -> None:
    service = unit()["Service"]
    assert service["DynamicUser"] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] == ""
    assert set(service["RestrictAddressFamilies"].split()) == {"AF_INET", "AF_INET6", "AF_UNIX"}


def test_credentials_named_in_unit_and_configuration_agree() -> None:
    text = UNIT.read_text()
    sample = (UNIT.parents[1] / "config" / "delayer.toml").read_text()
    for credential in ("broker-url", "store-url"):
        assert f"LoadCredential={credential}:/etc/delayer/{credential}" in text
        assert f"${{CREDENTIALS_DIRECTORY}}/{credential}" in text
        assert f'# url_file = "${{CREDENTIALS_DIRECTORY}}/{credential}"' in sample


def test_systemd_accepts_it(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    program = shutil.which("true")
    assert program is not None
    copy = tmp_path / "delayer.service"
    # The program need not be installed where the tests run; everything else is checked as it stands.
    copy.write_text(UNIT.read_text().replace("/opt/delayer/bin/delayer", program))
    command = [analyze, "verify", "--man=no", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    complaints = [line for line in done.stderr.splitlines() if "delayer.service" in line]
    assert complaints == []
    if done.returncode and "delayer" not in done.stderr:
        pytest.skip(f"systemd-analyze does not work here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
