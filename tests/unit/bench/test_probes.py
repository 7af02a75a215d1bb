"""What the probe of the machine reads as a stall."""

from __future__ import annotations

import pytest

from bench.evidence import Span
from bench.probes import Reading, between


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (Reading(10.02, 5.0, 1.0), []),
        (Reading(10.03, 5.0, 1.0), []),
        (Reading(10.05, 5.0, 1.0), ["run queue"]),
        (Reading(10.02, 5.01, 1.0), ["steal"]),
        (Reading(10.02, 5.0, 1.02), ["CPU pressure"]),
        (Reading(10.50, 5.4, 1.5), ["run queue", "steal", "CPU pressure"]),
    ],
)
def test_the_machine_withheld_cpu(now: Reading, expected: list[str]) -> None:
    assert between(Reading(10.0, 5.0, 1.0), now) == [Span(what, 10.0, now.at) for what in expected]
