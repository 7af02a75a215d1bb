"""The benchmark's arithmetic: rates, percentiles, ratios to ceilings, the tables of a stored result."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from bench import ceilings, report
from bench.figures import Figure, Result, median, moment_of, percentile, rate_between
from bench.marks import Tally


def test_rate_leaves_out_the_start_and_the_end() -> None:
    # Ten seconds of nothing, then 100 a second, then one straggler a minute later.
    samples = [(0.0, 0.0), (10.0, 0.0), *((10.0 + n / 10, n * 10.0) for n in range(1, 100)), (80.0, 1000.0)]
    assert rate_between(samples, 1000) == pytest.approx(100)


def test_moments_lie_between_samples() -> None:
    assert moment_of([(0.0, 0.0), (2.0, 100.0)], 50) == 1.0
    with pytest.raises(ValueError, match="never reached 500; it ended at 100"):
        moment_of([(0.0, 0.0), (2.0, 100.0)], 500)


def test_percentiles_are_values_that_occurred() -> None:
    ordered = [float(n) for n in range(1, 1001)]
    assert [percentile(ordered, share) for share in (0.0, 0.5, 0.99, 0.999, 1.0)] == [1, 500, 990, 999, 1000]
    assert median([3.0, 1.0, 2.0]) == 2.0


def test_a_repeated_message_does_not_stand_in_for_a_lost_one() -> None:
    tally = Tally(count=3, distinct=3)
    for n in (0, 1, 1):
        tally.take(n)
    assert (tally.came, tally.repeated) == (2, 1)


def test_stored_result_is_shown_beside_the_ceilings_of_its_run(tmp_path: Path) -> None:
    result = Result(
        about={
            "at": "2026-11-23T04:00:00+00:00",
            "revision": "abc",
            "machine": "2 cores",
            "versions": {"RabbitMQ": "4"},
        },
        figures=[
            Figure("ceilings", ceilings.CONSUME, 120_000, "msg/s", {"body": 512}),
            Figure("ceilings", ceilings.COPY, 100_000, "rows/s", {"body": 512}),
            Figure("park", "park", 65_000, "msg/s", {"body": 512, "backlog": 0}),
            Figure("steady", "lateness p50", 2.345, "ms", {"rate": 5000}),
            Figure("steady", "lateness p99", 12.3, "ms", {"rate": 5000}),
        ],
        notes=["park: something to know"],
    )
    result.save(tmp_path / "results" / "some.json")
    again = Result.load(tmp_path / "results" / "some.json")
    assert again == result
    text = report.markdown(again)
    assert "| park: park | 512 B, 0 waiting | 65,000 msg/s | 100,000 rows/s | 0.65 |" in text
    assert "| steady: delayer | 5,000/s | 2.35 ms | 12.3 ms |  |  |" in text
    assert "- park: something to know" in text
    written = io.StringIO()
    report.show(again, Console(file=written, width=140))
    assert "65,000 msg/s" in written.getvalue()
