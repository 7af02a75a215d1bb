"""The rows of `delayer check` about clocks: a clock not seen gets its server's next step, and a single clock proves
nothing."""

from __future__ import annotations

import pytest

from delayer.cli.check import _clocks
from delayer.cli.check_store import CheckReport
from delayer.cli.errors import SEEING, STORE_RUNS
from delayer.core.clocks import ClockOffset

HERE = ClockOffset()


@pytest.mark.parametrize(
    ("clocks", "results"),
    [
        ({"this machine": HERE}, [("note", "see the row of the broker")]),
        ({"this machine": HERE, "the broker": None}, [("note", SEEING)]),
        ({"this machine": HERE, "the broker": HERE, "the database": None}, [("note", STORE_RUNS)]),
        ({"this machine": HERE, "the broker": HERE}, [("ok", "")]),
    ],
)
def test_what_was_compared(clocks: dict[str, ClockOffset | None], results: list[tuple[str, str]]) -> None:
    report = CheckReport()
    _clocks(report, clocks)
    assert [(row.result, row.advice) for row in report] == results
