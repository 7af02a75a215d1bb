"""The phases of a long run, its growth, and its plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.hours import DRAIN, MEASURED, PANELS, WARM, growth, phase_of
from bench.plot import draw


def line(minute: int, phase: str, value: float) -> dict[str, Any]:
    return {"at": 60.0 * minute, "phase": phase} | {key: value for panel in PANELS for key in panel.values.values()}


def test_the_warm_up_lasts_as_long_as_the_longest_delay_and_the_rest_drains() -> None:
    phases = [phase_of(at, start=100.0, longest=60, seconds=180) for at in (160.0, 160.1, 280.0, 280.1)]
    assert phases == [WARM, MEASURED, MEASURED, DRAIN]


def test_growth_compares_the_medians_of_the_first_and_the_last_half_hour_measured() -> None:
    lines = [line(0, WARM, 99.0), *(line(n, MEASURED, n) for n in range(1, 121)), line(121, DRAIN, 0.0)]
    found = {one.what: (one.first, one.last) for one in growth(lines)}
    assert found["lateness, p50"] == (15, 105)
    assert found["dead tuples"] == (15, 105)
    assert len(found) == sum(len(panel.values) for panel in PANELS)


def test_a_short_run_compares_its_halves() -> None:
    lines = [line(n, MEASURED, n) for n in range(1, 5)]
    assert {(one.first, one.last) for one in growth(lines)} == {(1, 3)}
    assert growth(lines[:1]) == []


def test_a_value_that_is_missing_in_one_half_has_no_growth() -> None:
    lines = [line(n, MEASURED, n) for n in range(1, 5)]
    del lines[0]["late_p50_ms"], lines[1]["late_p50_ms"]
    assert "lateness, p50" not in {one.what for one in growth(lines)}


def test_the_same_lines_give_the_same_plot(tmp_path: Path) -> None:
    source = tmp_path / "hours.jsonl"
    lines = [line(0, WARM, 0.5), *(line(n, MEASURED, n) for n in range(1, 9)), line(9, DRAIN, 2.0)]
    del lines[0]["late_p50_ms"]  # nothing arrived yet
    source.write_text("".join(json.dumps(one) + "\n" for one in lines))
    for name in ("a.svg", "b.svg"):
        draw(source, tmp_path / name)
    first = (tmp_path / "a.svg").read_text()
    assert first == (tmp_path / "b.svg").read_text()
    assert all(panel.title.replace("'", "&#x27;") in first or panel.title in first for panel in PANELS)
    assert "<dc:date>" not in first


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: str(panel.title))
def test_no_panel_has_more_values_than_the_plot_has_colours(panel: Any) -> None:
    assert len(panel.values) <= 4
