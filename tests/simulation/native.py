"""Native mode: messages of a second to five minutes, while the broker restarts and connections are cut."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import detangle

from tests.simulation.world import Node, World
from tests.support.verdict import Verdict, Window

DAEMONS: Final = 2
"""One of them consumes the intake queue, and the other stands by."""
AFTERMATH: Final = 60.0
"""After that many seconds everything works again; only messages that met a fault may come twice."""
SHORTEST_MS, LONGEST_MS = 1_000, 300_000


async def native(seconds: float, rate: int) -> tuple[Verdict, dict[str, int]]:
    """Publish for so many seconds, then wait until everything came. Returns the verdict and a count of the faults."""
    async with World.open() as world:
        nodes = [world.node(f"delayer-{number}", mode="native") for number in range(DAEMONS)]
        for node in nodes:
            await node.start()
            await node.consuming()
        loop = asyncio.get_running_loop()
        ends = loop.time() + seconds
        faults = dict.fromkeys(_FAULTS, 0)
        trouble = asyncio.create_task(_trouble(world, nodes, faults, seconds))
        while (now := loop.time()) < ends:
            await world.ledger.publish(rate, shortest_ms=SHORTEST_MS, longest_ms=LONGEST_MS)
            for node in nodes:
                node.check()
            await asyncio.sleep(max(0.0, 1.0 - (loop.time() - now)))
        await trouble
        await world.ledger.all_back(timeout=LONGEST_MS / 1000 + 60)
        await world.ledger.drained()
        for node in nodes:
            await node.stop()
        return world.ledger.verdict(world.standing()), faults


async def _trouble(world: World, nodes: list[Node], faults: dict[str, int], seconds: float) -> None:
    """One broker restart, clean or not, and some smaller faults at times of the seed."""
    kinds = [*(["cut"] * 3), "alarm", "minority", "daemon", detangle.choice(["kill", "stop"])]
    detangle.shuffle(kinds)
    windows = world.ledger.account.windows = []
    for kind in kinds:
        await asyncio.sleep(seconds / (len(kinds) + 1) * detangle.uniform(0.5, 1.5))
        faults[kind] += 1
        begun_ms = time.time() * 1000
        await _FAULTS[kind](world, detangle.choice(nodes))
        windows.append(Window(begun_ms, (time.time() + AFTERMATH) * 1000))


async def _cut(world: World, _: object) -> None:
    for connection in list(world.broker.connections):
        if connection.name.startswith("delayer") and detangle.flip(0.5):
            connection.cut()


async def _alarm(world: World, _: object) -> None:
    world.broker.alarm("memory")
    await asyncio.sleep(detangle.uniform(0.1, 20.0))
    world.broker.alarm("")


async def _minority(world: World, _: object) -> None:
    """The quorum queues, or one of them, have no majority for a while."""
    queues = [queue for queue in world.broker.vhosts["/"].queues.values() if queue.quorum]
    if detangle.flip(0.5):
        queues = [detangle.choice(queues)]
    for queue in queues:
        queue.available = False
    await asyncio.sleep(detangle.uniform(0.5, 40.0))
    for queue in queues:
        if world.broker.running:
            queue.resume()


async def _kill(world: World, _: object) -> None:
    await world.broker.kill()
    await _back(world)


async def _stop(world: World, _: object) -> None:
    await world.broker.stop()
    await _back(world)


async def _back(world: World) -> None:
    await asyncio.sleep(detangle.uniform(0.5, 30.0))
    await detangle.spawn(world.broker.start(), host="broker")


async def _daemon(_: World, node: Node) -> None:
    await node.kill()
    await asyncio.sleep(detangle.uniform(0.5, 10.0))
    await node.start()


_FAULTS: Final = {"kill": _kill, "stop": _stop, "cut": _cut, "alarm": _alarm, "minority": _minority, "daemon": _daemon}
