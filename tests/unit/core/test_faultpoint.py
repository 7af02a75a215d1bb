"""Fault points: inert in production; tests/faults/test_crash_tables.py dies at each of them."""

from __future__ import annotations

import signal

import pytest

from delayer.core import faultpoint

KILL, STOP = signal.SIGKILL, signal.SIGSTOP


@pytest.mark.parametrize(
    ("text", "armed"),
    [
        ("", None),
        ("park.copied", ("park.copied", 1, KILL)),
        ("park.copied:3", ("park.copied", 3, KILL)),
        ("park.copied:3:kill", ("park.copied", 3, KILL)),
        ("park.copied:1:stop", ("park.copied", 1, STOP)),
        ("park.copied::stop", ("park.copied", 1, STOP)),
    ],
)
def test_values_that_arm_a_fault(text: str, armed: object) -> None:
    assert faultpoint._parse(text) == armed


@pytest.mark.parametrize("text", ["park", "park.copied:x", "park.copied:1:explode", ":1", "park.copied:1:stop:2"])
def test_values_that_arm_no_fault(text: str) -> None:
    with pytest.raises(ValueError, match=r"DELAYER_FAULT|invalid literal"):
        faultpoint._parse(text)


def test_a_fault_point_costs_a_builtin_unless_armed() -> None:
    assert faultpoint.reach is bool
