"""Store mode: messages of up to three minutes, while daemons, broker, store, and what connects them fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import detangle

from tests.faults.features import cancels, keys
from tests.simulation.faults import OF_STORE, Trouble
from tests.simulation.store.process import ClockedPostgres
from tests.simulation.store.server import URL
from tests.simulation.watch import Watch
from tests.simulation.world import World
from tests.support.ledger import Ledger

DAEMONS: Final = 2
LONGEST_MS: Final = 180_000
FAULT_SECONDS: Final = 45.0
"""About one fault in this time."""
REST: Final = 300.0
"""Everything that is owed comes so many seconds after the last fault and its due instant."""


@dataclass(frozen=True)
class Feature:
    """What is sent, and its verdict. ``judge`` raises AssertionError."""

    ledger: type[Ledger]
    send: Callable[[Any, int], Awaitable[None]]
    judge: Callable[[Any], object]
    all_come: bool = False
    """Whether everything that is sent comes."""


async def _publish(ledger: Ledger, rate: int) -> None:
    await ledger.publish(rate, longest_ms=LONGEST_MS)


async def _publish_and_cancel(ledger: cancels.Cancelling, rate: int) -> None:
    await _publish(ledger, rate)
    if detangle.flip(0.5):
        await ledger.cancel({detangle.randint(max(0, ledger.account.sent - 20 * rate), ledger.account.sent - 1)})


def _judge_plain(_: Ledger) -> None:
    """The ledger's own verdict says all."""


def _judge_keys(ledger: keys.Keyed) -> None:
    keys.judged_live(ledger, 0).assert_kept()


def _judge_cancels(ledger: cancels.Cancelling) -> None:
    cancels.judged(ledger.account, ledger.asked, ledger.told).assert_kept()


FEATURES: Final = {
    "store": Feature(Ledger, _publish, _judge_plain, all_come=True),
    "keys": Feature(keys.Keyed, _publish, _judge_keys),
    "cancels": Feature(cancels.Cancelling, _publish_and_cancel, _judge_cancels),
}


async def stored(feature: Feature, postgres: ClockedPostgres, seconds: float, rate: int) -> tuple[str, dict[str, int]]:
    """Publish for so many seconds, then wait until nothing is owed any more. Returns the verdict and a count of the
    faults. Raises AssertionError."""
    async with World.open(postgres, ledger=feature.ledger) as world:
        tables = {"mode": "store", "store": {"url": URL, "lanes": 4}}
        nodes = [world.node(f"delayer-{number}", **tables) for number in range(DAEMONS)]
        for node in nodes:
            await node.start()
            await node.consuming()
        loop, ledger = asyncio.get_running_loop(), world.ledger
        ends = loop.time() + seconds
        trouble = Trouble(world, nodes)
        kinds = [detangle.choice(list(OF_STORE)) for _ in range(round(seconds / FAULT_SECONDS))]
        faults = asyncio.create_task(trouble.run(OF_STORE, kinds, seconds))
        watch = Watch(world.store, nodes, trouble)
        looking = asyncio.create_task(watch.run())
        while (now := loop.time()) < ends:
            await feature.send(ledger, rate)
            for node in nodes:
                node.check()
            await asyncio.sleep(max(0.0, 1.0 - (loop.time() - now)))
        await faults
        if feature.all_come:
            await ledger.all_back(timeout=LONGEST_MS / 1000 + REST)
        await _nothing_left(world, watch)
        await ledger.drained()
        looking.cancel()
        watch.look()
        for node in nodes:
            await node.stop()
        verdict = ledger.verdict(world.standing() | watch.standing())
        verdict.assert_apart()
        feature.judge(ledger)
        if feature.all_come:
            verdict.assert_kept(repeats=True)
        return str(verdict), trouble.counts


async def _nothing_left(world: World, watch: Watch) -> None:
    """Wait until store and queues are empty, twice in a row: meanwhile a daemon may have had the last message."""
    loop = asyncio.get_running_loop()
    ends, empty = loop.time() + LONGEST_MS / 1000 + REST, 0
    while empty < 3:
        await asyncio.sleep(1.0)
        left = {name: count for name, count in (world.standing() | watch.standing()).items() if count}
        empty = 0 if left else empty + 1
        assert loop.time() < ends, f"left standing: {left}"
