"""Faults while messages are sent over HTTP through two daemons: nothing is lost after a 202, early or changed, and only
messages in flight are delivered twice, after a fault that may repeat them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import uvloop

from tests.faults.fault import Fault
from tests.faults.fleet import Fleet
from tests.faults.kinds import HOUR_MS
from tests.faults.test_every_fault import NATIVE, SEED, STORE, Play, name_of
from tests.support.http_ledger import HttpLedger
from tests.support.servers import Postgres, RabbitMQ

FAULTS = [
    (STORE, Fault("daemon killed", 0, 0.5)),
    (NATIVE, Fault("daemon killed", 1, 0.5)),
    (STORE, Fault("daemon dies at", 1, 0.5, "request.published:1")),
    (NATIVE, Fault("daemon dies at", 0, 0.5, "request.published:1")),
    (STORE, Fault("daemon told to stop", 1, 0.5)),
    (NATIVE, Fault("daemon told to stop", 0, 0.5)),
    (STORE, Fault("daemon hangs", 0, 6.0)),
    (STORE, Fault("clock stepped", 0, 1.5, str(HOUR_MS))),
    (STORE, Fault("memory alarm", 0, 1.0)),
    (NATIVE, Fault("broker stopped", 0, 2.0)),
    (STORE, Fault("connections closed")),
    (STORE, Fault("permissions taken away", 0, 1.0)),
    (STORE, Fault("intake queue deleted")),
    (STORE, Fault("store killed", 0, 0.5)),
    (NATIVE, Fault("store killed", 0, 0.5)),
    (STORE, Fault("store stopped", 0, 1.5)),
    (STORE, Fault("connections ended one by one", 0, 1.0)),
    (STORE, Fault("statements cancelled", 0, 1.0)),
    (STORE, Fault("network cut", 0, 0.0, "store")),
    (NATIVE, Fault("network cut", 1, 0.0, "broker")),
    (STORE, Fault("network half-open", 1, 1.5, "store")),
    (NATIVE, Fault("network unheard", 1, 1.0, "broker")),
]


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    directory: Path = tmp_path_factory.mktemp("fleet")
    with RabbitMQ() as rabbitmq, Postgres() as postgres, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stack = AsyncExitStack()
        opening = Fleet.open(
            rabbitmq, postgres, directory, mode=STORE, seed=SEED + 2, ledger=HttpLedger, environ=HttpLedger.environ()
        )
        fleet = runner.run(stack.enter_async_context(opening))
        ledger = fleet.ledger
        assert isinstance(ledger, HttpLedger)
        ledger.account.windows = []
        ledger.addresses = lambda: [daemon.address for daemon in fleet.daemons]
        try:
            yield (one := Play(fleet, runner, doomed=0))
            runner.run(one.end())
            print(ledger.answers)
        finally:
            runner.run(stack.aclose())


@pytest.mark.parametrize(("mode", "fault"), FAULTS, ids=name_of)
def test_nothing_is_lost_that_was_sent_over_http(play: Play, mode: str, fault: Fault) -> None:
    play(mode, fault)
