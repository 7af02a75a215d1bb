"""Native mode's crash table (design, section 7), row by row: what becomes of a message when somebody dies there."""

from __future__ import annotations

import pytest

from tests.faults.scenes import BROKER, BROKER_CUT, DAEMON, Scenes, check
from tests.faults.tables import NATIVE

deaths = pytest.mark.parametrize("death", [DAEMON, BROKER, BROKER_CUT])


def played(scenes: Scenes, death: str, name: str) -> tuple[int, ...]:
    """Check what the row's claim says of every message; how often each of them arrived, fewest first."""
    row, outcome = scenes.outcome(death, name)
    check(row, outcome, NATIVE[name].copies[death])
    return tuple(sorted(len(arrivals) for arrivals in outcome.arrivals.values()))


@deaths
def test_reading_it_before_the_publish_redelivered_as_if_new(scenes: Scenes, death: str) -> None:
    played(scenes, death, "reading it")
    row, outcome = scenes.outcome(death, "reading it")
    if death == DAEMON:
        [arrival] = outcome.arrivals[0]
        assert arrival.due_ms >= outcome.resumed_ms + row.delay_ms, "a relative delay counts from the second reading"


@deaths
def test_the_publish_before_its_confirm_perhaps_twice(scenes: Scenes, death: str) -> None:
    played(scenes, death, "the publish")


@deaths
def test_the_confirm_before_the_ack_twice_same_due_instant(scenes: Scenes, death: str) -> None:
    assert played(scenes, death, "the confirm") == (2,)


@deaths
def test_the_ack_nothing_to_do(scenes: Scenes, death: str) -> None:
    played(scenes, death, "the ack")
    _, outcome = scenes.outcome(death, "the ack")
    assert len(outcome.arrivals[0]) == 1, "its acknowledgement had arrived"


@deaths
def test_reading_it_when_due_redelivered(scenes: Scenes, death: str) -> None:
    played(scenes, death, "reading it when due")


@deaths
def test_the_publish_when_due_perhaps_twice_same_id(scenes: Scenes, death: str) -> None:
    played(scenes, death, "the publish when due")


@deaths
def test_the_confirm_when_due_twice_same_id(scenes: Scenes, death: str) -> None:
    assert played(scenes, death, "the confirm when due") == (2,)


@deaths
def test_the_ack_when_due_nothing_to_do(scenes: Scenes, death: str) -> None:
    fewest, _ = played(scenes, death, "the ack when due")
    assert fewest == 1, "the acknowledgement of the first one had arrived"
