"""Fault points: inert in production, exact in tests."""

from __future__ import annotations

import os
import signal

import pytest

from delayer.core import faultpoint
from delayer.core.faultpoint import POINTS
from delayer.core.faultpoint import _reach as reach

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


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, signum: killed.append((pid, signum)))
    monkeypatch.setattr(faultpoint, "_hits", 0)
    return killed


def test_inert_unless_armed(killed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faultpoint, "_armed", None)
    for point in POINTS:
        reach(point)
        faultpoint.reach(point)
    assert killed == []


def test_the_nth_time_of_that_point(killed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faultpoint, "_armed", ("park.copied", 2, STOP))
    reach("park.copied")
    reach("park.committed")
    assert killed == []
    reach("park.copied")
    reach("park.copied")
    assert killed == [(os.getpid(), STOP)]
