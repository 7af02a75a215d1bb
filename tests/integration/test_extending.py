"""The worked examples of docs/extending.md: their patches apply, and their commands do what the page says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.acceptance.world import Things
from tests.support.servers import RabbitMQ
from tests.unit.test_imports import read_package, violations

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/extending.md").read_text()
PATCHES = re.findall(r"^```diff\n(.*?)^```$", PAGE, flags=re.M | re.S)
CONSOLES = re.findall(r"^```console\n(.*?)^```$", PAGE, flags=re.M | re.S)


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with all patches."""
    copy = tmp_path_factory.mktemp("extended")
    for folder in ("delayer", "migrations"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    for patch in PATCHES:
        # An editor leaves no blanks at the ends of lines, so empty context lines have lost their blank.
        text = re.sub(r"^$", " ", patch.removesuffix("\n"), flags=re.M) + "\n"
        subprocess.run(["git", "apply", "-"], cwd=copy, input=text, text=True, check=True)
    return copy


def run(line: str, extended: Path, cwd: Path, environ: Mapping[str, str] | None = None) -> str:
    """The output of a line of the page, by the extended package."""
    command = line.replace("delayer ", f"{sys.executable} -m delayer ", 1) if line.startswith("delayer ") else line
    paths = {"PYTHONPATH": str(extended), "PYTHONSAFEPATH": "1"}
    environ = os.environ | paths | (environ or {})
    done = subprocess.run(command, shell=True, cwd=cwd, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def lines_of(console: str) -> list[tuple[str, str]]:
    """Each command of a console, and the output that the page shows."""
    return re.findall(r"^\$ (.*)\n((?:[^$\n].*\n)*)", console, flags=re.M)


def test_the_page_has_an_example_for_each_change() -> None:
    assert (len(PATCHES), len(CONSOLES)) == (4, 3)


def test_the_patched_package_passes_the_project_s_checks(extended: Path) -> None:
    if (cache := ROOT / ".mypy_cache").exists():  # Without it mypy takes 20 s instead of one.
        shutil.copytree(cache, extended / cache.name)
    for tool in ("ruff check", "ruff format --check", "mypy"):
        subprocess.run([sys.executable, "-m", *tool.split(), "delayer"], cwd=extended, check=True)
    assert violations(read_package(extended / "delayer")) == []


def test_a_delay_form(extended: Path, tmp_path: Path) -> None:
    [(check, _)] = lines_of(CONSOLES[0])
    run(check, extended, tmp_path)
    program = """
from delayer.amqp.properties import Properties
from delayer.core.delay_headers import DelayRequest, UnreadableDelay
from delayer.core.delay_sources import is_lasting, source_of
def read(body): return source_of("sidekiq")(DelayRequest(b"jobs", b"", {}, Properties.parse(bytes(2)), body))
print(is_lasting("sidekiq"), read(b'{"at": 1700000000.0001}'), read(b'{"class": "Mail"}'))
try: read(b'{"at": "soon"}')
except UnreadableDelay as error: print(error)
"""
    (tmp_path / "program.py").write_text(program)
    seen = run(f"{sys.executable} program.py", extended, tmp_path)
    assert seen == "True (None, 1700000000001) None\nexpected epoch seconds in \"at\", found 'soon'\n"


def test_an_import_source_and_a_command(
    extended: Path, tmp_path: Path, database: str, rabbitmq: RabbitMQ, vhost_name: str
) -> None:
    Things(rabbitmq, vhost_name).queue("mails")
    broker = rabbitmq.url(vhost_name)
    environ = {"DELAYER_MODE": "store", "DELAYER_STORE__URL": database, "DELAYER_BROKER__URL": broker}
    (write, _), (preview, _), (go, _) = lines_of(CONSOLES[1])
    run(write, extended, tmp_path)
    assert "Chosen: 1 message." in run(preview, extended, tmp_path, environ)
    run(go, extended, tmp_path, environ)
    [(command, shown)] = lines_of(CONSOLES[2])
    assert run(command, extended, tmp_path, environ) == shown == "2099-01-31T08:00:00Z\n"
