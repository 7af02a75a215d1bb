"""20,000 messages pass while the daemon is killed again and again: none is lost, none early, none changed."""

from __future__ import annotations

import asyncio
import random
import signal
from contextlib import AsyncExitStack

import pytest

from tests.faults.place import Place
from tests.faults.scenes import work_off
from tests.support.ledger import Verdict

MESSAGES = 20_000
KILLS = 7
SEED = 20_000
LONGEST_LIFE = 0.8
LIVES_OF_TWO = 4


def place_of(mode: str, vhost: str, store: str) -> Place:
    return Place(mode, vhost, store if mode == "store" else None)


async def report(mode: str, place: Place, verdict: Verdict, kills: int) -> None:
    counters = await place.conserved() if place.store else {}
    print(f"{mode}: {kills} kills, {verdict}; counters {counters}")
    if counters:
        assert counters["parked"] >= counters["released"] > 0
        assert counters["parked"] == counters["released"], "parked and neither released nor standing anywhere"
        assert counters["held"] == 0


@pytest.mark.deadline(150)
@pytest.mark.parametrize("mode", ["store", "native"])
async def test_killed_at_random_moments(mode: str, vhost: str, store: str) -> None:
    """Every life begins with a backlog and gets more while it lasts, so that it dies reading, parking, publishing and
    releasing at once; some die before they are ready."""
    place = await place_of(mode, vhost, store).declare()
    chance = random.Random(SEED)
    async with place.ledger(SEED) as ledger:
        for life in range(KILLS):
            portion = MESSAGES // KILLS if life else MESSAGES - MESSAGES // KILLS * (KILLS - 1)
            await ledger.publish(portion // 2)
            async with place.daemon() as daemon:
                if life % 3 != 2:
                    await daemon.ready()
                publishing = asyncio.create_task(ledger.publish(portion - portion // 2))
                moment = chance.uniform(0, LONGEST_LIFE)
                print(f"seed {SEED}, life {life}: killed {moment:.3f} s after {'start' if life % 3 == 2 else 'ready'}")
                await asyncio.sleep(moment)  # not for something to happen: this is the random moment
                daemon.signal(signal.SIGKILL)
                await daemon.wait()
                await publishing
        async with place.daemon() as daemon:
            await ledger.all_back()
            await work_off(place, daemon)
        verdict = await place.settle_accounts(ledger)
    await report(mode, place, verdict, KILLS)
    verdict.assert_kept(repeats=True)
    assert verdict.sent == MESSAGES


@pytest.mark.deadline(120)
@pytest.mark.parametrize("mode", ["store", "native"])
async def test_one_of_two_daemons_is_killed(mode: str, vhost: str, store: str) -> None:
    """Two on one queue; the one that lives takes over what the other had read, parked and begun to release."""
    place = await place_of(mode, vhost, store).declare()
    async with place.ledger(SEED + 1) as ledger, AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(place.daemon()) for _ in range(2)]
        await asyncio.gather(first.ready(), second.ready())
        publishing = asyncio.create_task(ledger.publish(MESSAGES // 2, longest_ms=2_000))
        await ledger.until(lambda: len(ledger.arrivals) > MESSAGES // 10)
        before = len(second.events)
        first.signal(signal.SIGKILL)
        await first.wait()
        await publishing
        await ledger.all_back()
        if mode == "store":
            await second.event("lane taken", after=before)
        await work_off(place, second)
        verdict = await place.settle_accounts(ledger)
    await report(mode, place, verdict, 1)
    verdict.assert_kept(repeats=True)


@pytest.mark.long
@pytest.mark.deadline(300)
@pytest.mark.parametrize("mode", ["store", "native"])
async def test_two_daemons_are_killed_in_turn_and_then_both(mode: str, vhost: str, store: str) -> None:
    """Either of two daemons dies at a random moment and is started again, twice; then both die at once."""
    place = await place_of(mode, vhost, store).declare()
    chance = random.Random(SEED + 3)
    kills = 0
    async with place.ledger(SEED + 3) as ledger:
        for life in range(LIVES_OF_TWO):
            async with AsyncExitStack() as stack:
                daemons = [await stack.enter_async_context(place.daemon()) for _ in range(2)]
                await asyncio.gather(*(daemon.ready() for daemon in daemons))
                for victims in ([chance.randint(0, 1)], [chance.randint(0, 1)], [0, 1]):
                    publishing = asyncio.create_task(ledger.publish(MESSAGES // 20))
                    moment = chance.uniform(0, LONGEST_LIFE)
                    print(f"life {life}: daemons {victims} killed after {moment:.3f} s")
                    await asyncio.sleep(moment)  # not for something to happen: this is the random moment
                    for victim in victims:
                        daemons[victim].signal(signal.SIGKILL)
                        await daemons[victim].wait()
                        kills += 1
                        if len(victims) == 1:
                            await daemons[victim].start()
                    await publishing
        async with place.daemon() as daemon:
            await ledger.all_back()
            await work_off(place, daemon)
        verdict = await place.settle_accounts(ledger)
    await report(mode, place, verdict, kills)
    verdict.assert_kept(repeats=True)


@pytest.mark.deadline(90)
@pytest.mark.parametrize("mode", ["store", "native"])
async def test_without_a_fault_nothing_comes_twice(mode: str, vhost: str, store: str) -> None:
    """The other half of the promise, with two daemons and one of them stopped as told in the middle of the work."""
    place = await place_of(mode, vhost, store).declare()
    async with place.ledger(SEED + 2) as ledger, AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(place.daemon()) for _ in range(2)]
        await asyncio.gather(first.ready(), second.ready())
        publishing = asyncio.create_task(ledger.publish(MESSAGES // 4, longest_ms=2_000))
        await ledger.until(lambda: len(ledger.arrivals) > MESSAGES // 20)
        assert await first.stop() == 0
        await publishing
        await ledger.all_back()
        assert await second.stop() == 0
        verdict = await place.settle_accounts(ledger)
    await report(mode, place, verdict, 0)
    verdict.assert_kept(redelivered=True)  # what the first one had read and not begun
