"""The file of lines that a long section writes beside its result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.run import Bench, Options


def test_a_run_replaces_the_lines_of_the_last_one_only_when_it_is_complete(tmp_path: Path) -> None:
    no_servers: Any = None
    bench = Bench(Options(), no_servers, section="hours", folder=tmp_path)
    with bench.writing_lines() as file:
        file.write("first\n")
    with pytest.raises(RuntimeError), bench.writing_lines() as file:
        file.write("second\n")
        raise RuntimeError
    assert bench.lines.read_text() == "first\n"
    with bench.writing_lines() as file:
        file.write("third\n")
    assert [one.read_text() for one in tmp_path.iterdir()] == ["third\n"]
