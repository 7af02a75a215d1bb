"""The unit files say what the daemon and the jobs do."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import click
import pytest

from delayer.cli.main import cli

ROOT = Path(__file__).parents[3]
UNIT = ROOT / "systemd" / "delayer.service"
JOBS = ("audit", "compact")


def unit(path: Path = UNIT) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False, delimiters=("=",), comment_prefixes=("#", ";"))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(path)
    return parser


def test_credentials_named_in_unit_and_configuration_agree() -> None:
    text = UNIT.read_text()
    sample = (UNIT.parents[1] / "config" / "delayer.toml").read_text()
    for credential in ("broker-url", "store-url"):
        assert f"LoadCredential={credential}:/etc/delayer/{credential}" in text
        assert f"${{CREDENTIALS_DIRECTORY}}/{credential}" in text
        assert f'# url_file = "${{CREDENTIALS_DIRECTORY}}/{credential}"' in sample


@pytest.mark.parametrize("job", JOBS)
def test_the_options_of_a_job_exist(job: str) -> None:
    """What the unit calls is what the command line takes."""
    text = UNIT.with_name(f"delayer-{job}.service").read_text().replace("\\\n", " ")
    (command,) = re.findall(f"^ExecStart=.* {job} (.*)$", text, re.MULTILINE)
    arguments = re.sub("%[SC]", "/nowhere", command).split()
    verb = cli.get_command(click.Context(cli), job)
    assert verb is not None
    context = verb.make_context(job, arguments)
    assert not context.args


def test_an_instance_is_the_same_service_with_an_environment_of_its_own() -> None:
    """delayer@.service is delayer.service, but for the way to its configuration."""
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
def test_little_is_exposed(name: str) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    command = [analyze, "security", "--offline=true", "--threshold=15", "--no-pager", str(UNIT.with_name(name))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "Overall exposure level" not in done.stdout:
        pytest.skip(f"systemd-analyze does not work here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout  # the threshold is in tenths: 1.5


@pytest.mark.parametrize(("name", "tool"), [("sysusers", "systemd-sysusers"), ("tmpfiles", "systemd-tmpfiles")])
def test_users_and_files(name: str, tool: str, tmp_path: Path) -> None:
    program = shutil.which(tool)
    if program is None:
        pytest.skip(f"{tool} is not installed")
    place = tmp_path / "etc" / "delayer"
    place.mkdir(parents=True)
    secret = place / "broker-url"
    secret.write_text("amqp://")
    secret.chmod(0o644)
    more = ["--create"] if name == "tmpfiles" else []
    command = [program, *more, f"--root={tmp_path}", str(UNIT.with_name(f"delayer.{name}.conf"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if os.geteuid() != 0:
        pytest.skip("only root may make users and give files away")
    assert done.returncode == 0, done.stderr
    if name == "tmpfiles":
        assert secret.stat().st_mode & 0o777 == 0o600
    else:
        assert "delayer:" in (tmp_path / "etc" / "passwd").read_text()


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


def test_systemd_accepts_them(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    program = shutil.which("true")
    assert program is not None
    copies = []
    for path in sorted([*UNIT.parent.glob("*.service"), *UNIT.parent.glob("*.timer")]):
        copies.append(tmp_path / path.name)
        # The program need not be installed where the tests run; everything else is checked as it stands.
        copies[-1].write_text(path.read_text().replace("/opt/delayer/bin/delayer", program))
    command = [analyze, "verify", "--man=no", *map(str, copies)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    complaints = [line for line in done.stderr.splitlines() if any(copy.name in line for copy in copies)]
    assert complaints == []
    if done.returncode and "delayer" not in done.stderr:
        pytest.skip(f"systemd-analyze does not work here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
