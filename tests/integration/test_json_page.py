"""docs/json.md: it has every command with --json, and real outputs are as it says."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from delayer.cli.main import cli
from tests.integration.cli import Run
from tests.support.daemon import PROGRAM
from tests.support.json_page import PAGE, page
from tests.support.json_shapes import COMMANDS, check


def with_json(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[str]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from with_json(inner, (*path, name))
    elif any("--json" in one.opts for one in command.params):
        yield " ".join(path)


def documented_as(command: str) -> str:
    """The row of the command: those of all import sources share theirs."""
    words = command.split()
    if words[0] == "import":
        return f"import … {words[2]}"
    return "schedule import …" if words[:2] == ["schedule", "import"] else command


def test_the_page_is_as_the_shapes_are() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.support.json_page"


def test_the_page_has_every_command_with_json() -> None:
    assert {documented_as(command) for command in with_json(cli)} == set(COMMANDS)


FILE = """[schedule.tick]
every = "2h"
to = "delayer.out"
[schedule.new]
every = "2h"
to = "delayer.out"
"""
TICK = ("--every", "1h", "--to", "delayer.out", "--routing-key", "k", "--body", "x")


def test_real_outputs_are_as_the_page_says(delayer: Run, vhost: str, database: str, tmp_path: Path) -> None:
    seen: set[str] = set()

    def look(command: str, *arguments: str, expect: int = 0) -> Any:
        seen.add(documented_as(command))
        output = delayer(*command.split(), *arguments, "--json", expect=expect).stdout
        return check(documented_as(command), output)

    def alone(command: str, *arguments: str, which: int = 0, expect: int = 0) -> Any:
        """A command that handles signals, in a process of its own."""
        seen.add(command)
        urls = {"DELAYER_BROKER__URL": vhost, "DELAYER_STORE__URL": database}
        environ = os.environ | urls | {"DELAYER_CONFIG": os.devnull}
        words = [*PROGRAM, *command.split(), *arguments, "--json"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, env=environ)
        assert done.returncode == expect, done.stderr
        return check(command, done.stdout, which)

    look("status")
    look("topology show")
    delayer("topology", "apply")
    for command in ("db current", "db lanes", "status", "topology show", "topology verify"):
        look(command)
    look("check", expect=1)
    delayer("schedule", "add", "tick", *TICK)
    look("schedule add", "tock", *TICK)
    look("schedule edit", "tock", "--body", "y")
    for verb in ("show", "preview", "run", "pause", "resume"):
        look(f"schedule {verb}", "tick")
    look("schedule remove", "tock")
    look("schedule list")
    (tmp_path / "schedules.toml").write_text(FILE)
    look("schedule apply", str(tmp_path / "schedules.toml"))
    (tmp_path / "crontab").write_text("* * * * * /bin/true\n")
    given = ("--zone", "UTC", "--to", "delayer.out", "--dry-run")
    look("schedule import crontab", str(tmp_path / "crontab"), *given)
    delayer("export", str(tmp_path / "messages"))
    ids = [one["id"] for one in look("list")["messages"]]
    look("show", ids[0])
    look("reschedule", ids[-1], "--by", "1h")
    look("cancel", ids[0])
    look("cancel", "--delay-key", "nobody", "--dry-run", expect=1)
    look("import jsonl preview", str(tmp_path / "messages"), expect=1)
    look("import jsonl run", str(tmp_path / "messages"), "--unverified", "--yes", expect=1)
    for name in ("held", "refused", "strays"):
        look(f"{name} list")
        look(f"{name} retry", "--all", "--yes")
        look(f"{name} drop", "--all", "--yes")
    look("audit-log")
    look("drain", "--to", "store", "--dry-run")
    alone("audit", expect=1)
    alone("backlog export", str(tmp_path / "dataset"))
    alone("restore", "--all", "--dry-run", which=1)
    alone("restore", "--all")
    alone("compact", "--dry-run", which=1)
    look("send", "--routing-key", "k", "--delay", "1h")
    check("send", delayer("send", "--file", "-", "--json", stdin=b'{"delay": "1h"}\n').stdout, 1)
    assert set(COMMANDS) - seen == {"import … abort"}, "which tests/faults/test_crash_import.py runs"


@pytest.mark.parametrize("name", ["refused", "strays"])
def test_messages_that_are_set_aside(name: str) -> None:
    from tests.unit.http.inside import REFUSED, STRAY

    one = {"refused": REFUSED, "strays": STRAY}[name].as_dict(whole=True)
    check(f"{name} list", json.dumps({"depth": 1, "delayed": 0, "hidden": "", "messages": [one]}))
