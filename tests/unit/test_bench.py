"""The benchmark's pure parts: rates, percentiles, targets, the table of a stored result."""

from __future__ import annotations

import io
from array import array
from pathlib import Path

import pytest
from rich.console import Console

from bench import ceilings, report, targets, traffic
from bench.compaction import Done
from bench.figures import Figure, Result, Series, median, moment_of, percentile, rate_between


def test_a_rate_leaves_out_the_start_and_the_end() -> None:
    # Ten seconds of nothing, then 100 a second, then one straggler a minute later.
    samples = [(0.0, 0.0), (10.0, 0.0), *((10.0 + n / 10, n * 10.0) for n in range(1, 100)), (80.0, 1000.0)]
    assert rate_between(samples, 1000) == pytest.approx(100)


def test_moments_lie_between_samples() -> None:
    assert moment_of([(0.0, 0.0), (2.0, 100.0)], 50) == 1.0
    assert moment_of([(3.0, 100.0)], 50) == 3.0
    with pytest.raises(ValueError, match="never reached 500; it ended at 100"):
        moment_of([(0.0, 0.0), (2.0, 100.0)], 500)


def test_percentiles_are_values_that_occurred() -> None:
    ordered = [float(n) for n in range(1, 1001)]
    assert [percentile(ordered, share) for share in (0.0, 0.5, 0.99, 0.999, 1.0)] == [1, 500, 990, 999, 1000]
    assert percentile([7.0], 0.5) == 7.0
    assert median([3.0, 1.0, 2.0]) == 2.0


def test_lateness_beside_a_command_is_that_of_what_was_due_while_it_worked(tmp_path: Path) -> None:
    """A hundred messages a second for a minute, late while a command works, which takes a tenth of the time."""
    told = {"seconds": 4.0, "shrink_seconds": 1.0}
    done = Done(told, seconds=9.0, ended_ms=36_000.0)
    assert done.worked_ms == (30_000.0, 36_000.0)
    assert Done(told, seconds=3.0, ended_ms=36_000.0).worked_ms == (33_000.0, 36_000.0)
    due = [10.0 * n for n in range(6_000)]
    late = [900.0 if 30_000 <= one < 36_000 else 1.0 for one in due]
    seen = traffic.Arrivals(array("d", [a + b for a, b in zip(due, late, strict=True)]), array("d", late))
    file = tmp_path / "arrivals"
    file.write_bytes(seen.at.tobytes() + seen.late.tobytes())
    found = traffic.lateness(traffic.due_between(traffic.kept(file), *done.worked_ms))
    assert (found["counted"], found["late"]["0.5"]) == (600, 900.0)
    assert traffic.lateness([])["late"] == {}


def some_result() -> Result:
    return Result(
        about={"kind": "quick", "revision": "abc", "machine": "2 cores", "versions": {"RabbitMQ": "4"}},
        figures=[
            Figure("ceilings", ceilings.PUBLISH, 50_000, "msg/s", {"body": 512}),
            Figure("ceilings", ceilings.CONSUME, 120_000, "msg/s", {"body": 512}),
            Figure("ceilings", ceilings.COPY, 100_000, "rows/s", {"body": 512}),
            Figure("park", "park", 65_000, "msg/s", {"body": 512, "backlog": 0}),
            Figure("park", "park", 52_000, "msg/s", {"body": 512, "backlog": 10_000_000}),
            Figure("release", "release", 30_000, "msg/s", {"body": 512, "backlog": 0}),
            Figure("steady", "early", 0, "msg", {"rate": 5000, "backlog": 0}),
        ],
        series=[Series("steady", "lateness by share", [0.5], [3.0], {"rate": 5000})],
        notes=["park: something to know"],
    )


def verdicts(result: Result, section: str, **at: int) -> dict[str, bool]:
    figure = result.find(section, section, **at)
    assert figure is not None
    return {target["text"]: target["met"] for target in figure.targets}


def test_figures_are_judged_beside_the_ceilings_of_their_run() -> None:
    result = some_result()
    targets.compare(result)
    parked = result.find("park", "park", backlog=0)
    assert parked is not None
    assert (parked.ratio, parked.of) == (0.65, ceilings.COPY)
    assert verdicts(result, "park", backlog=0) == {"≥ 60 k/s": True, "≥ 0.6 of the ceiling": True}
    assert verdicts(result, "park", backlog=10_000_000) == {
        "≥ 60 k/s": False,
        "≥ 0.6 of the ceiling": False,
        "≥ 0.9 of no backlog": False,
    }
    assert verdicts(result, "release") == {"≥ 35 k/s": False, "≥ 0.7 of the ceiling": False}


def test_without_ceilings_there_is_no_ratio_and_nothing_fails() -> None:
    result = some_result()
    result.figures = [one for one in result.figures if one.section != "ceilings"]
    targets.compare(result)
    assert verdicts(result, "park", backlog=0) == {"≥ 60 k/s": True}


def test_a_stored_result_comes_back_and_can_be_shown(tmp_path: Path) -> None:
    result, path = some_result(), tmp_path / "results" / "some.json"
    targets.compare(result)
    result.save(path)
    again = Result.load(path)
    assert again == result
    written = io.StringIO()
    report.show(again, Console(file=written, width=120))
    lines = written.getvalue().splitlines()
    park = next(line for line in lines if "park" in line and "65,000" in line)
    assert "0.65" in park and "✓ ≥ 60 k/s" in park
    assert any("512 B, 10,000,000 waiting" in line for line in lines)
    assert any("! park: something to know" in line for line in lines)
    assert "3 of 8 targets met" in written.getvalue()


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (1.234, "1.23"), (12.34, "12.3"), (12_345.6, "12,346")])
def test_numbers_have_the_digits_that_mean_something(value: float, text: str) -> None:
    assert report.number(value) == text
