"""What the daemon knows of its topology, after each sequence of findings."""

from __future__ import annotations

import pytest

from delayer.broker.errors import MAJORITY
from delayer.core.topology import Exchange, Queue, TopologyPart
from delayer.daemon.round import (
    KEPT_ROUNDS,
    SILENT,
    Declared,
    Failed,
    Kept,
    MajorityCount,
    Missing,
    Round,
    RoundEvent,
    Silence,
)
from delayer.daemon.round import after as after_one
from delayer.daemon.store_bond import DELETED

IN, OUT, DUE = Exchange("in", "topic"), Exchange("out", "topic"), Queue("due")
PARTS: tuple[TopologyPart, ...] = (IN, DUE)


def declaration(*missing: TopologyPart) -> tuple[RoundEvent, RoundEvent]:
    return Missing(missing), Declared(PARTS)


def after(*findings: RoundEvent) -> Round:
    state = Round()
    for found in findings:
        state = after_one(state, found)
    return state


def reason_of(state: Round) -> str:
    return state.reason.removeprefix("the topology is not in place: ")


WELL, FEW, DUE_FEW = (
    MajorityCount("delays", {}, ""),
    MajorityCount("delays", {"delays": "few"}, None),
    {"due": "due has few"},
)
HUNG, UNASKED = MajorityCount("delays", {}, "hung"), MajorityCount("delays", {}, None)
GONE, GONE_HUNG, GONE_UNASKED = (MajorityCount("delays", None, answer) for answer in ("", "hung", None))
"""Rounds in which the management API does not answer."""
DUE_ALONE = MajorityCount("delays", DUE_FEW, "")


@pytest.mark.parametrize(
    ("findings", "reason"),
    [
        ([FEW], "few"), ([FEW, WELL], ""), ([HUNG], ""), ([HUNG, HUNG], "hung"), ([HUNG, WELL, HUNG], ""),
        ([HUNG, HUNG, WELL], ""), ([FEW, Kept()], "few"), ([HUNG, HUNG, Kept()], "hung"),
        ([HUNG, HUNG, UNASKED], "hung"), ([HUNG, UNASKED, HUNG], "hung"), ([FEW, UNASKED], "few"), ([UNASKED] * 2, ""),
        ([FEW, GONE_HUNG], "hung"), ([FEW, GONE], ""), ([FEW, GONE_UNASKED], "few"), ([GONE_HUNG] * 2, "hung"),
        ([DUE_ALONE, GONE], "due has few"), ([DUE_ALONE, GONE_HUNG, GONE_HUNG], "due has few; hung"),
        ([DUE_ALONE, GONE, WELL], ""), ([DUE_ALONE, *[GONE] * KEPT_ROUNDS], "due has few"),
        ([DUE_ALONE, *[GONE] * (KEPT_ROUNDS + 1)], ""), ([FEW, *[GONE_UNASKED] * (KEPT_ROUNDS + 1)], "few"),
    ],
)  # fmt: skip
def test_queues_without_a_majority(findings: list[RoundEvent], reason: str) -> None:
    state = after(*findings)
    assert reason_of(state) == reason
    assert not reason or state.advice == MAJORITY


@pytest.mark.parametrize(
    ("findings", "reason", "advice"),
    [
        ([Silence("late")], "", ""),
        ([Silence("late")] * 2, "not known, because two rounds got no answer: late", SILENT),
        ([Silence("late"), Kept(), Silence("late")], "", ""),
        ([Silence("late"), Failed("refused", "ask"), Silence("late")], "refused", "ask"),
        ([*[Silence("late")] * 2, Kept()], "", ""),
        ([Failed("refused", "ask")], "refused", "ask"),
        ([Failed("refused", "ask"), Silence("late")], "refused", "ask"),
        ([Failed("refused", "ask"), *declaration(), Kept()], "", ""),
        ([FEW, Failed("refused", "ask"), *declaration(), Kept()], "few", MAJORITY),
    ],
)  # fmt: skip
def test_reasons(findings: list[RoundEvent], reason: str, advice: str) -> None:
    state = after(*findings)
    assert reason_of(state) == reason
    assert not reason or state.advice == advice


@pytest.mark.parametrize(
    ("findings", "unlogged", "again"),
    [
        (declaration(IN), (), ()),  # At the start nothing is declared, so nothing is lost.
        ([*declaration(), Missing([IN, OUT])], (IN,), ()),
        ([*declaration(), Missing([IN]), Missing([IN, DUE])], (IN, DUE), ()),
        ([*declaration(), *declaration(IN)], (), ()),
        ([*declaration(), *declaration(IN), *declaration(IN, DUE)], (), (IN,)),
        ([*declaration(), *declaration(IN), Missing([IN]), *declaration()], (), ()),
        ([*declaration(), *declaration(IN), *declaration(), *declaration(IN)], (), ()),
    ],
)
def test_lost_parts(
    findings: list[RoundEvent], unlogged: tuple[TopologyPart, ...], again: tuple[TopologyPart, ...]
) -> None:
    state = after(*findings)
    assert (state.unlogged, state.again) == (unlogged, again)
    state = after(*findings, Kept())
    assert reason_of(state) == ("lost again after the daemon restored it: exchange in" if again else "")
    assert not again or state.advice == DELETED
