"""The simulated broker: one node, its users and virtual hosts, its clock and its chance, and what may happen to it.

All time is the event loop's. Every choice comes from ``chance``, so a run can be repeated. It behaves as RabbitMQ
3.10.8, which tests/conformance compares with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from tests.simulation.broker.access import Permissions, User
from tests.simulation.broker.connection import ServerConnection
from tests.simulation.broker.queue import Queue
from tests.simulation.broker.vhost import VirtualHost
from tests.simulation.broker.wire import Code

T = TypeVar("T")
Chance = Callable[[int], int]
"""Returns a number from 0 to below its argument; 0 is the simplest choice."""
EVERYTHING: Final = Permissions(".*", ".*", ".*")


@dataclass(frozen=True)
class Pace:
    """``commits``: the seconds that the members of a quorum queue may take to agree. ``heartbeat``: what the broker
    proposes, in seconds."""

    commits: Sequence[float] = (0.0,)
    heartbeat: int = 60


class SimulatedBroker:
    """Create it in its loop; :meth:`listen` accepts connections. ``guest`` may do everything."""

    def __init__(self, chance: Chance, pace: Pace | None = None, *, name: str = "simulated@localhost") -> None:
        self.loop = asyncio.get_running_loop()
        self.chance = chance
        self.pace = pace or Pace()
        self.name = name
        self.running = False
        self.alarmed = ""
        """The resource of an alarm: "memory" or "disk"."""
        self.overhears: Callable[[ServerConnection], Callable[[bytes], object]] = lambda _: bool
        """Called after each login; returns what gets the bytes that the broker sends from then on."""
        self.users = {"guest": User("guest", "guest", frozenset({"administrator"}))}
        self.vhosts: dict[str, VirtualHost] = {}
        self.connections: list[ServerConnection] = []
        self._epoch = time.time() - self.loop.time()
        self._listeners: list[tuple[str, int]] = []
        self._servers: list[asyncio.AbstractServer] = []
        self._names = 0
        self.add_vhost("/")

    # What its parts use.

    def now(self) -> float:
        return self.loop.time()

    def epoch(self) -> float:
        return self._epoch + self.loop.time()

    def after(self, seconds: float, call: Callable[[], object]) -> asyncio.TimerHandle:
        return self.loop.call_later(max(seconds, 0.0), call)

    @staticmethod
    def cancel(timer: object) -> None:
        if isinstance(timer, asyncio.Handle):
            timer.cancel()

    def commit_seconds(self) -> float:
        commits = self.pace.commits
        return commits[self.chance(len(commits))] if len(commits) > 1 else commits[0]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        left = list(items)
        return [left.pop(self.chance(len(left))) for _ in range(len(left))]

    def new_name(self, prefix: str) -> str:
        self._names += 1
        return f"{prefix}-{self._names:022d}"

    # Its administration.

    def add_vhost(self, name: str) -> VirtualHost:
        vhost = self.vhosts[name] = VirtualHost(self, name)
        self.users["guest"].permissions[name] = EVERYTHING
        return vhost

    def drop_vhost(self, name: str) -> None:
        vhost = self.vhosts.pop(name)
        for connection in list(self.connections):
            if connection.vhost is vhost:
                connection.end(Code.CONNECTION_FORCED, "vhost is going down")
        for queue in list(vhost.queues.values()):
            vhost.delete_queue(queue)
        for user in self.users.values():
            user.permissions.pop(name, None)

    def queue(self, name: str, vhost: str = "/") -> Queue:
        return self.vhosts[vhost].queues[name]

    def alarm(self, resource: str) -> None:
        """Set an alarm of "memory" or "disk", or clear it with ""."""
        self.alarmed = resource
        if not resource:
            for connection in list(self.connections):
                connection.unblock()

    # Its life.

    async def listen(self, host: str, port: int) -> None:
        self._listeners.append((host, port))
        self.running = True
        self._servers.append(await self.loop.create_server(lambda: ServerConnection(self), host, port))

    async def stop(self) -> None:
        """A clean stop: the clients get a reason, and nothing is lost that the broker has."""
        await self._end(lambda connection: connection.end(Code.CONNECTION_FORCED, "broker forced connection closure "
                                                          "with reason 'shutdown'"), lambda count: count)  # fmt: skip

    async def kill(self) -> None:
        """The node dies: connections are cut, and the members decide by chance which of the last changes they have."""
        await self._end(lambda connection: connection.cut(), None)

    async def _end(self, close: Callable[[ServerConnection], object], survivors: Callable[[int], int] | None) -> None:
        self.running = False
        for server in self._servers:
            server.close()
        self._servers.clear()
        chance, self.chance = self.chance, (self.chance if survivors is None else lambda count: count - 1)
        for vhost in self.vhosts.values():
            vhost.die()
        self.chance = chance
        for connection in list(self.connections):
            close(connection)
        self.alarmed = ""

    async def start(self) -> None:
        """Start again, at the same addresses."""
        self.running = True
        for vhost in self.vhosts.values():
            vhost.start()
        listeners, self._listeners = self._listeners, []
        for host, port in listeners:
            await self.listen(host, port)

    def cut_connections(self, which: Callable[[ServerConnection], bool] = lambda _: True) -> int:
        """Cut connections without a goodbye. Returns how many."""
        found = [one for one in self.connections if which(one)]
        for connection in found:
            connection.cut()
        return len(found)
