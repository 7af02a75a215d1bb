"""What may happen to the hosts of a simulation. Each fault lasts until it is over, and things work again some time
later."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import detangle
import structlog

from tests.simulation import clock, links, pauses
from tests.simulation.store.server import HOSTS, Role
from tests.simulation.world import BROKER, DESTINATION, Node, World
from tests.support.verdict import Window

AFTERMATH: Final = 60.0
"""After that many seconds everything works again; only messages that met a fault may come twice."""

RATES: Final = (0, 1_000)
PARKED_BEYOND_MS: Final = (0, 5_000)

log = structlog.get_logger(__name__)
Fault = Callable[[World, Node], Awaitable[None]]


@dataclass
class Plan:
    """What a run is asked for. ``kinds``: its faults are of these kinds only. ``keep``: the places of the faults that
    take place; the others are left out. ``drawn``: the kinds of all faults, once the run has drawn them."""

    kinds: Sequence[str] = ()
    keep: Collection[int] | None = None
    drawn: list[str] = field(default_factory=list)

    def takes_place(self, place: int) -> bool:
        return self.keep is None or place in self.keep


class Trouble:
    """The faults of a run, one after the other. ``counts``: how many of each kind."""

    def __init__(self, world: World, nodes: Sequence[Node], plan: Plan) -> None:
        self._world = world
        self._nodes = nodes
        self._plan = plan
        self._quiet_from = 0.0
        self._windows = world.ledger.account.windows = []
        self.counts: dict[str, int] = {}

    @property
    def is_peace(self) -> bool:
        """Whether every fault is over, with its aftermath."""
        return time.time() >= self._quiet_from

    async def run(self, faults: Mapping[str, Fault], kinds: Sequence[str], seconds: float) -> None:
        """Spread faults of these kinds over so many seconds."""
        self._plan.drawn = list(kinds)
        for place, kind in enumerate(kinds):
            await asyncio.sleep(seconds / (len(kinds) + 1) * detangle.uniform(0.5, 1.5))
            if not self._plan.takes_place(place):
                continue
            self.counts[kind] = self.counts.get(kind, 0) + 1
            begun, self._quiet_from = time.time(), float("inf")
            node = detangle.choice(list(self._nodes))
            log.warning("fault", kind=kind, daemon=node.host)
            await faults[kind](self._world, node)
            log.warning("fault over", kind=kind)
            self._quiet_from = time.time() + AFTERMATH
            self._windows.append(Window(begun * 1000, self._quiet_from * 1000))


async def cut(world: World, _: Node) -> None:
    """Connections to the broker break."""
    for connection in list(world.broker.connections):
        if connection.name.startswith("delayer") and detangle.flip(0.5):
            connection.cut()


async def alarm(world: World, _: Node) -> None:
    world.broker.alarm("memory")
    await asyncio.sleep(detangle.uniform(0.1, 20.0))
    world.broker.alarm("")


async def destination_away(world: World, _: Node) -> None:
    """The exchange of the destination is deleted, and declared again later."""
    exchanges = world.broker.vhosts["/"].exchanges
    exchange = exchanges.pop(DESTINATION)
    await asyncio.sleep(detangle.uniform(0.5, 40.0))
    exchanges[DESTINATION] = exchange


async def minority(world: World, _: Node) -> None:
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


async def broker_killed(world: World, _: Node) -> None:
    await world.broker.kill()
    await _broker_back(world)


async def broker_stopped(world: World, _: Node) -> None:
    await world.broker.stop()
    await _broker_back(world)


async def _broker_back(world: World) -> None:
    await asyncio.sleep(detangle.uniform(0.5, 30.0))
    await detangle.spawn(world.broker.start(), host=BROKER)


async def daemon_killed(_: World, node: Node) -> None:
    await node.kill()
    await asyncio.sleep(detangle.uniform(0.5, 10.0))
    await node.start()


async def daemon_stopped(_: World, node: Node) -> None:
    await node.stop()
    await asyncio.sleep(detangle.uniform(0.0, 10.0))
    await node.start()


async def daemon_paused(_: World, node: Node) -> None:
    pauses.pause(node.host)
    await asyncio.sleep(detangle.uniform(0.1, 40.0))
    pauses.resume(detangle.current_loop(), node.host)


async def store_killed(world: World, _: Node) -> None:
    world.store.kill()
    await _store_back(world)


async def store_stopped(world: World, _: Node) -> None:
    world.store.stop()
    await _store_back(world)


async def _store_back(world: World) -> None:
    await asyncio.sleep(detangle.uniform(0.1, 30.0))
    await detangle.spawn(world.store.start(), host=world.store.primary)


async def store_fails_over(world: World, _: Node) -> None:
    """The primary dies, or its machine falls silent. Its standby, which has every commit, is read-only for a while, or
    starts, and then takes its place. The old primary may come back at once as a standby, or not before the next
    failover."""
    store, last, next_ = world.store, world.store.primary, world.store.standby
    detangle.network().restart(next_)
    await store.assume(next_, detangle.choice([Role.STANDBY, Role.STARTING, Role.AWAY]))
    if is_silent := detangle.flip(0.5):
        detangle.network().crash(last)
    store.kill()
    store.roles[last] = Role.AWAY
    await asyncio.sleep(detangle.uniform(0.0, 10.0))
    await store.assume(next_, Role.STANDBY)
    if not is_silent and detangle.flip(0.5):
        await store.assume(last, Role.STANDBY)
    await asyncio.sleep(detangle.uniform(0.0, 20.0))
    await store.assume(next_, Role.PRIMARY)


async def store_cut(world: World, _: Node) -> None:
    """Connections to the store break."""
    world.store.cut_connections(lambda _: detangle.flip(0.5))


async def store_frozen(world: World, _: Node) -> None:
    world.store.freeze()
    await asyncio.sleep(detangle.uniform(0.1, 60.0))
    world.store.thaw()


async def store_apart(_: World, node: Node) -> None:
    """One daemon does not reach the store."""
    await _apart(node.host, *HOSTS)


async def broker_apart(_: World, node: Node) -> None:
    """One daemon does not reach the broker."""
    await _apart(node.host, BROKER)


async def mode_switched(_: World, node: Node) -> None:
    """Every message that arrives meanwhile takes the cascade, and what waits in the store leaves it on time."""
    native = node.settings.model_copy(update={"mode": "native"})
    await node.reload(native)
    await asyncio.sleep(detangle.uniform(1.0, 60.0))
    await node.reload(node.settings)


async def reloaded(_: World, node: Node) -> None:
    """With another rate of the route, and another delay from which on messages are parked. Both stay."""
    routes = tuple(route.model_copy(update={"max_rate": detangle.choice(RATES)}) for route in node.settings.routes)
    store = node.settings.store.model_copy(update={"park_beyond_ms": detangle.choice(PARKED_BEYOND_MS)})
    node.settings = node.settings.model_copy(update={"routes": routes, "store": store})
    await node.reload(node.settings)


async def clock_stepped(_: World, node: Node) -> None:
    """The time of day of one daemon's host is wrong for a while."""
    clock.ahead[node.host] = detangle.choice([-3_600.0, -5.0, 5.0, 3_600.0])
    await asyncio.sleep(detangle.uniform(1.0, 60.0))
    del clock.ahead[node.host]


