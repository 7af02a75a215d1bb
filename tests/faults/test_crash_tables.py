"""The crash tables of docs/guarantees.md, row by row: the fate of a message when a process or connection dies."""

from __future__ import annotations

import signal
from contextlib import AsyncExitStack
from urllib.parse import unquote

import pytest

from tests.faults.scenes import BROKER_CUT, DAEMON, Outcome, Scenes, check
from tests.faults.tables import NATIVE, STORE, cases
from tests.support.place import Place, eventually
from tests.support.proxy import Proxy
from tests.support.servers import RabbitMQ


def played(scenes: Scenes, name: str, death: str) -> Outcome:
    """Check the row's claim for every message."""
    row, outcome = scenes.outcome(death, name)
    check(row, outcome, row.copies[death])
    if death == DAEMON and not row.absolute:
        [arrival] = outcome.arrivals[0]
        assert arrival.due_ms >= outcome.resumed_ms + row.delay_ms, "a relative delay counts from the second reading"
    return outcome


@pytest.mark.parametrize(("name", "death"), cases(NATIVE))
def test_native_mode(scenes: Scenes, name: str, death: str) -> None:
    outcome = played(scenes, name, death)
    if "ack" in name:
        assert min(map(len, outcome.arrivals.values())) == 1, "the acknowledgement of the first one had arrived"


@pytest.mark.parametrize(("name", "death"), cases(STORE))
def test_store_mode(scenes: Scenes, name: str, death: str) -> None:
    """The counters also agree with the arrivals."""
    outcome = played(scenes, name, death)
    arrived = {arrival.id for arrivals in outcome.arrivals.values() for arrival in arrivals}
    # A redelivered message already due is published without being parked, under an id that is not a number.
    parked = {id for id in arrived if len(id) < 32}
    assert outcome.counters["released"] == len(parked), (outcome.counters, outcome.arrivals)
    if death == DAEMON and "part" in name:
        assert len(outcome.arrivals[max(outcome.arrivals)]) == 1, "the last one was not due when the daemon died"


@pytest.mark.parametrize("death", [DAEMON, BROKER_CUT])
async def test_a_publish_whose_confirm_is_lost_is_repeated_with_the_same_id(
    rabbitmq: RabbitMQ, vhost: str, store: str, death: str
) -> None:
    """The fault point can only stop before the bytes are sent. Here they arrive: a proxy keeps back the broker's
    answers, and then the daemon or its connections are killed."""
    name = unquote(vhost.rpartition("/")[2])
    async with Proxy(rabbitmq.port) as proxy, AsyncExitStack() as stack:
        place = await Place("store", vhost, store, via_broker=rabbitmq.url(name, port=proxy.port), lanes=1).declare()
        ledger = await stack.enter_async_context(place.ledger())
        daemon = await stack.enter_async_context(place.working())
        # So that the lane's publisher knows the exchange and has its channel: the next publish needs no prior round
        # trip.
        await ledger.publish(20, delay_ms=500, absolute=True)
        await ledger.all_back()
        await ledger.publish(50, delay_ms=2_000, absolute=True)  # one due instant, so one claim
        await eventually(place.rows, lambda rows: rows == 50)
        await place.ready(0)
        proxy.stall(to_server=False)
        await ledger.all_back()
        assert ledger.total() == 70
        if death == DAEMON:
            daemon.signal(signal.SIGKILL)
            await daemon.wait()
        proxy.cut()
        proxy.resume()
        if death == DAEMON:
            daemon = await stack.enter_async_context(place.daemon())
        await ledger.until(lambda: ledger.total() == 120)
        await eventually(place.standing, lambda standing: not standing)
        await daemon.ready()
        assert await daemon.stop() == 0
        verdict = await place.settle_accounts(ledger)
    verdict.assert_kept(repeats=True)
    assert verdict.repeated_at_release == len(verdict.repeats) == 50
