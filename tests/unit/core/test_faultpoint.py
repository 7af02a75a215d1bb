"""Fault points: inert in production; tests/faults/test_crash_tables.py dies at each of them."""

from __future__ import annotations

from delayer.core import faultpoint


def test_a_fault_point_costs_a_builtin_unless_armed() -> None:
    assert faultpoint.reach is bool
