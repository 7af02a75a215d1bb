"""Figures are judged by what was measured, and not by what is shown of it."""

from __future__ import annotations

import pytest

from bench import report, targets
from bench.figures import Figure, Result

FULL = targets.TEN_MILLION


def met(result: Result, section: str, what: str, **at: int) -> dict[str, bool]:
    targets.compare(result)
    figure = result.find(section, what, **at)
    assert figure is not None
    return {target["text"]: target["met"] for target in figure.targets}


@pytest.mark.parametrize(
    ("rate", "shown", "reached"), [(8996, "0.900", False), (9000, "0.900", True), (8994, "0.899", False)]
)
def test_a_ratio_is_not_rounded_to_what_it_misses(rate: float, shown: str, reached: bool) -> None:
    figures = [
        Figure("native", "straight client into the cascade", 10_000, "msg/s"),
        Figure("native", "into the cascade", rate, "msg/s"),
    ]
    result = Result({}, figures)
    assert met(result, "native", "into the cascade") == {"≥ 0.9 of the straight client": reached}
    assert figures[1].ratio is not None
    assert report.share(figures[1].ratio) == shown


@pytest.mark.parametrize("share", ["p50", "p99", "p99.9"])
def test_lateness_beside_a_backlog_is_judged_by_that_of_an_empty_store(share: str) -> None:
    def result(late_ms: float) -> Result:
        beside = [(0, 10.0), (FULL, late_ms)]
        at = [({"rate": 5000, "backlog": backlog}, late) for backlog, late in beside]
        return Result({}, [Figure("steady", f"lateness {share}", late, "ms", conditions) for conditions, late in at])

    assert met(result(11.0), "steady", f"lateness {share}", backlog=FULL)["≤ 1.1 of no backlog"]
    assert not met(result(11.01), "steady", f"lateness {share}", backlog=FULL)["≤ 1.1 of no backlog"]


@pytest.mark.parametrize(
    ("section", "what"),
    [
        *((one, what) for one in ("steady", "churn", "native", "burst") for what in ("early", "missing")),
        *((one, "repeated") for one in ("steady", "churn")),
    ],
)
def test_nothing_may_be_early_or_missing_anywhere(section: str, what: str) -> None:
    assert met(Result({}, [Figure(section, what, 1, "msg")]), section, what) == {"none": False}
    assert met(Result({}, [Figure(section, what, 0, "msg")]), section, what) == {"none": True}


def test_conditions_and_notes_are_words() -> None:
    assert report.conditions({"workers": 1}) == "1 process"
    assert report.conditions({"workers": 2, "backlog": 1}) == "2 processes, 1 waiting"
    assert report.note("{'rate': 10000, 'backlog': 0}: late") == "10,000/s, 0 waiting: late"
    assert report.note("nothing in braces") == "nothing in braces"


def test_what_was_judged_is_told_as_it_was_judged() -> None:
    figure = Figure("steady", "lateness p99", 113.3, "ms")
    assert report.judged(figure, {"found": 113.3}) == "113.3 ms"
    assert report.judged(figure, {"found": 0.632}) == "0.632"
