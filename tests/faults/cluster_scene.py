"""One daemon and a cluster of brokers: a node dies, hangs or leaves, and every message is accounted for.

    async with Scene.open(cluster, vhost, "native") as scene:
        figures = await scene.play(FAULTS["leader killed"])
    figures.verdict.assert_kept(repeats=True)

The daemon reaches the cluster through a proxy, or by a list of URLs. The roles begin on different nodes: the daemon's
connections on the first, the leaders of its queues on the second, the ledger's connections and its queue on the third.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Self

import psutil

from tests.faults.cluster_ledger import Figures, ReplicatedLedger
from tests.support.daemon import DaemonProcess
from tests.support.flow import flowing
from tests.support.place import Place
from tests.support.proxy import Proxy
from tests.support.rabbitmq_cluster import Node, RabbitMQCluster

A_SECOND: Final = 300
SHORTEST_MS, LONGEST_MS = 1_000, 8_000
SEED: Final = 39
FAILOVER_SECONDS: Final = 60.0
"""How long a node stays broken if new messages do not pass without it."""
OUTAGE_SECONDS: Final = 10.0
"""How long the cluster has no majority."""
REPAIRED_SECONDS: Final = 120.0
"""The deadline for new messages after the repair, and for the last message."""
LEDGER_QUERY: Final = "?heartbeat=4&connection_timeout=4000"
"""So that the ledger notices a paused node soon, and its figures are those of the daemon."""


@dataclass(frozen=True)
class Fault:
    """``choose``: the nodes to break. ``majority``: whether enough nodes remain for the cluster to work."""

    choose: Callable[[Scene], Sequence[Node]]
    break_: Callable[[Node], None]
    majority: bool = True


class Scene:
    """Made by :meth:`open`. It is played once."""

    def __init__(self, cluster: RabbitMQCluster, vhost: str, place: Place, ledger: ReplicatedLedger) -> None:
        self.cluster = cluster
        self.vhost = vhost
        self.place = place
        self.ledger = ledger
        self.daemon: DaemonProcess
        self.proxy: Proxy | None = None

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        cluster: RabbitMQCluster,
        vhost: str,
        mode: str,
        store: str | None = None,
        urls: Sequence[str] = (),
        **environ: str,
    ) -> AsyncIterator[Self]:
        """A ready daemon and its ledger. ``urls``: the daemon's list of addresses; without them, it connects through a
        proxy. ``environ``: as for the daemon."""
        first, second, third = (node.port for node in cluster.nodes)
        url = cluster.nodes[0].url
        async with AsyncExitStack() as stack:
            # The leader of a new queue is on the node to which its declaration came.
            near_second = await stack.enter_async_context(Proxy(second, third, first))
            near_third = await stack.enter_async_context(Proxy(third, second, first))
            near_first = None if urls else await stack.enter_async_context(Proxy(first, second, third))
            via = ",".join(urls) if near_first is None else url(vhost, port=near_first.port)
            place = Place(mode, url(vhost, port=near_second.port), store, via_broker=via)
            await place.declare()
            place.broker = url(vhost, port=near_third.port) + LEDGER_QUERY
            ledger = await stack.enter_async_context(place.ledger(SEED, kind=ReplicatedLedger))
            assert isinstance(ledger, ReplicatedLedger)
            scene = cls(cluster, vhost, place, ledger)
            scene.proxy = near_first
            scene.daemon = await stack.enter_async_context(place.daemon(**environ))
            await scene.daemon.ready()
            await asyncio.to_thread(cluster.settle)
            yield scene

    async def play(self, fault: Fault) -> Figures:
        """Publish, break the nodes, repair them once new messages pass without them, and draw up the account."""
        async with flowing(self.ledger, A_SECOND, shortest_ms=SHORTEST_MS, longest_ms=LONGEST_MS):
            await self._pass_new_messages(REPAIRED_SECONDS)
            nodes = await asyncio.to_thread(fault.choose, self)
            began_ms, known = time.time() * 1000, len(self.daemon.events)
            await asyncio.gather(*(asyncio.to_thread(fault.break_, node) for node in nodes))
            failed_over = await self._outlast(fault)
            await asyncio.to_thread(self.cluster.heal)
            repaired_ms = time.time() * 1000
            await self._pass_new_messages(REPAIRED_SECONDS)
            ended_ms = time.time() * 1000
        with suppress(AssertionError):  # the verdict has the missing messages
            await self.ledger.all_back(timeout=REPAIRED_SECONDS)
        assert await self.daemon.stop() == 0, self.daemon.tail()
        verdict = await self.place.settle_accounts(self.ledger)
        return Figures(
            verdict,
            self.ledger.repeats(),
            self.ledger.lateness(),
            lasted=(repaired_ms - began_ms) / 1000,
            silences=self.ledger.silences(began_ms, ended_ms),
            failed_over=failed_over,
            events=describe(self.daemon.events[known:], began_ms),
        )

    async def _outlast(self, fault: Fault) -> bool:
        """Leave the nodes broken until new messages pass without them, or for a time. Whether new messages passed."""
        if not fault.majority:
            await asyncio.sleep(OUTAGE_SECONDS)  # not to wait for anything: it is the length of the fault
            return False
        try:
            await self._pass_new_messages(FAILOVER_SECONDS)
        except AssertionError:
            return False
        return True

    async def _pass_new_messages(self, timeout: float) -> None:
        """Wait until a second's worth of messages published from now on has arrived."""
        last = self.ledger.account.sent + A_SECOND
        await self.ledger.until(lambda: self.ledger.newest > last, timeout=timeout)

    def node_of_daemon(self) -> Node:
        """The node to which the daemon is connected."""
        if self.proxy is not None:
            return self.cluster.node_at(self.proxy.target)
        ports = {link.raddr.port for link in psutil.Process(self.daemon.pid).net_connections("tcp") if link.raddr}
        return next(node for node in self.cluster.nodes if node.port in ports)

    def leader(self) -> Node:
        """The leader of the intake queue."""
        return self.cluster.wait_for_leader("delays", self.vhost)


