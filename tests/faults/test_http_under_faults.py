"""Faults while messages are sent over HTTP through two daemons: nothing is lost after a 202, early or changed, and only
messages in flight are delivered twice, after a fault that may repeat them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.fault import Fault
from tests.faults.kinds import HOUR_MS
from tests.faults.play import NATIVE, SEED, STORE, Play, name_of, playing
from tests.support.http_ledger import HttpLedger

FAULTS = [
    (STORE, Fault("daemon killed", 0, 0.5)),
    (NATIVE, Fault("daemon killed", 1, 0.5)),
    (STORE, Fault("daemon dies at", 1, 0.5, "request.published:1")),
    (NATIVE, Fault("daemon dies at", 0, 0.5, "request.published:1")),
    (STORE, Fault("daemon hangs", 0, 6.0)),
    (NATIVE, Fault("broker stopped", 0, 2.0)),
    (STORE, Fault("connections closed")),
    (STORE, Fault("store killed", 0, 0.5)),
    (STORE, Fault("statements cancelled", 0, 1.0)),
    (STORE, Fault("network cut", 0, 0.0, "store")),
]
MORE = [
    (STORE, Fault("daemon told to stop", 1, 0.5)),
    (NATIVE, Fault("daemon told to stop", 0, 0.5)),
    (STORE, Fault("clock stepped", 0, 1.5, str(HOUR_MS))),
    (STORE, Fault("memory alarm", 0, 1.0)),
    (STORE, Fault("permissions taken away", 0, 1.0)),
    (STORE, Fault("intake queue deleted")),
    (NATIVE, Fault("store killed", 0, 0.5)),
    (STORE, Fault("store stopped", 0, 1.5)),
    (STORE, Fault("connections ended one by one", 0, 1.0)),
    (NATIVE, Fault("network cut", 1, 0.0, "broker")),
    (STORE, Fault("network half-open", 1, 1.5, "store")),
    (NATIVE, Fault("network unheard", 1, 1.0, "broker")),
]
"""Those that do not strike a request: test_every_fault.py has them for messages over AMQP."""


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    directory = tmp_path_factory.mktemp("fleet")
    with playing(directory, seed=SEED + 2, ledger=HttpLedger, environ=HttpLedger.environ()) as one:
        fleet, ledger = one.fleet, one.fleet.ledger
        assert isinstance(ledger, HttpLedger)
        ledger.addresses = lambda: [daemon.address for daemon in fleet.daemons]
        yield one
    print(ledger.answers)


@pytest.mark.parametrize(("mode", "fault"), FAULTS, ids=name_of)
def test_nothing_is_lost_that_was_sent_over_http(play: Play, mode: str, fault: Fault) -> None:
    play(mode, fault)


@pytest.mark.long
@pytest.mark.parametrize(("mode", "fault"), MORE, ids=name_of)
def test_nor_by_other_faults(play: Play, mode: str, fault: Fault) -> None:
    play(mode, fault)
