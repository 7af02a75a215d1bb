"""The real daemon over the real servers, with one method of one adapter broken: it fails after it has worked.

What the process could not hear of is not what did not happen: every caller must take such a failure for "perhaps".
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from delayer.broker.consumer import AmqpSubscription
from delayer.broker.publisher import AmqpPublisher
from delayer.core.errors import BrokerLost, StoreLost
from delayer.core.message import Due, Outcome, Outgoing
from delayer.daemon.systemd import Notifier
from delayer.daemon.wiring import Daemon
from delayer.store.lanes.lane import PostgresLane
from delayer.store.postgres import PostgresStore
from tests.faults.place import Place, eventually
from tests.support.ledger import Ledger

DELAY_MS = 1_000
Patch = pytest.MonkeyPatch


class Once:
    """True for the first that asks."""

    def __init__(self) -> None:
        self.happened = asyncio.Event()

    def __bool__(self) -> bool:
        first = not self.happened.is_set()
        self.happened.set()
        return first


@asynccontextmanager
async def running(place: Place) -> AsyncIterator[None]:
    """The daemon in this process; what it cannot survive is raised at the end."""
    daemon = Daemon(place.settings, Notifier())
    run = asyncio.create_task(daemon.run())
    try:
        yield
    finally:
        daemon.stop()
        await run


async def passed(place: Place, ledger: Ledger, arrivals: int, *, count: int = 100) -> None:
    """Send ``count`` messages through and wait for so many arrivals, and for nothing to stand anywhere."""
    async with running(place):
        await ledger.publish(count, delay_ms=DELAY_MS, absolute=False)
        await ledger.all_back()
        await ledger.until(lambda: ledger.total() >= arrivals)
        await eventually(place.standing, lambda standing: not standing)


def copies(ledger: Ledger) -> set[int]:
    return {len(arrivals) for arrivals in ledger.arrivals.values()}


@pytest.fixture(params=["store", "native"])
def place(request: pytest.FixtureRequest, vhost: str, store: str) -> Place:
    return Place(request.param, vhost, store if request.param == "store" else None)


def break_publish(monkeypatch: Patch, chosen: Callable[[Sequence[Outgoing]], bool]) -> Once:
    """The first publish of a batch that is ``chosen`` is confirmed, and then raises as if it were not."""
    publish, once = AmqpPublisher.publish, Once()

    async def broken(self: AmqpPublisher, batch: Sequence[Outgoing], *rest: Any, **more: Any) -> list[Outcome]:
        outcomes = await publish(self, batch, *rest, **more)
        if chosen(batch) and once:
            raise BrokerLost("broken by the test, after the confirms")
        return outcomes

    monkeypatch.setattr(AmqpPublisher, "publish", broken)
    return once


async def test_publish_to_the_destination_fails_after_publishing(place: Place, monkeypatch: Patch) -> None:
    """Released again, and the copies share their x-delayer-id."""
    await place.declare()
    once = break_publish(monkeypatch, lambda batch: batch[0].exchange == b"delayer.out")
    async with place.ledger() as ledger:
        await passed(place, ledger, 101)
        verdict = await place.settle_accounts(ledger)
    assert once.happened.is_set()
    verdict.assert_kept(repeats=True)
    assert copies(ledger) <= {1, 2}
    assert verdict.repeated_at_release == len(verdict.repeats) > 0


@pytest.mark.parametrize("place", ["native"], indirect=True)
async def test_publish_into_the_cascade_fails_after_publishing(place: Place, monkeypatch: Patch) -> None:
    """Delivered again by the broker and published into the cascade again: twice, each under an id of its own."""
    await place.declare()
    once = break_publish(monkeypatch, lambda batch: b"level" in batch[0].exchange)
    async with place.ledger() as ledger:
        await passed(place, ledger, 101)
        verdict = await place.settle_accounts(ledger)
    assert once.happened.is_set()
    verdict.assert_kept(repeats=True)
    assert copies(ledger) <= {1, 2}
    assert verdict.repeats
    assert verdict.repeated_at_release == 0


@pytest.mark.parametrize("place", ["store"], indirect=True)
async def test_settle_fails_after_committing(place: Place, monkeypatch: Patch) -> None:
    """The rows are gone, whatever the release loop was told: nothing twice, nothing lost."""
    await place.declare()
    settle, once = PostgresLane.settle, Once()

    async def broken(self: PostgresLane, released: Sequence[Due], held: Sequence[tuple[Due, str]]) -> None:
        await settle(self, released, held)
        if released and once:
            raise StoreLost("broken by the test, after the commit")

    monkeypatch.setattr(PostgresLane, "settle", broken)
    async with place.ledger() as ledger:
        await passed(place, ledger, 100)
        verdict = await place.settle_accounts(ledger)
    assert once.happened.is_set()
    verdict.assert_kept()
    counters = await place.conserved()
    assert counters["parked"] == counters["released"] == 100


@pytest.mark.parametrize("place", ["store"], indirect=True)
async def test_park_fails_after_committing(place: Place, monkeypatch: Patch) -> None:
    """Delivered again and parked again: twice, and the counters know of every copy."""
    await place.declare()
    park, once = PostgresStore.park, Once()

    async def broken(self: PostgresStore, *arguments: Any) -> None:
        await park(self, *arguments)
        if once:
            raise StoreLost("broken by the test, after the commit")

    monkeypatch.setattr(PostgresStore, "park", broken)
    async with place.ledger() as ledger:
        await passed(place, ledger, 101)
        verdict = await place.settle_accounts(ledger)
    assert once.happened.is_set()
    verdict.assert_kept(repeats=True)
    assert copies(ledger) <= {1, 2}
    assert verdict.repeated_at_release == 0
    counters = await place.conserved()
    assert counters["parked"] == counters["released"] == ledger.total()


async def test_the_ack_is_never_sent(place: Place, monkeypatch: Patch) -> None:
    """The broker keeps what was not acknowledged, and gives it to the next daemon: all of it twice, nothing lost."""
    await place.declare()
    with monkeypatch.context() as patch:
        patch.setattr(AmqpSubscription, "ack", lambda *_, **__: None)
        async with place.ledger() as ledger:
            await passed(place, ledger, 100)
            await place.ready(100)
            patch.undo()
            async with running(place):
                await ledger.until(lambda: ledger.total() >= 200)
                await eventually(place.standing, lambda standing: not standing)
            while await place.standing():
                # Given back at the stop: it had been read and not begun, and is a copy that is still to come.
                async with running(place):
                    await eventually(place.standing, lambda standing: not standing)
            verdict = await place.settle_accounts(ledger)
    verdict.assert_kept(repeats=True)
