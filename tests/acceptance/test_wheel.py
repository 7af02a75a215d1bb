"""The wheel, installed where no checkout is at hand: its command runs, and carries its own schema upgrades."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``delayer`` of a clean virtual environment with nothing but the wheel and its pinned dependencies."""
    directory = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    constraints = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    quiet = os.environ | constraints | {"PYTHONWARNINGS": "ignore"}
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", directory, ROOT], check=True, env=quiet)
    (wheel,) = directory.glob("delayer-*.whl")
    venv.create(directory / "venv", with_pip=False)
    python = directory / "venv" / "bin" / "python"
    subprocess.run([*pip, "--python", python, "install", wheel], check=True, env=quiet)
    return python.with_name("delayer")


def run(delayer: Path, *arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DELAYER_", "PYTHON"))}
    return subprocess.run(
        [delayer, *arguments], cwd=cwd, env=clean | environ, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_installed_command_upgrades_checks_and_runs(
    installed: Path, tmp_path: Path, vhost: str, database: str
) -> None:
    where = {"DELAYER_BROKER__URL": vhost, "DELAYER_STORE__URL": database}
    for arguments in (("--version",), ("db", "upgrade"), ("topology", "apply"), ("db", "current")):
        done = run(installed, *arguments, cwd=tmp_path, **where)
        assert done.returncode == 0, f"delayer {' '.join(arguments)}: {done.stdout}{done.stderr}"
    daemon = subprocess.Popen(
        [installed, "run"], cwd=tmp_path, env=os.environ | where, stderr=subprocess.PIPE, text=True
    )
    with daemon:
        assert daemon.stderr is not None
        events = []
        for line in daemon.stderr:
            events.append(line)
            if '"event": "consuming"' in line:
                daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(timeout=30) == 0, "".join(events)
    assert any('"event": "consuming"' in line for line in events), "".join(events)


def test_what_a_service_needs_comes_with_the_wheel(installed: Path, tmp_path: Path) -> None:
    """The README copies these from share/, and the unit names its documentation there."""
    share = installed.parent.parent / "share"
    for ours, theirs in (
        ("systemd/delayer.service", "delayer/delayer.service"),
        ("systemd/delayer-audit.service", "delayer/delayer-audit.service"),
        ("systemd/delayer-audit.timer", "delayer/delayer-audit.timer"),
        ("docs/backlog.md", "doc/delayer/docs/backlog.md"),
        ("README.md", "doc/delayer/README.md"),
    ):
        assert (share / theirs).read_bytes() == (ROOT / ours).read_bytes()
    unit = (share / "delayer" / "delayer.service").read_text()
    (documentation,) = re.findall("Documentation=file://(.*)", unit)
    (program,) = re.findall("ExecStart=([^ ]*)", unit)
    root = Path(program).parent.parent
    assert (share.parent / Path(documentation).relative_to(root)).is_file()
    # The configuration works as it stands: everything that is not commented out is the default.
    nowhere = {"DELAYER_BROKER__URL": "amqp://127.0.0.1:1", "DELAYER_STORE__URL": "postgresql://127.0.0.1:1/d"}
    done = run(installed, "--config", str(share / "delayer" / "delayer.toml"), "check", cwd=tmp_path, **nowhere)
    assert done.returncode == 3, done.stderr


def test_the_wheel_holds_the_schema_and_no_tests(installed: Path) -> None:
    (package,) = installed.parent.parent.glob("lib/python*/site-packages/delayer")
    assert (package / "store" / "migrations" / "env.py").is_file()
    assert sorted(package.glob("store/migrations/versions/0*.py"))
    assert not (package.parent / "tests").exists()
