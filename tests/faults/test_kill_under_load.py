"""Messages pass while daemons are killed repeatedly, hang, and lose their connections: none is lost, early or
changed."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from contextlib import AsyncExitStack

import pytest

from tests.faults.scenes import work_off
from tests.support.ledger import Ledger
from tests.support.place import Place, eventually, stopped
from tests.support.sql_ledger import SqlLedger

MESSAGES = 20_000
KILLS = 7
SEED = 20_000
LONGEST_LIFE = 0.8
ENDS_SECONDS = 20.0
"""A lane is free 4 s after its owner hangs; the rest is the start of another daemon, on a busy machine."""
HELD = 50
"""The number of unacknowledged messages of a lost connection."""


def place_of(mode: str, vhost: str, store: str) -> Place:
    return Place(mode, vhost, store if mode == "store" else None)


@pytest.mark.deadline(150)
@pytest.mark.parametrize("kind", [Ledger, SqlLedger], ids=["by AMQP", "by SQL"])
@pytest.mark.parametrize("mode", ["store", "native"])
async def test_killed_at_random_moments(mode: str, kind: type[Ledger], vhost: str, store: str) -> None:
    """Each daemon begins with a backlog and gets more, so that it dies while it reads, parks, publishes and releases.
    Some die before they are ready."""
    place = await Place(mode, vhost, store if mode == "store" or kind is SqlLedger else None).declare()
    chance = random.Random(SEED)
    async with place.ledger(SEED, kind=kind) as ledger:
        for life in range(KILLS):
            portion = MESSAGES // KILLS if life else MESSAGES - MESSAGES // KILLS * (KILLS - 1)
            await ledger.publish(portion // 2)
            async with place.daemon() as daemon:
                if life % 3 != 2:
                    await daemon.ready()
                publishing = asyncio.create_task(ledger.publish(portion - portion // 2))
                moment = chance.uniform(0, LONGEST_LIFE)
                print(f"seed {SEED}, life {life}: killed {moment:.3f} s after {'start' if life % 3 == 2 else 'ready'}")
                await asyncio.sleep(moment)  # not to wait for anything: this is the random moment
                daemon.signal(signal.SIGKILL)
                await daemon.wait()
                await publishing
        async with place.daemon() as daemon:
            await ledger.all_back()
            await work_off(place, daemon)
        verdict = await place.ended(ledger, repeats=True)
    assert verdict.sent == MESSAGES


@pytest.mark.parametrize("mode", ["store", "native"])
async def test_without_a_fault_nothing_comes_twice(mode: str, vhost: str, store: str) -> None:
    """The other half of the promise, with two daemons; the active one is stopped in the middle of the work."""
    place = await place_of(mode, vhost, store).declare()
    async with place.ledger(SEED + 2) as ledger, AsyncExitStack() as stack:
        first = await stack.enter_async_context(place.daemon())
        await first.ready()  # The second one stands by for the intake.
        await (await stack.enter_async_context(place.daemon())).ready()
        publishing = asyncio.create_task(ledger.publish(MESSAGES // 4, longest_ms=2_000))
        await ledger.until(lambda: ledger.account.back > MESSAGES // 20)
        assert await first.stop() == 0
        await publishing
        await place.ended(ledger, redelivered=True)  # the first daemon had read some and not begun them


async def test_a_daemon_that_hangs_in_the_middle_of_a_claim_loses_it(vhost: str, store: str) -> None:
    """The server aborts its transaction, and another daemon publishes all messages, some a second time. The first
    daemon resumes, and may publish the rest again, under the same ids."""
    place = await Place("store", vhost, store).declare()
    async with place.ledger(SEED + 5) as ledger:
        async with place.daemon("publish.begun:1:stop") as first:
            await first.ready()
            await ledger.publish(1, delay_ms=500)  # after which the daemon knows the exchange
            await ledger.all_back()
            await ledger.publish(40, delay_ms=2_000, absolute=True, step_ms=20)
            await stopped(first)
            frozen = time.monotonic()
            async with place.working() as second:
                await ledger.all_back()
                assert time.monotonic() - frozen < ENDS_SECONDS
                first.signal(signal.SIGCONT)
                await first.event("lane lost")
                await eventually(place.standing, lambda standing: not standing)
                assert await second.stop() == 0
                assert await first.stop() == 0
            verdict = await place.ended(ledger, repeats=True)
        assert verdict.repeated_at_release == len(verdict.repeats)
