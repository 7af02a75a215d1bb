"""Each kind of fault once, briefly, while messages pass through two daemons. Nothing is lost, early or changed, and
only messages in flight are delivered twice, after a fault that may repeat them. `make soak` mixes faults, for minutes
or hours.

They share one fleet with its own servers, which are killed and stopped here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.fault import Fault
from tests.faults.kinds import HOUR_MS, KINDS
from tests.faults.play import DOOMED, NATIVE, SEED, STORE, Play, name_of, playing

SHORT = [
    (STORE, Fault("daemon killed", 0, 0.5)),
    (NATIVE, Fault("daemon killed", 1, 0.5)),
    (STORE, Fault("daemon told to stop", 1, 0.5)),
    (NATIVE, Fault("daemon told to stop", 0, 0.5)),
    (STORE, Fault("daemon without memory", 0, 0.0)),
    (NATIVE, Fault("daemon without memory", 1, 0.0)),
    (STORE, Fault("clock stepped", 0, 1.5, str(HOUR_MS))),
    (STORE, Fault("clock stepped", 1, 1.5, str(-HOUR_MS))),
    (STORE, Fault("memory alarm", 0, 1.0)),
    (NATIVE, Fault("disk alarm", 0, 1.0)),
    (STORE, Fault("broker stopped", 0, 2.0)),
    (NATIVE, Fault("connections closed")),
    (STORE, Fault("permissions taken away", 0, 1.0)),
    (STORE, Fault("destination deleted", 0, 1.0)),
    (STORE, Fault("intake queue deleted")),
    (STORE, Fault("50 connections lost", 0, 5.0, "delays")),
    (STORE, Fault("store killed", 0, 0.5)),
    (STORE, Fault("store stopped", 0, 1.5)),
    (STORE, Fault("connections ended one by one", 0, 1.0)),
    (STORE, Fault("lane locks ended", 0, 1.0)),
    (STORE, Fault("statements cancelled", 0, 1.0)),
    (STORE, Fault("long transaction", 0, 2.0)),
    (STORE, Fault("passed partition locked", 0, 4.0)),
    (STORE, Fault("network cut", 0, 0.0, "store")),
    (NATIVE, Fault("network cut", 1, 0.0, "broker")),
    (STORE, Fault("network refuses", 0, 1.0, "store")),
    (STORE, Fault("network refuses", 1, 1.0, "broker")),
    (NATIVE, Fault("network half-open", 0, 2.0, "broker")),
    (STORE, Fault("network half-open", 1, 1.5, "store")),
    (STORE, Fault("network unheard", 0, 1.0, "store")),
    (NATIVE, Fault("network unheard", 1, 1.0, "broker")),
    (STORE, Fault("network delays", 0, 1.0, "store")),
    (STORE, Fault("network throttled", 1, 1.0, "broker")),
]
LONG = [
    (STORE, Fault("daemon hangs", 0, 6.0)),
    (STORE, Fault("daemon dies at", 0, 0.0, "park.committed:1")),
    (STORE, Fault("daemon dies at", 1, 0.0, "release.published:1")),
    (NATIVE, Fault("daemon dies at", 0, 0.0, "intake.confirmed:1")),
    (STORE, Fault("daemon loses at", 1, 0.0, "park.copied:1 store-cut")),
    (NATIVE, Fault("daemon loses at", 0, 0.0, "publish.written:1 broker-cut")),
    (STORE, Fault("store dies while daemon is at", 0, 0.0, "release.claimed:1 store")),
    (NATIVE, Fault("broker dies while daemon is at", 0, 0.0, "intake.read:1 broker")),
    (STORE, Fault("daemon hangs for a minute", 0, 60.0)),
    (NATIVE, Fault("daemon hangs for a minute", 1, 60.0)),
    (STORE, Fault("broker stopped for a minute", 0, 60.0)),
    (NATIVE, Fault("broker stopped for a minute", 0, 60.0)),
    (STORE, Fault("store stopped for a minute", 0, 60.0)),
    (STORE, Fault("broker killed", 0, 1.0)),
    (NATIVE, Fault("broker killed", 0, 1.0)),
    (NATIVE, Fault("memory alarm", 0, 5.0)),
    (NATIVE, Fault("permissions taken away", 0, 3.0)),
    (NATIVE, Fault("50 connections lost", 0, 5.0, "delays.due")),
]


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    with playing(tmp_path_factory.mktemp("fleet"), seed=SEED, doomed=DOOMED) as one:
        yield one


@pytest.mark.parametrize(("mode", "fault"), SHORT, ids=name_of)
def test_nothing_is_lost(play: Play, mode: str, fault: Fault) -> None:
    play(mode, fault)


@pytest.mark.long
@pytest.mark.parametrize(("mode", "fault"), LONG, ids=name_of)
def test_long_faults_lose_nothing(play: Play, mode: str, fault: Fault) -> None:
    play(mode, fault)


def test_every_kind_has_its_test_and_its_line() -> None:
    """The full disk has no test here: it needs more traffic, until a table is larger than a file of the WAL."""
    assert {fault.kind for _, fault in SHORT + LONG} | {"disk full"} == KINDS.keys()
    said = (Path(__file__).parents[2] / "docs" / "guarantees.md").read_text()
    table = [line.split("|")[2] for line in said.splitlines() if line.startswith("| ") and line.count("|") == 4]
    names = {re.sub(r"\(.*?\)", "", name).strip() for cell in table for name in cell.split(";")}
    assert names >= KINDS.keys(), f"not in docs/guarantees.md: {KINDS.keys() - names}"
