"""The wheel, installed without a checkout: its command runs, and carries its own schema upgrades."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.request
import venv
from pathlib import Path

import pytest

from delayer.cli.main import VERBS
from tests.support import ports

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


# /etc with /etc/delayer in it, in a new mount namespace, so that the test leaves nothing behind.
UNDER_ETC = 'mount -t overlay overlay -o "lowerdir=$0:/etc" /etc && exec "$@"'


def test_the_wheel_runs_with_its_file_in_etc(installed: Path, tmp_path: Path, vhost: str, empty_database: str) -> None:
    """Follow docs/install.md: the shipped file in /etc, no --config. Only root may mount over /etc, so other users pass
    --config. The schema, the page and its files come from the wheel."""
    etc = tmp_path / "etc"
    (etc / "delayer").mkdir(parents=True)
    etc.chmod(0o755)
    text = (installed.parent.parent / "share" / "delayer" / "delayer.toml").read_text()
    listen = f"127.0.0.1:{ports.reserve()}"
    for shipped, ours in (
        ("amqp://guest:guest@localhost:5672/", vhost),
        ("postgresql://localhost/delayer", empty_database),
        ("127.0.0.1:9419", listen),
    ):
        assert f'= "{shipped}"' in text
        text = text.replace(f'= "{shipped}"', f'= "{ours}"')
    (etc / "delayer" / "delayer.toml").write_text(text)
    under = [str(installed), "--config", str(etc / "delayer" / "delayer.toml")]
    if os.geteuid() == 0:
        under = ["unshare", "--mount", "sh", "-c", UNDER_ETC, str(etc), str(installed)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DELAYER_", "PYTHON"))}
    for verb in (["--version"], ["db", "upgrade"], ["topology", "apply"], ["db", "current"]):
        done = subprocess.run([*under, *verb], env=clean, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
    with subprocess.Popen([*under, "run"], env=clean, stderr=subprocess.PIPE, text=True) as daemon:
        assert daemon.stderr is not None
        events = []
        try:
            for line in daemon.stderr:
                events.append(json.loads(line))
                if {"consuming", "http served"} <= {one["event"] for one in events}:
                    break
            page = fetched(listen, "/")
            assert "<title>" in page
            for asset in re.findall(r'(?:href|src)="(/static/[^"]+)"', page):
                assert fetched(listen, asset)
            assert "delayer_build_info" in fetched(listen, "/metrics")
        finally:
            daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(timeout=30) == 0, events


def fetched(listen: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{listen}{path}", timeout=60) as answer:
        return str(answer.read().decode())


def test_the_wheel_contains_the_files_of_a_service(installed: Path, tmp_path: Path) -> None:
    """The README copies these from share/, and the unit names its documentation there."""
    share = installed.parent.parent / "share"
    brought = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    for ours, theirs in brought["shared-data"].items():
        for file in [ROOT / ours] if (ROOT / ours).is_file() else (ROOT / ours).rglob("*.*"):
            there = share.parent / theirs / file.relative_to(ROOT / ours)
            assert there.is_file(), ours
    # An operator needs no other file.
    named = set(brought["shared-data"])
    wanted = [*(ROOT / "config").iterdir(), *(ROOT / "systemd").iterdir(), ROOT / "docs", ROOT / "CHANGELOG.md"]
    missing = {str(path.relative_to(ROOT)) for path in wanted} - named
    assert not missing, "add them to pyproject.toml"
    # Messages name pages, and the help says where these are.
    told = " ".join(run(installed, "--help", cwd=tmp_path).stdout.split())
    [example] = re.findall(r"/opt/delayer/(share/doc/delayer/docs/\S+\.md)", told)
    assert (share.parent / example).is_file()
    unit = (share / "delayer" / "delayer.service").read_text()
    (documentation,) = re.findall("Documentation=file://(.*)", unit)
    (program,) = re.findall("ExecStart=([^ ]*)", unit)
    root = Path(program).parent.parent
    assert (share.parent / Path(documentation).relative_to(root)).is_file()
    # The shipped configuration works unchanged: every active line is the default.
    nowhere = {"DELAYER_BROKER__URL": "amqp://127.0.0.1:1", "DELAYER_STORE__URL": "postgresql://127.0.0.1:1/d"}
    done = run(installed, "--config", str(share / "delayer" / "delayer.toml"), "check", cwd=tmp_path, **nowhere)
    assert done.returncode == 3, done.stderr


def test_the_wheel_holds_the_schema_and_no_tests(installed: Path) -> None:
    (package,) = installed.parent.parent.glob("lib/python*/site-packages/delayer")
    assert (package / "store" / "migrations" / "env.py").is_file()
    assert sorted(package.glob("store/migrations/versions/0*.py"))
    for kept in ("*.sql", "*.html", "*.css", "*.js"):
        ours = {path.relative_to(ROOT / "delayer") for path in (ROOT / "delayer").rglob(kept)}
        assert {path.relative_to(package) for path in package.rglob(kept)} >= ours, kept
    assert not (package.parent / "tests").exists()
    assert (package / "py.typed").is_file()


def test_every_command_has_a_man_page(installed: Path, tmp_path: Path) -> None:
    pages = installed.parent.parent / "share" / "man" / "man1"
    top = (pages / "delayer.1").read_text()
    for verb in VERBS:
        assert (pages / f"delayer-{verb}.1").is_file(), verb
        assert f"delayer-{verb}(1)" in top
    assert (pages / "delayer-db-upgrade.1").is_file()
    assert not [page for page in pages.glob("delayer*.1") if "\b" in page.read_text()], "marks meant for click"
    if not shutil.which("groff"):
        pytest.skip("groff is not installed")
    render = ["groff", "-man", "-Tutf8", "-Kutf8", "-ww", *pages.glob("delayer*.1")]
    done = subprocess.run(render, capture_output=True, text=True, timeout=60, check=True)
    assert not done.stderr
    assert "Delayed messages for RabbitMQ" in done.stdout


def test_bash_completes_commands_and_options(installed: Path) -> None:
    completion = installed.parent.parent / "share" / "bash-completion" / "completions" / "delayer"
    script = """
        . "$1"
        complete -p delayer
        COMP_WORDS=(delayer resch) COMP_CWORD=1; _delayer_completion delayer; echo "${COMPREPLY[@]}"
        COMPREPLY=() COMP_WORDS=(delayer list --due-a) COMP_CWORD=2; _delayer_completion delayer; echo "${COMPREPLY[@]}"
    """
    path = f"{installed.parent}:{os.environ['PATH']}"
    words = ["bash", "-euc", script, "bash", completion]
    done = subprocess.run(words, env={"PATH": path}, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [
        "complete -o nosort -F _delayer_completion delayer",
        "reschedule",
        "--due-after",
    ]
    for other in ("zsh/site-functions/_delayer", "fish/vendor_completions.d/delayer.fish"):
        assert "_DELAYER_COMPLETE" in (installed.parent.parent / "share" / other).read_text()
