"""The tables of docs/backlog.md are those of the runs beside it, and every target that they missed has its reason."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import backlog_page, backlog_words, given, targets
from bench.figures import Figure, Result

EVERY = ("runs", "reading", "compaction", "billion", "missed")
MARKS = "before\n" + "".join(f"<!-- {name} -->\nold\n<!-- end -->\nbetween\n" for name in EVERY) + "after\n"


def some_run(rows: int = 1_000_000, at: str = "2026-01-02T03:04:05+00:00", **values: float) -> Result:
    usual = {"compact, rate": 60_000.0, "shrinks by": 8.5, "restore, rate": 80_000.0}
    usual |= {"bytes a message before": 1000.0, "bytes a message after": 120.0}
    usual |= {"compact, seconds": rows / 60_000, "compact, giving room back": rows / 300_000}
    figures = [
        Figure("compaction", what, values.get(what, usual.get(what, 0.0)), "", {"rows": rows})
        for _, what in backlog_words.ROWS
    ]
    options = {"compacted": rows, "compaction_alone": False}
    about = {"at": at, "revision": "abc", "kind": "full", "options": options}
    result = Result(about, figures)
    targets.compare(result)
    return result


def some_reading(rows: int = 10_000_000, rate: int = 250_000, **more: Any) -> dict[str, Any]:
    step = {
        "seconds": rows / rate,
        "rows_per_second": rate,
        "cpu_us_per_row": {"spark": 4.0, "database": 2.0},
        "cores_of_others": 0.1,
        "peak_mb": {"jvm": 1000, "python worker": 200},
        "peak_disk_bytes": rows * 200,
        "found": rows * 70,
    }
    return {"rows": rows, "size": 512, "cores": 2, **{name: step for _, name in backlog_page.READ}, **more}


def some_runs(whole: Result | None = None, **reading: Any) -> backlog_page.Runs:
    return backlog_page.Runs(
        whole or some_run(800_000), some_run(), some_reading(**reading), some_reading(200_000, orders=True)
    )


def test_the_page_shows_the_runs_beside_it() -> None:
    runs = backlog_page.Runs.load()
    text = backlog_page.PAGE.read_text(encoding="utf-8")
    assert backlog_page.filled(text, runs) == text, "python -m bench.backlog_page"
    for name in EVERY:
        assert f"<!-- {name} -->" in text
    for name, kept in backlog_page.KEPT.items():
        assert (f"({kept})" in text) is (getattr(runs, name) is not None)
    assert not any(run.about.get("broken") for run in runs.compactions.values())
    assert runs.reading["rows"] >= targets.TEN_MILLION


def test_only_what_stands_between_the_marks_is_written() -> None:
    found = backlog_page.filled(MARKS, some_runs())
    assert "old" not in found
    assert found.startswith("before\n<!-- runs -->\n") and found.endswith("\nafter\n")
    assert found.count("between") == len(EVERY)
    assert backlog_page.filled(found, some_runs()) == found


def test_what_the_tables_say() -> None:
    found = backlog_page.filled(MARKS, some_runs())
    for line in (
        "(backlog-compaction.json) | 2026-01-02 03:04 UTC | abc | 800,000 orders | not measured |",
        "(backlog-reading.json) | an unknown time | not said | 10,000,000 rows, bodies of 512 B | 0.10 at most |",
        "|  | 1,000,000 orders | 800,000 orders | target |",
        "| compacting | ✓ 60,000 | ✓ 60,000 | ≥ 50 k/s |",
        "| restoring in bulk | ✓ 80,000 (1,000,000 messages) | 80,000 (800,000 messages) | ≥ 50 k/s |",
        "| every column, bodies too | ✓ 250,000 rows/s (40.0 s) | 6.0 µs, 2.0 of them the database's | 1.1 h | 8 min |",
        "| the store, not compacted | 1,000 bytes | 1.00 TB |",
        "| the store, compacted | 120 bytes | 120 GB |",
        "| an audit's extract, below `--work` | 70 bytes | 70 GB |",
        "| the most that lies there while it is judged: the extract, and what Spark shuffles | 200 bytes | 200 GB |",
        "| rows/s with that | 50,000 msg/s | 50,000 msg/s |  |",
        "| compacting and giving room back, on this machine | 50,000/s | 5.6 h |",
    ):  # fmt: skip
        assert line in found
    assert "20 GB in the 1.1 h of the reading" in found
    assert "<!-- missed -->\n\nNone.\n\n<!-- end -->" in found


def test_what_was_missed_is_said_with_its_limit() -> None:
    slow = some_run(800_000, **{"compact, rate": 42_000.0})
    found = backlog_page.filled(MARKS, some_runs(slow, rate=180_000))
    kept = "[backlog-compaction.json](backlog-compaction.json)"
    assert f"- **compact, rate**: 42,000 in {kept}, wanted ≥ 50 k/s. What stops it: the two cores" in found
    assert "| compacting | ✓ 60,000 | ✗ 42,000 | ≥ 50 k/s |" in found
    assert "- **full read**: 180,000 rows/s in " in found
    assert "| ✗ 180,000 rows/s (55.6 s) |" in found
    assert "None." not in found


def test_a_run_without_traffic_may_be_missing() -> None:
    found = backlog_page.filled(MARKS, some_runs()._replace(alone=None))
    assert "|  | 800,000 orders | target |" in found
    assert "| compacting and giving room back, on this machine | 50,000/s | 5.6 h |" in found
    assert backlog_page.KEPT["alone"] not in found


def test_what_a_run_says_of_itself_is_told() -> None:
    whole = some_run(800_000)
    whole.notes.append("compaction: beside compact: 62 s of work, but traffic for 48 s only")
    found = backlog_page.filled(MARKS, some_runs(whole))
    kept = backlog_page.KEPT["whole"]
    assert f"*The run's own note in {kept}:* beside compact: 62 s of work, but traffic for 48 s only." in found


def test_a_target_that_was_missed_for_reasons_unknown_is_an_error() -> None:
    assert "shrinks by" not in backlog_words.LIMITS
    with pytest.raises(ValueError, match="shrinks by"):
        backlog_page.filled(MARKS, some_runs(some_run(**{"shrinks by": 7.9})))


def test_what_a_few_messages_say_is_not_reckoned_with() -> None:
    runs = some_runs(some_run(100_000))._replace(alone=None)
    found = backlog_page.filled(MARKS, runs)
    assert "- **restoring a million**: not judged. These runs restored 100,000 messages" in found
    assert "| restoring in bulk, on this machine |" not in found
    assert "| restoring in bulk, on this machine |" in backlog_page.filled(MARKS, some_runs())


@pytest.mark.parametrize("lacking", ["compact, rate", "beside restore, lateness p99"])
def test_a_run_that_lacks_a_figure_is_an_error(lacking: str) -> None:
    run = some_run(800_000)
    run.figures = [figure for figure in run.figures if figure.what != lacking]
    with pytest.raises(ValueError, match=f"no figure '{lacking}'"):
        backlog_page.filled(MARKS, some_runs(run))


def test_few_messages_say_nothing_of_a_million() -> None:
    """What a command took for a tenth of them is mostly the start of Spark."""
    few = some_run(100_000, **{"restore, rate": 20_000.0})
    figure = few.find("compaction", "restore, rate")
    assert figure is not None
    assert not figure.targets


@pytest.fixture
def page_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(backlog_page.page, "DOCS", tmp_path)
    monkeypatch.setattr(backlog_page, "PAGE", tmp_path / "backlog.md")
    runs = some_runs()
    runs.whole.save(tmp_path / backlog_page.KEPT["whole"])
    runs.alone.save(tmp_path / backlog_page.KEPT["alone"])
    for name, told in (("reading", runs.reading), ("orders", runs.orders)):
        (tmp_path / backlog_page.KEPT[name]).write_text(json.dumps(told))
    backlog_page.PAGE.write_text(MARKS)
    return tmp_path


def test_nothing_is_written_unless_all_of_it_can_be(
    page_of_runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    new = page_of_runs / "new.json"

    def take(name: str) -> int:
        monkeypatch.setattr(sys, "argv", ["bench.backlog_page", f"--{name}", str(new)])
        return backlog_page.main()

    def kept() -> dict[str, str]:
        return {path.name: path.read_text() for path in page_of_runs.iterdir() if path != new}

    before = kept()
    for name, text, why in (
        ("reading", json.dumps(some_reading(1000)), "it is of 1,000 rows, the page's of 10,000,000"),
        ("reading", json.dumps(some_reading(orders=True)), "it is of other bodies"),
        ("orders", json.dumps(some_reading()), "it is of other bodies"),
        ("reading", "{}", "found something else"),
        ("whole", some_run(800_000, "2025-01-01T00:00:00+00:00").as_json(), "it is of 2025-01-01"),
        ("whole", some_run(800_000, "2026-02-01T00:00:00+00:00", **{"shrinks by": 7.0}).as_json(), "shrinks by"),
    ):
        new.write_text(text)
        assert take(name) == given.USAGE
        assert why in capsys.readouterr().err
        assert kept() == before
    new.write_text(some_run(800_000, "2026-02-01T00:00:00+00:00").as_json())
    assert take("whole") == 0
    assert "2026-02-01" in backlog_page.PAGE.read_text()
    assert (page_of_runs / backlog_page.KEPT["whole"]).read_text() == new.read_text()
