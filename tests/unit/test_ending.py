"""What ended a connection is known as that whenever it is tried again, whatever it was held for since."""

from __future__ import annotations

import pytest

from delayer.core import ending, unanswered
from delayer.core.hold import hold_for
from delayer.core.message import ClosedConnection, Delivery, Outgoing, Returned
from delayer.services import envelopes
from delayer.services.counting import Counters
from delayer.services.release import Portion, Release, prepared
from delayer.wire.properties import Properties
from tests.rig.fakes import NOW, Pulse, ScriptedLane, ScriptedPublisher, due
from tests.unit.test_strays import QUEUE, Scene, stray

ENDED = hold_for(ClosedConnection(541, "INTERNAL_ERROR")).text


@pytest.mark.parametrize(
    "reason, before, ends, perhaps_out",
    [
        (ENDED, "", True, False),
        (ENDED, ENDED, True, False),
        ("nacked", ENDED, True, False),
        ("nacked", "nacked" + ending.BEFORE, True, False),
        ("nacked", "returned: 404", False, False),
        ("no confirm within 2 s: x", ENDED, True, True),
        (ENDED, "no confirm within 8 s: x", True, True),
        ("nacked", "no confirm within 2 s: x" + ending.BEFORE, True, True),
        ("nacked", "nacked" + ending.BEFORE + unanswered.BEFORE, True, True),
        ("nacked", "nacked" + unanswered.BEFORE + ending.BEFORE, True, True),
    ],
)
def test_what_was_true_stays_true(reason: str, before: str, ends: bool, perhaps_out: bool) -> None:
    one = ending.again(unanswered.again(reason, before), before)
    other = unanswered.again(ending.again(reason, before), before)
    assert [ending.ends(one), ending.ends(other)] == [ends] * 2
    assert [unanswered.perhaps_out(one), unanswered.perhaps_out(other)] == [perhaps_out] * 2
    assert one.count(ending.BEFORE) + other.count(unanswered.BEFORE) <= 2
    assert len(ending.again(one, one)) == len(one)


@pytest.mark.parametrize("held_for, apart", [("", False), ("returned: 404", False), (ENDED, True)])
def test_a_held_row_goes_apart(held_for: str, apart: bool) -> None:
    one = prepared(due(1, attempts=1)._replace(held_for=held_for), 10_000)
    assert isinstance(one, Outgoing)
    assert one.isolated is apart


async def test_a_lane_that_holds_it_once_more_says_so() -> None:
    row = due(1, attempts=1, key=b"gone")._replace(held_for=ENDED)
    lane = ScriptedLane(claims=[[row]])
    publisher = ScriptedPublisher({b"gone": Returned(312, "NO_ROUTE")})
    await Release(lane, publisher, portion=Portion(10, 1000), pulse=Pulse(), counters=Counters()).tick()
    assert lane.settled == [([], [(row, "returned: 312 NO_ROUTE" + ending.BEFORE)])]


def noted(one: Delivery, reason: str) -> Delivery:
    parcel = envelopes.opened(Properties.parse(one.properties), one.body, 10_000)
    held = envelopes.Held(reason, 1, NOW)
    return one._replace(properties=envelopes.enveloped(parcel.parcel, parcel.id, held))


async def test_a_stray_goes_apart_and_stays_known() -> None:
    it = Scene([noted(stray(1, b"gone"), ENDED), stray(2)], answers={b"out/gone": Returned(312, "NO_ROUTE")})
    await it.look()
    assert [one.isolated for one in it.sent(b"out")] == [True, False]
    [again] = it.sent(QUEUE.encode())
    assert envelopes.reason_of(again.properties) == "returned: 312 NO_ROUTE" + ending.BEFORE
    assert not again.isolated  # in its envelope nothing of it acts


async def test_a_long_reason_does_not_push_it_out() -> None:
    long = Returned(312, "x" * 600)
    it = Scene([noted(stray(1, b"gone"), ENDED + unanswered.BEFORE)], answers={b"out/gone": long})
    await it.look()
    [again] = it.sent(QUEUE.encode())
    said = envelopes.reason_of(again.properties)
    assert ending.ends(said)
    assert unanswered.perhaps_out(said)
