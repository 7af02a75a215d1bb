"""The table of docs/importing.md is that of the run beside it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import import_page
from bench.figures import Figure, Result

MARKS = "before\n<!-- imports -->\nold\n<!-- end -->\nafter\n"


def some_run(at: str = "2026-01-02T03:04:05+00:00", factor: int = 1) -> Result:
    figures = [
        Figure(section, what, rate * factor, unit, {"count": count})
        for _, section, name in import_page.ROWS
        for count in (1_000_000, 100_000)
        for what, rate, unit in ((name, 12_345, "/s"), (f"memory of an {name}", 95.2, "MB"))
    ]
    return Result({"at": at, "revision": "abc", "machine": "2 cores", "kind": "full"}, figures)


def test_the_page_shows_the_run_beside_it() -> None:
    run = Result.load(import_page.KEPT)
    text = import_page.PAGE.read_text(encoding="utf-8")
    assert import_page.filled(text, run) == text, "python -m bench.import_page --again"
    assert run.about["kind"] == "full"
    assert not run.about.get("broken")


def test_only_what_stands_between_the_marks_is_written() -> None:
    found = import_page.filled(MARKS, some_run())
    assert found.startswith("before\n<!-- imports -->\n")
    assert found.endswith("<!-- end -->\nafter\n")
    assert "old" not in found
    assert import_page.filled(found, some_run()) == found
    rows = [line for line in found.splitlines() if line.startswith("| `nservicebus-sql`, MariaDB")]
    assert rows == [
        "| `nservicebus-sql`, MariaDB | 100,000 | 12,345 | 95.2 MB |",
        "| `nservicebus-sql`, MariaDB | 1,000,000 | 12,345 | 95.2 MB |",
    ]


@pytest.mark.parametrize("missing", [0, 1, -1])
def test_a_run_that_lacks_a_figure_is_an_error(missing: int) -> None:
    run = some_run()
    lacking = run.figures[missing].what
    run.figures = [figure for figure in run.figures if figure.what != lacking]
    with pytest.raises(ValueError, match="the run has no"):
        import_page.filled(MARKS, run)


def test_a_page_without_the_mark_is_an_error() -> None:
    with pytest.raises(ValueError, match="imports"):
        import_page.filled("no mark", some_run())


def test_a_newer_run_is_taken_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, kept, result = (tmp_path / name for name in ("importing.md", "importing.json", "new.json"))
    monkeypatch.setattr(import_page, "PAGE", one)
    monkeypatch.setattr(import_page, "KEPT", kept)
    monkeypatch.setattr(import_page.page, "ROOT", tmp_path)
    monkeypatch.setattr(import_page, "RESULT", tmp_path / "results.json")
    one.write_text(import_page.filled(MARKS, some_run()))
    some_run().save(kept)

    def take(run: Result) -> tuple[int, str]:
        run.save(result)
        monkeypatch.setattr(sys, "argv", ["bench.import_page", str(result)])
        return import_page.main(), one.read_text()

    before = one.read_text()
    assert take(some_run("2025-01-01T00:00:00+00:00", 2)) == (2, before)
    lacking = some_run("2026-02-01T00:00:00+00:00", 2)
    lacking.figures.pop()
    assert take(lacking) == (2, before)
    assert json.loads(kept.read_text())["about"]["at"] == "2026-01-02T03:04:05+00:00"
    assert capsys.readouterr().err.count("nothing is changed") == 2
    code, text = take(some_run("2026-02-01T00:00:00+00:00", 2))
    assert code == 0
    assert "24,690" in text
    assert Result.load(kept) == Result.load(result)