async def store_one_way(_: World, node: Node) -> None:
    """What one daemon says to the store is lost, or what the store says to it."""
    await _one_way(node.host, *HOSTS)


async def broker_one_way(_: World, node: Node) -> None:
    """What one daemon says to the broker is lost, or what the broker says to it."""
    await _one_way(node.host, BROKER)


async def _one_way(one: str, *others: str) -> None:
    ways = [(one, other) for other in others]
    if detangle.flip(0.5):
        ways = [(other, one) for other in others]
    for way in ways:
        links.lose(*way)
    await asyncio.sleep(detangle.uniform(0.1, 40.0))
    for way in ways:
        links.restore(*way)


async def slow(_: World, __: Node) -> None:
    """All connections are slow."""
    loop = detangle.current_loop()
    before = links.take(loop, detangle.choice(links.SLOW))
    await asyncio.sleep(detangle.uniform(1.0, 40.0))
    links.take(loop, before)


def killed_during(*faults: Fault) -> Fault:
    """A daemon dies during another fault, of broker or store. It may start again before that is over."""

    async def killed(world: World, node: Node) -> None:
        other = asyncio.create_task(detangle.choice(faults)(world, node))
        await asyncio.sleep(detangle.uniform(0.0, 10.0))
        await daemon_killed(world, node)
        await other

    return killed


async def _apart(one: str, *others: str) -> None:
    for other in others:
        detangle.network().disconnect(one, other)
    await asyncio.sleep(detangle.uniform(0.1, 40.0))
    for other in others:
        detangle.network().reconnect(one, other)


OF_BROKER: Final[Mapping[str, Fault]] = {
    "kill": broker_killed, "stop": broker_stopped, "cut": cut, "alarm": alarm, "minority": minority,
    "daemon": daemon_killed, "daemon stopped": daemon_stopped, "daemon paused": daemon_paused, "reloaded": reloaded,
    "broker apart": broker_apart, "broker one way": broker_one_way, "slow": slow,
    "daemon during": killed_during(broker_killed, broker_stopped, broker_apart),
}  # fmt: skip
OF_STORE: Final[Mapping[str, Fault]] = {
    **OF_BROKER, "store killed": store_killed, "store stopped": store_stopped, "store cut": store_cut,
    "store fails over": store_fails_over, "store frozen": store_frozen, "store apart": store_apart,
    "store one way": store_one_way, "destination away": destination_away, "mode switched": mode_switched,
    "clock stepped": clock_stepped, "daemon during": killed_during(
        broker_killed, broker_stopped, broker_apart, store_killed, store_stopped, store_fails_over, store_frozen,
        store_apart,
    ),
}  # fmt: skip
