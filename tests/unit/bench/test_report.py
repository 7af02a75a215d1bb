"""The tables of stalls and of growth: a row instead of a figure for each cell."""

from __future__ import annotations

from bench.figures import Figure, Result
from bench.report import sheets


def test_each_cause_of_stalls_is_a_row_with_its_share() -> None:
    figures = [
        Figure("stalls", f"delayer, {cause}: {what}", value, unit, {"rate": 200})
        for cause, values in {"broker": (30, 2, 400.0), "ours": (10, 1, 90.0)}.items()
        for what, value, unit in zip(("deliveries", "stalls", "worst"), values, ("msg", "stalls", "ms"), strict=True)
    ]
    [sheet] = sheets(Result(figures=figures))
    assert sheet.title == "Stalls"
    assert sheet.rows == [
        ("stalls: delayer", "200/s", "broker", "30 msg", "75%", "2 stalls", "400.0 ms"),
        ("stalls: delayer", "200/s", "ours", "10 msg", "25%", "1 stalls", "90.0 ms"),
    ]


def test_the_halves_of_a_value_and_their_ratio_are_a_row() -> None:
    halves = {"first half hour": (2.0, "ms"), "last half hour": (3.0, "ms"), "last over first": (1.5, "")}
    figures = [Figure("hours", f"lateness, p50, {half}", *of_it) for half, of_it in halves.items()]
    figures.append(Figure("hours", "WAL, first half hour", 0.0, "MB/s"))
    [sheet] = sheets(Result(figures=figures))
    assert sheet.rows == [
        ("hours: lateness, p50", "", "2.00 ms", "3.00 ms", "1.50"),
        ("hours: WAL", "", "0 MB/s", "", ""),
    ]


def test_a_model_is_a_row_beside_its_measurement() -> None:
    figures = [Figure("scale", "park, predicted", 2000, "msg/s"), Figure("scale", "park, measured", 1500, "msg/s")]
    [sheet] = sheets(Result(figures=figures))
    assert (sheet.title, sheet.rows) == ("Model", [("scale: park", "", "2,000 msg/s", "1,500 msg/s", "0.75")])


def test_the_limits_of_an_installation_are_a_row_that_says_where_it_stops() -> None:
    figures = [
        Figure("scale", f"drain, full: {part}", rate, "msg/s", {"daemons": 2})
        for part, rate in {"daemon": 50_000, "queue": 20_000}.items()
    ]
    [sheet] = sheets(Result(figures=figures))
    assert sheet.title == "Limits"
    assert sheet.rows == [("scale: drain", "2 daemons", "50,000", "", "", "", "", "20,000", "", "queue")]
