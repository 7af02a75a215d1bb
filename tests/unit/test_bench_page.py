"""The tables of docs/performance.md are those of the runs beside it, and the sizing follows from their slopes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import about, page, sizing
from bench.figures import Figure, Result


def some_run() -> Result:
    figures = [
        Figure("park", "park", 40_000, "msg/s", {"body": 512, "backlog": 0}),
        Figure("release", "release", 20_000, "msg/s", {"body": 512, "backlog": 0}),
        Figure("ceilings", "store copy", 100_000, "rows/s", {"body": 512}),
        Figure("native", "CPU of daemon", 30, "µs/msg"),
        Figure("native", "CPU of broker", 180, "µs/msg"),
        Figure("native", "CPU of daemon", 300, "µs/msg", {"rate": 300}),
        Figure("native", "CPU of broker", 2400, "µs/msg", {"rate": 300}),
        Figure("park", "memory of daemon", 90, "MB", {"body": 512, "backlog": 0}),
        Figure("bodies", "memory of daemon", 160, "MB", {"count": 1000, "body": 1_000_000}),
        Figure("processes", "memory of all", 70, "MB", {"workers": 1}),
        Figure("processes", "memory of all", 340, "MB", {"workers": 4}),
        Figure("start", "size of the store, as filled", 10_000, "MB", {"backlog": 10_000_000}),
    ]
    for part, park, release, steady in (("daemon", 10, 20, 60), ("broker", 10, 50, 150), ("database", 10, 10, 40)):
        figures += [
            Figure("park", f"CPU of {part}", park, "µs/msg", {"body": 512, "backlog": 0}),
            Figure("release", f"CPU of {part}", release, "µs/msg", {"body": 512, "backlog": 0}),
            Figure("park", f"CPU of {part}", park * 2, "µs/msg", {"body": 4096, "backlog": 0}),
            Figure("release", f"CPU of {part}", release * 2, "µs/msg", {"body": 4096, "backlog": 0}),
            Figure("steady", f"CPU of {part}", steady * 2, "µs/msg", {"rate": 2000, "backlog": 0}),
            Figure("steady", f"CPU of {part}", steady, "µs/msg", {"rate": 10_000, "backlog": 0}),
            Figure("steady", f"CPU of {part}", 1, "µs/msg", {"rate": 20_000, "backlog": 0}),
        ]
    for rate, late_ms in ((2000, 5), (10_000, 9), (20_000, 4000)):  # at the last one it fell behind
        figures.append(Figure("steady", "lateness p50", late_ms, "ms", {"rate": rate, "backlog": 0}))
    return Result({"at": "2026-01-02T03:04:05+00:00", "revision": "abc"}, figures)


def some_plans(rows: int = 10_000_000, **more: Any) -> dict[str, Any]:
    plan = {"name": "claim", "rows": 1000, "ms": 2.5, "planning_ms": 0.2, "buffers": 3000, "touched": 1}
    return {"rows": rows, "lanes": 4, "held": 20_000, "runs": 7, "statements": [plan], **more}


def some_runs() -> page.Runs:
    results = {
        "performance.json": some_run(),
        "performance-later.json": Result({}, [Figure("churn", "claims", 5, "ms")]),
        "performance-where.json": Result({}, [Figure("turn", "claim, p50", 0.7, "ms", {"rate": 5000})]),
        "performance-profile.json": Result({}, [Figure("parking", "asyncpg", 12.5, "%", {"body": 512})]),
        "performance-rolling.json": Result({}, [Figure("rolling", "daemon, lateness p99", 66, "ms", {"log": 64})]),
        "performance-looking.json": Result({}, [Figure("looking", "show", 12, "ms", {"backlog": 10_000_000})]),
        "performance-earlier.json": Result(),
        "performance-park.json": Result(),
    }
    return page.Runs(results, some_plans())


def test_the_page_shows_the_runs_beside_it() -> None:
    runs = page.Runs.load()
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.filled(text, runs) == text, "python -m bench.page --again"
    assert runs.full.about["kind"] == "full"
    assert not runs.full.about.get("broken")
    for name in (*runs.results, "performance-plans.json"):
        assert f"({name})" in text


def test_every_kind_of_table() -> None:
    kinds = (
        "runs",
        "compared",
        "later: churn",
        "where: turn",
        "profile: parking",
        "rolling: rolling",
        "looking: looking",
        "plans",
        "sizing: fleets waiting",
    )
    marks = "".join(f"<!-- {kind} -->\n<!-- end -->\n" for kind in kinds)
    filled = page.filled(marks, some_runs())
    assert "| [performance.json](performance.json) | 2026-01-02 03:04 UTC | abc | as usual |" in filled
    assert "| park, 512 B, 0 waiting |  | 40,000 msg/s |  |  |" in filled
    assert "| *5,000/s* |" in filled
    assert "| claim, p50 | 0.70 ms |" in filled
    assert "| asyncpg | 12.5 % |" in filled
    assert "| claims | 5.00 ms |" in filled
    assert "| show | 12.0 ms |" in filled
    assert "| claim | 1,000 | 2.50 | 0.20 | 3,000 | 1 |" in filled
    assert "| 100,000 of 512 B | 5 processes" in filled
    assert "| 1,000 a second | 3.6 M, 3.6 GB | 86.4 M, 86.4 GB | 2.59 billion, 2.59 TB |" in filled


def test_figures_of_the_same_conditions_stand_below_one_heading() -> None:
    runs = some_runs()
    runs.full.figures += [
        Figure("mixed", "first", 1, "ms", {"workers": 1}),
        Figure("mixed", "second", 2, "ms", {"workers": 2}),
        Figure("mixed", "third", 3, "ms", {"workers": 1}),
        Figure("mixed", "everywhere", 4, "ms"),
    ]
    runs.full.notes.append("mixed: {'rate': 10000, 'backlog': 0}: it fell behind")
    found = page.filled("<!-- figures: mixed -->\n<!-- end -->", runs).splitlines()
    assert [row.split(" | ")[0].strip("|* ") for row in found[4:9]] == [
        "everywhere",
        "1 process",
        "first",
        "third",
        ("2 processes"),
    ]
    assert "*The run's own note on mixed:* 10,000/s, 0 waiting: it fell behind." in found


def test_what_was_not_as_usual_is_said_in_words() -> None:
    told = {"options": {"quick": False, "repeats": 2, "rates": [5000], "steady_seconds": 60, "unknown": 1}}
    assert about.changed(told) == "repeats 2 (3), rates 5,000 (2,000+5,000+10,000)"
    assert about.disturbance({"cores_of_other_programs": {"park": 0.1, "burst": 0.31}}) == "0.31 at most (*burst*)"
    assert about.minutes({"seconds": {"park": 100.0, "burst": 20.0}}) == "2 min"
    assert about.when({}) == "an unknown time"


def stored(path: Path, result: Result | dict[str, Any]) -> Path:
    if isinstance(result, Result):
        result.save(path)
    else:
        path.write_text(json.dumps(result))
    return path


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"at": "2026-01-03T00:00:00+00:00", "kind": "full"}, None),
        ({"at": "2026-01-03T00:00:00+00:00", "kind": "quick"}, "it is a quick run"),
        ({"at": "2026-01-03T00:00:00+00:00", "broken": ["park"]}, "sections of it broke: park"),
        ({"at": "2026-01-01T00:00:00+00:00"}, "it is of 2026-01-01 00:00 UTC, the page's of 2026-01-02 03:04 UTC"),
        ({}, "it is of an unknown time, the page's of 2026-01-02 03:04 UTC"),
    ],
)
def test_a_result_that_says_less_is_not_taken(tmp_path: Path, told: dict[str, Any], why: str | None) -> None:
    old = stored(tmp_path / "performance.json", some_run())
    assert page.unfit(stored(tmp_path / "latest.json", Result(told)), old) == why


def test_plans_over_fewer_rows_are_not_taken(tmp_path: Path) -> None:
    old = stored(tmp_path / "performance-plans.json", some_plans())
    now = {"at": "2026-01-03T00:00:00+00:00"}
    small = stored(tmp_path / "plans.json", some_plans(1000, about=now))
    assert page.unfit(small, old) == "it is of 1,000 rows, the page's of 10,000,000"
    assert page.unfit(stored(tmp_path / "plans.json", some_plans(about=now)), old) is None
    assert "an unknown time" in str(page.unfit(stored(tmp_path / "plans.json", some_plans()), old))


def test_nothing_is_written_before_all_tables_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    docs, results = tmp_path / "docs", tmp_path / "results"
    docs.mkdir()
    results.mkdir()
    for name, one in {"PAGE": docs / "performance.md", "DOCS": docs, "RESULTS": results, "ROOT": tmp_path}.items():
        monkeypatch.setattr(page, name, one)
    runs = some_runs()
    for name, run in runs.results.items():
        stored(docs / name, run)
    stored(docs / "performance-plans.json", runs.plans)
    page.PAGE.write_text("<!-- where: turn -->\n<!-- end -->\n")
    monkeypatch.setattr(sys, "argv", ["bench.page"])
    late = Result({"at": "2026-02-01T00:00:00+00:00"}, [Figure("database", "claims", 1, "ms")])
    stored(results / "where.json", late)
    before = {path: path.read_text() for path in docs.iterdir()}
    assert page.main() == 2
    assert capsys.readouterr().err == "nothing is changed: the run has no figures of section 'turn'\n"
    assert {path: path.read_text() for path in docs.iterdir()} == before
    late.figures.append(Figure("turn", "claim, p50", 0.9, "ms"))
    stored(results / "where.json", late)
    assert page.main() == 0
    assert "0.90 ms" in page.PAGE.read_text()
    assert Result.load(docs / "performance-where.json") == late


def test_tables_are_written_between_their_marks_only() -> None:
    text = "before\n<!-- figures: park release -->\nold\n<!-- end -->\nafter\n"
    filled = page.filled(text, some_runs())
    assert filled.startswith("before\n<!-- figures: park release -->\n")
    assert filled.endswith("<!-- end -->\nafter\n")
    assert "old" not in filled
    assert "| park | 40,000 msg/s |" in filled
    assert page.filled(filled, some_runs()) == filled


def test_a_section_that_was_not_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="churn"):
        page.filled("<!-- figures: churn -->\n<!-- end -->", some_runs())


@pytest.mark.parametrize(
    ("rate", "cpu_us", "source"),
    [
        (1_000, {"daemon": 120, "broker": 300, "database": 80}, "at 2,000/s"),
        (10_000, {"daemon": 60, "broker": 150, "database": 40}, "at 10,000/s"),
        (100_000, {"daemon": 30, "broker": 60, "database": 20}, "in bulk"),
    ],
)
def test_each_rate_is_reckoned_with_the_nearest_one_that_was_measured(
    rate: int, cpu_us: dict[str, float], source: str
) -> None:
    assert sizing.slopes(some_run(), rate) == (cpu_us, source)


def test_cores_and_disk() -> None:
    lines = list(sizing.fleets(some_run()))
    assert lines[2] == "| 1,000 of 512 B | 1 process (0.2 cores) | 0.5 cores | 0.1 cores | 0.8 cores | at 2,000/s |"
    assert lines[4] == "| 100,000 of 512 B | 5 processes (5.0 cores) | 10.0 cores | 3.3 cores | 18.3 cores | in bulk |"
    assert (
        lines[7] == "| 100,000 of 4,096 B | 10 processes (10.0 cores) | 20.0 cores | 6.7 cores | 36.7 cores | in bulk |"
    )
    disk = list(sizing.billion(some_run()))
    assert "(1,000 bytes a row) | 1.00 TB |" in disk[2]
    assert "2.8 h" in disk[3]
    assert "13.9 h" in disk[4]


def test_a_rate_that_the_publisher_did_not_keep_is_none() -> None:
    """It says what fewer messages cost, by the message of a rate that never was."""
    run = some_run()
    run.figures.append(
        Figure("steady", "publisher behind its plan, at most", 5_931, "ms", {"rate": 10_000, "backlog": 0})
    )
    assert sizing.slopes(run, 5_000) == sizing.slopes(run, 2_000)
    assert sizing.slopes(run, 10_000).source == "in bulk"


def test_sizing_says_what_the_run_lacks() -> None:
    with pytest.raises(ValueError, match="steady"):
        list(sizing.fleets(Result()))
    with pytest.raises(ValueError, match="large"):
        list(sizing.billion(Result()))
    with pytest.raises(ValueError, match="native"):
        list(sizing.native(Result()))
    with pytest.raises(ValueError, match="memory"):
        list(sizing.memory(Result()))


def test_large_bodies_cost_at_a_rate_what_they_cost_more_in_bulk() -> None:
    cpu_us, source = sizing.slopes(some_run(), 10_000, 4096)
    assert cpu_us == {"daemon": 60 + 30, "broker": 150 + 60, "database": 40 + 20}
    assert source == "at 10,000/s, and what such bodies cost more in bulk"


def test_native_mode_lies_between_the_entry_in_bulk_and_whole_trips_at_a_low_rate() -> None:
    assert list(sizing.native(some_run()))[3] == "| 10,000 | 0.5 to 5.0 cores | 3.0 to 40.0 cores |"


def test_memory_is_the_most_that_was_seen() -> None:
    _, _, one, large, each = sizing.memory(some_run())
    assert "| 90 MB (in *park*) |" in one
    assert "1,000 bodies of 1 MB | 160 MB |" in large
    assert each.endswith("| 90 MB |")


def test_the_size_of_a_store_that_others_used_too_is_an_upper_bound() -> None:
    used = Result({}, [Figure("start", "size of the store", 9000, "MB", {"backlog": 10_000_000})])
    assert sizing.row(used) == (900, "at most 900 bytes a row")
    assert sizing.row(Result({}, some_run().figures + used.figures)) == (1000, "1,000 bytes a row")
