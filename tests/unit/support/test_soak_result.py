"""The result of a soak: every promise kept, or a report of the broken ones."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.faults.doomed import Doomed
from tests.soak.report import summary
from tests.soak.result import LARGEST_MB, Options, Result
from tests.support.verdict import Arrival, Findings, Verdict

FOUND = Findings(1, ["message 1"])
VERDICT = Verdict(1_000, [], Findings(), Findings(), {})
GOOD = Result(
    Options(600.0, 1, Path()),
    datetime(2026, 1, 1, tzinfo=UTC),
    "3.10.8",
    600.0,
    VERDICT,
    {"daemon killed": 1},
    {},
    0,
    0,
    Doomed(5, [], 0, []),
    10.0,
    (900, 900),
    90.0,
    {"store": 1_000},
    {"AMQP": 1_000},
)
TWO_FACES = {1: [Arrival(1.0, b"7", 5, False), Arrival(2.0, b"7", 6, False)]}
BROKEN = {
    "lost": replace(GOOD, verdict=replace(VERDICT, missing=[1])),
    "early": replace(GOOD, verdict=replace(VERDICT, early=FOUND)),
    "changed": replace(GOOD, verdict=replace(VERDICT, changed=FOUND)),
    "twice without a fault": replace(GOOD, verdict=replace(VERDICT, unexcused=[1])),
    "under the id of another": replace(GOOD, verdict=replace(VERDICT, shared=[1])),
    "one id and two instants": replace(GOOD, verdict=replace(VERDICT, repeats=TWO_FACES)),
    "more than was read": replace(GOOD, verdict=replace(VERDICT, unaccounted=FOUND)),
    "a row under two names": replace(GOOD, rows=(900, 901)),
    "left standing": replace(GOOD, verdict=replace(VERDICT, standing={"delays": 1})),
    "among the strays for good": replace(GOOD, aside=1, stranded=1),
    "not refused": replace(GOOD, doomed=Doomed(5, [1], 0, [])),
    "refused and changed": replace(GOOD, doomed=Doomed(5, [], 0, ["doomed 1"])),
    "a daemon that grows": replace(GOOD, largest_mb=LARGEST_MB + 1),
    "a way that sent nothing": replace(GOOD, ways={"AMQP": 1_000, "SQL": 0}),
    "something else": replace(GOOD, surprises=["the end"]),
}


@pytest.mark.parametrize("how", BROKEN)
def test_broken_promises_are_reported(how: str) -> None:
    assert not BROKEN[how].kept
    assert summary(BROKEN[how])["kept"] is False


def test_allowed_repeats() -> None:
    """After a fault, copies of messages may wait among the strays, and refused messages may have copies."""
    assert GOOD.kept
    assert replace(GOOD, aside=3, doomed=Doomed(5, [], 2, []), largest_mb=LARGEST_MB).kept
