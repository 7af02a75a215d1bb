"""Native mode: messages of a second to minutes or hours, while daemons and the broker fail."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Final

import detangle

from tests.simulation import memory
from tests.simulation.faults import OF_BROKER, Plan, Trouble
from tests.simulation.run import Outcome
from tests.simulation.traffic import Traffic
from tests.simulation.whereabouts import EACH_SECONDS, Whereabouts
from tests.simulation.world import World

DAEMONS: Final = 2
"""One of them consumes the intake queue, and the other stands by."""
MANY_SECONDS: Final = 600
"""In so many seconds happen as many faults as in a short run."""
ALWAYS: Final = ("cut", "cut", "cut", "alarm", "minority", "daemon")
OTHERS: Final = (
    "daemon stopped",
    "daemon paused",
    "reloaded",
    "broker apart",
    "broker one way",
    "slow",
    "daemon during",
)
SHORTEST_MS, LONGEST_MS = 1_000, 300_000


async def native(plan: Plan, seconds: float, rate: float) -> Outcome:
    """Publish for so many seconds, then wait until everything came. Raises AssertionError."""
    async with World.open() as world:
        nodes = [world.node(f"delayer-{number}", mode="native") for number in range(DAEMONS)]
        for node in nodes:
            await node.start()
            await node.consuming()
        loop, traffic = asyncio.get_running_loop(), Traffic.over(seconds, rate, longest_ms=LONGEST_MS)
        ends = loop.time() + seconds
        trouble = Trouble(world, nodes, plan)
        faults = asyncio.create_task(trouble.run(OF_BROKER, kinds_of(plan, seconds), seconds))
        whereabouts = Whereabouts(world, has_store=False)
        for number in count():
            if (now := loop.time()) >= ends:
                break
            await world.ledger.publish(traffic.count(), shortest_ms=SHORTEST_MS, longest_ms=traffic.longest_ms)
            for node in nodes:
                node.check()
                if number % memory.EACH_SECONDS == 0:
                    memory.check(node)
            if number % EACH_SECONDS == 0:
                whereabouts.check()
            await asyncio.sleep(max(0.0, 1.0 - (loop.time() - now)))
        await faults
        await world.ledger.all_back(timeout=traffic.longest_ms / 1000 + 60)
        await world.ledger.drained()
        for node in nodes:
            await memory.check_rest(node)
        for node in nodes:
            await node.stop()
        verdict = world.ledger.verdict(world.standing())
        verdict.assert_kept(repeats=True)
        return Outcome(str(verdict), trouble.counts, world.ledger.account.sent)


def kinds_of(plan: Plan, seconds: float) -> list[str]:
    """Draw the faults of a run."""
    kinds: list[str] = []
    for _ in range(max(1, round(seconds / MANY_SECONDS))):
        few = [*ALWAYS, detangle.choice(["kill", "stop"]), *(detangle.choice(list(OTHERS)) for _ in range(2))]
        kinds += [detangle.choice(list(plan.kinds)) for _ in few] if plan.kinds else few
    detangle.shuffle(kinds)
    return kinds
