"""The unit files agree with the daemon, its jobs and the wheel."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
UNIT = ROOT / "systemd" / "delayer.service"


def unit(path: Path = UNIT) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False, delimiters=("=",), comment_prefixes=("#", ";"))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(path)
    return parser


def test_credentials_named_in_unit_and_configuration_agree() -> None:
    drop_in = UNIT.with_name("credentials.conf").read_text()
    sample, ours = ((ROOT / "config" / name).read_text() for name in ("delayer.toml", "service.toml"))
    for credential in ("broker-url", "store-url"):
        assert f"LoadCredential={credential}:/etc/delayer/{credential}" in drop_in
        assert f'\nurl_file = "${{CREDENTIALS_DIRECTORY}}/{credential}"' in ours
        assert f'# url_file = "${{CREDENTIALS_DIRECTORY}}/{credential}"' in sample


def test_an_instance_is_the_same_service_with_its_own_environment() -> None:
    """delayer@.service is delayer.service, except for the path to its configuration."""
    one, many = UNIT.read_text(), UNIT.with_name("delayer@.service").read_text()
    service = unit(UNIT.with_name("delayer@.service"))["Service"]
    assert service["Environment"] == "DELAYER_CONFIG=/etc/delayer/delayer.toml"
    assert service["EnvironmentFile"] == "-/etc/delayer/%i.env"
    told = {line for line in many.splitlines() if not line.startswith(("#", "Environment", "Description="))}
    assert told == {
        line.replace(" --config /etc/delayer/delayer.toml", "")
        for line in one.splitlines()
        if not line.startswith(("#", "Description="))
    }


@pytest.mark.parametrize("name", sorted(path.name for path in UNIT.parent.glob("*.service")))
def test_systemd_rates_the_exposure_low(name: str) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    command = [analyze, "security", "--offline=true", "--threshold=15", "--no-pager", str(UNIT.with_name(name))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "Overall exposure level" not in done.stdout:
        pytest.skip(f"systemd-analyze does not work here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout  # the threshold is in tenths: 1.5


def test_every_unit_comes_with_the_wheel() -> None:
    shared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    for path in UNIT.parent.iterdir():
        assert shared["shared-data"][f"systemd/{path.name}"] == f"share/delayer/{path.name}"
        if path.suffix == ".conf":
            continue
        (documentation,) = re.findall("^Documentation=file:///opt/delayer/(.*)$", path.read_text(), re.MULTILINE)
        brought = {to: ROOT / ours for ours, to in shared["shared-data"].items()}
        (to,) = [to for to in brought if documentation == to or documentation.startswith(f"{to}/")]
        assert Path(f"{brought[to]}{documentation.removeprefix(to)}").is_file(), documentation
