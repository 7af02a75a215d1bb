"""Store mode's crash table (design, section 7), row by row: what becomes of a row when somebody dies there."""

from __future__ import annotations

import signal
from contextlib import AsyncExitStack
from urllib.parse import unquote

import pytest

from tests.faults.place import Place, eventually
from tests.faults.scenes import BROKER, BROKER_CUT, DAEMON, POSTGRES, STORE_CUT, Outcome, Row, Scenes, check
from tests.faults.tables import STORE
from tests.support.proxy import Proxy
from tests.support.servers import RabbitMQ

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


@pytest.mark.parametrize("death", [DAEMON, BROKER_CUT])
async def test_publish_arrived_but_not_its_confirm_twice_same_id(
    rabbitmq: RabbitMQ, vhost: str, store: str, death: str
) -> None:
    """The fault point can only stop before the bytes are on their way. Here they have arrived: the broker's answers
    are kept back when the message is published, and then the daemon is killed, or its connections are."""
    name = unquote(vhost.rpartition("/")[2])
    async with Proxy(rabbitmq.port) as proxy, AsyncExitStack() as stack:
        place = await Place("store", vhost, store, via_broker=rabbitmq.url(name, port=proxy.port), lanes=1).declare()
        ledger = await stack.enter_async_context(place.ledger())
        daemon = await stack.enter_async_context(place.daemon())
        await daemon.ready()
        # So that the lane's publisher knows the exchange and has its channel: the next publish asks nothing first.
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


@deaths
def test_publish_before_commit_twice_same_id(scenes: Scenes, death: str) -> None:
    played(scenes, death, "publish, confirmed")


@deaths
def test_commit_nothing_to_do(scenes: Scenes, death: str) -> None:
    played(scenes, death, "commit of the release")