def describe(events: Sequence[Mapping[str, Any]], began_ms: float) -> list[str]:
    """A line for each event of the daemon's log, with the seconds since the fault."""
    lines = []
    for event in events:
        seconds = datetime.fromisoformat(event["timestamp"]).timestamp() - began_ms / 1000
        details = {name: value for name, value in event.items() if name not in ("timestamp", "event", "level")}
        lines.append(f"{seconds:7.1f}  {event['event']}  {details}")
    return lines


def choose_daemons_node(scene: Scene) -> Sequence[Node]:
    return [scene.node_of_daemon()]


def choose_leader(scene: Scene) -> Sequence[Node]:
    return [scene.leader()]


def choose_another(scene: Scene) -> Sequence[Node]:
    """A node that is neither the daemon's nor the leader."""
    return scene.cluster.others(scene.node_of_daemon(), scene.leader())[:1]


def choose_majority(scene: Scene) -> Sequence[Node]:
    """The daemon's node and one more, if possible the leader."""
    of_daemon = scene.node_of_daemon()
    return [of_daemon, *sorted(scene.cluster.others(of_daemon), key=lambda node: node is not scene.leader())[:1]]


FAULTS: Final = {
    "daemon's node killed": Fault(choose_daemons_node, Node.kill),
    "leader killed": Fault(choose_leader, Node.kill),
    "third node killed": Fault(choose_another, Node.kill),
    "daemon's node paused": Fault(choose_daemons_node, Node.pause),
    "leader paused": Fault(choose_leader, Node.pause),
    "majority killed": Fault(choose_majority, Node.kill, majority=False),
    "daemon's node drained": Fault(choose_daemons_node, Node.drain),
    "app of daemon's node stopped": Fault(choose_daemons_node, Node.stop_app),
}
