"""The traffic of each feature without faults, or with the given faults: shared by its test and by the search for
planted bugs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Final

from delayer.store.errors import DRIVER_ERRORS
from tests.faults.doomed import emptied
from tests.faults.fault import Fault
from tests.faults.features import cancels, keys, modes, rates, retries
from tests.faults.features.striking import due_from_now, nothing_left, numbers_in, strike, taken_in
from tests.faults.fleet import Fleet
from tests.support.flow import flowing
from tests.support.ledger import Ledger
from tests.support.letters import NUMBER
from tests.support.place import eventually

HOUR_MS: Final = 3_600_000
SEED: Final = 7_500
LEAD: Final = 10.0
"""Seconds within which a command has begun. Its new due instant must be later than the end of the command."""


@asynccontextmanager
async def meanwhile(*work: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Repeat these calls until the block ends; errors of an unreachable store are ignored."""
    over = asyncio.Event()

    async def again(one: Callable[[], Awaitable[object]]) -> None:
        while not over.is_set():
            with suppress(*DRIVER_ERRORS):
                await one()
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), 0.1)

    tasks = [asyncio.create_task(again(one)) for one in work]
    try:
        yield
    finally:
        over.set()
        await asyncio.gather(*tasks)


async def keys_waiting(fleet: Fleet, faults: Iterable[Fault]) -> keys.Judgement:
    """The daemons park everything, and it becomes due while these faults strike."""
    ledger = fleet.ledger
    assert isinstance(ledger, keys.Keyed)
    await ledger.publish(keys.KEYS, delay_ms=HOUR_MS)
    await taken_in(fleet)
    assert not ledger.order
    await due_from_now(fleet, LEAD)
    await strike(fleet, faults)
    await nothing_left(fleet)
    refused = set(await numbers_in(fleet, "delays.refused"))
    return keys.judged_waiting(ledger, refused)


async def modes_in_peace(fleet: Fleet, seconds: float) -> modes.Judgement:
    """Publish under keys with modes for so long without a fault."""
    ledger = fleet.ledger
    assert isinstance(ledger, modes.Modal)
    async with flowing(ledger, 300, longest_ms=1_500):
        await asyncio.sleep(seconds)
    await nothing_left(fleet)
    return modes.judged(ledger)


@asynccontextmanager
async def cancelling(fleet: Fleet) -> AsyncIterator[None]:
    """Cancel a few of the latest messages at a time by message, and some waiting ones by command."""
    ledger, chance = fleet.ledger, random.Random(SEED)
    assert isinstance(ledger, cancels.Cancelling)

    async def by_messages() -> None:
        sent = ledger.account.sent
        latest = [number for number in range(max(0, sent - 300), sent) if number not in ledger.asked]
        await ledger.cancel(chance.sample(latest, min(5, len(latest))))

    async with meanwhile(by_messages, lambda: cancels.cancel_some(fleet, ledger)):
        yield


async def cancelled_in_peace(fleet: Fleet, seconds: float) -> cancels.Judgement:
    """Publish and cancel for so long without a fault."""
    ledger = fleet.ledger
    assert isinstance(ledger, cancels.Cancelling)
    async with cancelling(fleet), flowing(ledger, 150, longest_ms=3_000):
        await asyncio.sleep(seconds)
    await nothing_left(fleet)
    return cancels.judged(ledger.account, ledger.asked, ledger.told)


async def retried_in_peace(fleet: Fleet, count: int) -> retries.Judgement:
    await fleet.ledger.publish(count)
    return await retried(fleet)


async def retried(fleet: Fleet) -> retries.Judgement:
    """The verdict once every message has reached its end."""
    ledger = fleet.ledger
    assert isinstance(ledger, retries.Failing)
    with suppress(AssertionError):  # the judgement names the missing messages
        await ledger.until(lambda: len(ledger.final) == ledger.account.sent, timeout=90)
    # A rejected message is between two queues for a moment, and no count includes it.
    await eventually(lambda: at_rest(fleet), bool, timeout=60)
    for one in (await emptied(fleet, retries.PARKED)).arrivals:
        ledger.parked[NUMBER.unpack_from(one.delivery.body)[0]] = retries.counted(one.props)
    return retries.judged(ledger.account, ledger.came, ledger.parked)


async def at_rest(fleet: Fleet) -> bool:
    """Whether no message came or stood anywhere for a second."""
    ledger = fleet.ledger
    assert isinstance(ledger, retries.Failing)
    for _ in range(10):
        if await fleet.place.standing() or (await ledger.depths(ledger.queue))[ledger.queue]:
            return False
        await asyncio.sleep(0.1)  # not to wait for anything: the second of rest is ten polls, a tenth apart
    return True


async def taken_over_in_peace(fleet: Fleet, count: int) -> None:
    """The cascade is full before the daemons start."""
    for daemon in fleet.daemons:
        async with daemon.meant():
            assert await daemon.process.stop() == 0
    await fleet.ledger.publish(count, longest_ms=12_000)
    for daemon in fleet.daemons:
        async with daemon.meant():
            await daemon.start()
    await fleet.settled()
    await fleet.ledger.all_back()


async def flooded_in_peace(fleet: Fleet, flood: Ledger, count: int) -> None:
    await flood.publish(count, delay_ms=0)
    await fleet.ledger.publish(300, longest_ms=1_000)
    await fleet.ledger.all_back()
    passed = flood.account.back
    assert passed < count * 2 / 3, f"{passed} of {count} came before everything else"
    await flood.all_back(timeout=120)
    at_ms = [one.at_ms for number in range(count) for one in flood.account.arrivals_of(number)]
    found = rates.excess(at_ms, len(fleet.daemons))
    assert found is None, f"faster than it may: {found}"
