"""The tables of docs/performance.md are those of the run beside it, and the sizing follows from its slopes."""

from __future__ import annotations

import pytest

from bench import page, sizing
from bench.figures import Figure, Result


def some_run() -> Result:
    figures = [
        Figure("park", "park", 40_000, "msg/s", {"body": 512, "backlog": 0}),
        Figure("release", "release", 20_000, "msg/s", {"body": 512, "backlog": 0}),
        Figure("ceilings", "store copy", 100_000, "rows/s", {"body": 512}),
        Figure("start", "size of the store", 10_000, "MB", {"backlog": 10_000_000}),
    ]
    for part, park, release, steady in (("daemon", 10, 20, 60), ("broker", 10, 50, 150), ("database", 10, 10, 40)):
        figures += [
            Figure("park", f"CPU of {part}", park, "µs/msg", {"body": 512, "backlog": 0}),
            Figure("release", f"CPU of {part}", release, "µs/msg", {"body": 512, "backlog": 0}),
            Figure("steady", f"CPU of {part}", steady * 2, "µs/msg", {"rate": 2000, "backlog": 0}),
            Figure("steady", f"CPU of {part}", steady, "µs/msg", {"rate": 10_000, "backlog": 0}),
            Figure("steady", f"CPU of {part}", 1, "µs/msg", {"rate": 20_000, "backlog": 0}),
        ]
    for rate, late_ms in ((2000, 5), (10_000, 9), (20_000, 4000)):  # at the last one it fell behind
        figures.append(Figure("steady", "lateness p50", late_ms, "ms", {"rate": rate, "backlog": 0}))
    return Result({}, figures)


def some_runs() -> page.Runs:
    plan = {"name": "claim", "rows": 1000, "ms": 2.5, "planning_ms": 0.2, "buffers": 3000, "touched": 1}
    plans = {"rows": 10_000_000, "lanes": 4, "held": 20_000, "statements": [plan]}
    later = Result({}, [Figure("churn", "claims", 5, "ms")])
    return page.Runs(some_run(), later, Result({}, [Figure("turn", "claim, p50", 0.7, "ms", {"rate": 5000})]), plans)


def test_the_page_shows_the_runs_beside_it() -> None:
    runs = page.Runs.load()
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.filled(text, runs) == text, "python -m bench.page --again"
    assert runs.full.about["kind"] == "full"
    assert not runs.full.about.get("broken")


def test_every_kind_of_table() -> None:
    kinds = ("later: churn", "where: turn", "plans", "sizing")
    marks = "".join(f"<!-- {kind} -->\n<!-- end -->\n" for kind in kinds)
    filled = page.filled(marks, some_runs())
    assert "| *5,000/s* |" in filled
    assert "| claim, p50 | 0.70 ms |" in filled
    assert "| claims | 5.00 ms |" in filled
    assert "| claim | 1,000 | 2.50 | 0.20 | 3,000 | 1 |" in filled
    assert "| 100,000 | 5 processes" in filled


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
    assert lines[2] == "| 1,000 | 1 process (0.2 cores) | 0.5 cores | 0.1 cores | at 2,000/s |"
    assert lines[4] == "| 100,000 | 5 processes (5.0 cores) | 10.0 cores | 3.3 cores | in bulk |"
    disk = list(sizing.billion(some_run()))
    assert "(1,000 bytes a row) | 1.00 TB |" in disk[2]
    assert "2.8 h" in disk[3]
    assert "13.9 h" in disk[4]


def test_sizing_says_what_the_run_lacks() -> None:
    with pytest.raises(ValueError, match="steady"):
        list(sizing.fleets(Result()))
    with pytest.raises(ValueError, match="large"):
        list(sizing.billion(Result()))
