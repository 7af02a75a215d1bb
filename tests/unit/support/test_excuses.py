"""Faults that excuse a repeated message, and their least length."""

from __future__ import annotations

import pytest

from tests.faults.fault import Fault
from tests.faults.kinds import KINDS

ALWAYS = float("-inf")
NEVER = float("inf")
EXCUSED_FROM = {
    ("daemon told to stop", ""): NEVER,
    ("clock stepped", "3600000"): NEVER,
    ("long transaction", ""): NEVER,
    ("network delays", "store"): NEVER,
    ("network throttled", "store"): NEVER,
    ("broker stopped", ""): 4.0,
    ("network half-open", "broker"): 4.0,
    ("network delays", "broker"): 4.0,
    ("network throttled", "broker"): 4.0,
    ("store stopped", ""): 2.0,
    ("network half-open", "store"): 2.0,
    # A frozen daemon's timers run on, and an alarm lasts longer than its fault.
    ("daemon hangs", ""): ALWAYS,
    ("memory alarm", ""): ALWAYS,
    ("disk alarm", ""): ALWAYS,
    ("network unheard", "broker"): ALWAYS,
    ("network cut", "store"): ALWAYS,
    ("daemon killed", ""): ALWAYS,
}


@pytest.mark.parametrize(("which", "since"), EXCUSED_FROM.items())
@pytest.mark.parametrize("seconds", [0.0, 1.5, 2.0, 2.1, 4.0, 4.1, 60.0])
def test_a_single_fault_excuses_repeats_after_half_of_a_deadline(
    which: tuple[str, str], since: float, seconds: float
) -> None:
    kind, detail = which
    fault = Fault(kind, 0, seconds, detail)
    assert KINDS[kind].excuses(fault, alone=True) is (seconds > since)
    assert KINDS[kind].excuses(fault, alone=False) is (since != NEVER)
