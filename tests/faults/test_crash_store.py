"""Store mode's crash table (design, section 7), row by row: what becomes of a row when somebody dies there."""

from __future__ import annotations

import pytest

from tests.faults.scenes import BROKER, BROKER_CUT, DAEMON, POSTGRES, STORE_CUT, Outcome, Row, Scenes, check
from tests.faults.tables import STORE

deaths = pytest.mark.parametrize("death", [DAEMON, BROKER, POSTGRES, BROKER_CUT, STORE_CUT])


def played(scenes: Scenes, death: str, name: str) -> tuple[Row, Outcome]:
    """Check what the row's claim says of its message, and that the counters agree with what arrived."""
    row, outcome = scenes.outcome(death, name)
    check(row, outcome, STORE[name].copies[death])
    arrived = {arrival.id for arrivals in outcome.arrivals.values() for arrival in arrivals}
    # What is due already when it is delivered again goes out without being parked, under an id that is no number.
    parked = {id for id in arrived if len(id) < 32}
    assert outcome.counters["released"] == len(parked), (outcome.counters, outcome.arrivals)
    return row, outcome


@deaths
def test_copy_before_commit_redelivered_as_if_new(scenes: Scenes, death: str) -> None:
    row, outcome = played(scenes, death, "COPY")
    if death == DAEMON:
        [arrival] = outcome.arrivals[0]
        assert arrival.due_ms >= outcome.resumed_ms + row.delay_ms, "a relative delay counts from the second reading"


@deaths
def test_commit_before_the_ack_parked_twice(scenes: Scenes, death: str) -> None:
    played(scenes, death, "commit")


@deaths
def test_claim_before_the_publish_claimed_again(scenes: Scenes, death: str) -> None:
    played(scenes, death, "claim")


@deaths
def test_publish_before_its_confirm_perhaps_twice_same_id(scenes: Scenes, death: str) -> None:
    played(scenes, death, "publish")


@deaths
def test_publish_before_commit_twice_same_id(scenes: Scenes, death: str) -> None:
    played(scenes, death, "publish, confirmed")


@deaths
def test_commit_nothing_to_do(scenes: Scenes, death: str) -> None:
    played(scenes, death, "commit of the release")
