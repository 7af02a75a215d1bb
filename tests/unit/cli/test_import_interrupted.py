"""Ctrl-C in the middle of an import: what to do next is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from delayer.cli import importing
from delayer.cli.main import cli


def test_an_interrupted_import_names_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importing, "_with", interrupted)
    monkeypatch.setenv("DELAYER_CONFIG", "/dev/null")
    done = CliRunner().invoke(cli, ["import", "jsonl", "run", str(tmp_path / "backlog.jsonl"), "--yes"])
    assert done.exit_code == 1
    assert "the same command, which goes on where it stopped" in done.stderr
    assert "Traceback" not in done.output
