"""Faults while messages are sent by SQL through two daemons: nothing is lost, early or changed, and only messages in
flight are delivered twice, after a fault that may repeat them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.fault import Fault
from tests.faults.kinds import HOUR_MS
from tests.faults.play import NATIVE, SEED, STORE, Play, name_of, playing
from tests.support.sql_ledger import SqlLedger

FAULTS = [
    (STORE, Fault("daemon killed", 0, 0.5)),
    (NATIVE, Fault("daemon killed", 1, 0.5)),
    (STORE, Fault("daemon hangs", 0, 6.0)),
    (NATIVE, Fault("broker stopped", 0, 2.0)),
    (STORE, Fault("store killed", 0, 0.5)),
    (NATIVE, Fault("store killed", 0, 0.5)),
    (STORE, Fault("connections ended one by one", 0, 1.0)),
    (STORE, Fault("statements cancelled", 0, 1.0)),
    (STORE, Fault("long transaction", 0, 2.0)),
    (STORE, Fault("network cut", 0, 0.0, "store")),
]
MORE = [
    (STORE, Fault("daemon told to stop", 1, 0.5)),
    (NATIVE, Fault("daemon told to stop", 0, 0.5)),
    (NATIVE, Fault("daemon hangs", 1, 6.0)),
    (STORE, Fault("clock stepped", 0, 1.5, str(HOUR_MS))),
    (STORE, Fault("memory alarm", 0, 1.0)),
    (STORE, Fault("permissions taken away", 0, 1.0)),
    (STORE, Fault("store stopped", 0, 1.5)),
    (STORE, Fault("lane locks ended", 0, 1.0)),
    (NATIVE, Fault("network cut", 1, 0.0, "broker")),
    (STORE, Fault("network half-open", 1, 1.5, "store")),
    (STORE, Fault("network unheard", 0, 1.0, "store")),
]
"""Those that do not strike the inbox: test_every_fault.py has them for messages over AMQP."""


class SqlPlay(Play):
    async def end(self) -> None:
        """Check the account of everything that passed, with all daemons stopped."""
        fleet = self.fleet
        await fleet.finish()
        verdict, counters = fleet.ledger.verdict(await fleet.place.standing()), await fleet.place.conserved()
        print(verdict, counters)
        verdict.assert_kept(repeats=True)
        assert not fleet.surprises
        assert counters["parked"] == counters["released"] == await fleet.rows_back(), "a row had two names"


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    with playing(tmp_path_factory.mktemp("fleet"), seed=SEED + 1, kind=SqlPlay, ledger=SqlLedger) as one:
        yield one


@pytest.mark.parametrize(("mode", "fault"), FAULTS, ids=name_of)
def test_nothing_is_lost_that_was_sent_by_sql(play: Play, mode: str, fault: Fault) -> None:
    play(mode, fault)


@pytest.mark.long
@pytest.mark.parametrize(("mode", "fault"), MORE, ids=name_of)
def test_nor_by_other_faults(play: Play, mode: str, fault: Fault) -> None:
    play(mode, fault)
