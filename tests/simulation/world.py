"""The hosts of a simulation: a broker, daemons, and a ledger that publishes and judges."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import detangle
from detangle import SimLoop

from delayer.config.model import Settings
from delayer.daemon.app import Reload
from delayer.daemon.systemd import Notifier
from delayer.daemon.wiring import Daemon
from delayer.store.lanes.lane import PostgresLane
from tests.simulation.broker.broker import Pace, SimulatedBroker
from tests.simulation.store.process import ClockedPostgres
from tests.simulation.store.server import HOSTS, SimulatedStore
from tests.simulation.store.server import URL as STORE_URL
from tests.support.ledger import Ledger
from tests.support.sql_ledger import SqlLedger

BROKER: Final = "broker"
PORT: Final = 5672
DESTINATION: Final = "delayer.out"
"""The exchange that the ledger consumes from."""
URL: Final = f"amqp://guest:guest@{BROKER}:{PORT}/"
TURNS: Final = 100
"""Of the loop, until every task of a process that was killed has ended."""
COMMITS: Final = (0.0005, 0.001, 0.004, 0.03)


def chance(count: int) -> int:
    """The broker's choices are the simulation's."""
    return detangle.randint(0, count - 1) if count > 1 else 0


@dataclass
class Node:
    """One daemon on a host of its own. ``stop`` ends it as SIGTERM does, ``kill`` as SIGKILL does."""

    host: str
    settings: Settings
    daemon: Daemon = field(init=False)
    _running: asyncio.Task[None] = field(init=False)

    async def start(self) -> None:
        begun: asyncio.Future[Daemon] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            daemon = Daemon(self.settings, Notifier({}))
            begun.set_result(daemon)
            await daemon.run()

        self._running = detangle.spawn(run(), host=self.host, name=f"daemon {self.host}")
        self.daemon = await begun

    async def consuming(self) -> None:
        while not all(self.daemon.consuming().values()):
            self.check()
            await asyncio.sleep(0.1)

    def check(self) -> None:
        """Raises the error that ended the daemon, unless it was killed."""
        if self._running.done() and not self._running.cancelled():
            self._running.result()

    @property
    def runs(self) -> bool:
        return not self._running.done()

    def lanes(self) -> list[PostgresLane]:
        """The lanes that its process believes to own."""
        if not self.runs:
            return []
        return [lane for lane in self.daemon.store._ownership._lanes if lane.owned]

    async def stop(self) -> None:
        self.daemon.stop()
        await asyncio.wait([self._running])
        self._running.result()

    async def reload(self, settings: Settings) -> None:
        """Read the configuration again, as after SIGHUP."""
        reload = Reload(self.daemon, lambda: settings, Notifier({}))
        await detangle.spawn(reload._reload(), host=self.host, name=f"reload {self.host}")

    async def kill(self) -> None:
        """The process is gone at once; its sockets are reset, as the kernel does for a process that died."""
        network = detangle.network()
        for connection in [one for one in network._connections if not one.closed()]:
            if any(side.host == self.host for side in connection.sides()):
                connection.reset(ConnectionResetError(104, f"the process on {self.host} died"))
        network.crash(self.host)
        for _ in range(TURNS):  # A task may wait again as it ends, for a socket of which it will never hear.
            if not (left := self.tasks()):
                break
            for task in left:
                task.cancel()
            await asyncio.sleep(0)
        assert not left, f"{self.host} was killed, and still does {left}"
        network.restart(self.host)

    def tasks(self) -> list[asyncio.Task[Any]]:
        tasks = detangle.current_loop().task_info.values()
        return [info.task for info in tasks if info.host == self.host and not info.task.done()]


class World:
    """Made by :meth:`open`."""

    def __init__(self, broker: SimulatedBroker, store: SimulatedStore | None, ledger: Ledger) -> None:
        self.broker = broker
        self._store = store
        self.ledger = ledger

    @classmethod
    @asynccontextmanager
    async def open(
        cls, postgres: ClockedPostgres | None = None, *, ledger: type[Ledger] = Ledger, pace: Pace | None = None
    ) -> AsyncIterator[World]:
        """With a store if there is a ``postgres`` for it, and with a ledger of this kind."""

        async def serve() -> SimulatedBroker:
            broker = SimulatedBroker(chance, pace or Pace(COMMITS))
            await broker.listen(BROKER, PORT)
            return broker

        async def store_of(postgres: ClockedPostgres) -> SimulatedStore:
            store = SimulatedStore(postgres, chance)
            await store.start()
            return store

        broker = await detangle.spawn(serve(), host=BROKER)
        store = await detangle.spawn(store_of(postgres), host=HOSTS[0]) if postgres else None
        async with ledger.open(URL, random.Random(detangle.randint(0, 1 << 30))) as opened:
            if isinstance(opened, SqlLedger):
                opened.store = STORE_URL
            broker.overhears = lambda connection: opened.listener() if connection.name.startswith("delayer") else bool
            try:
                yield cls(broker, store, opened)
            finally:
                if store is not None:
                    store.close()

    def node(self, host: str, **tables: Any) -> Node:
        route = [{"from": "delayer.in", "to": DESTINATION}]
        return Node(host, Settings.model_validate({"broker": {"url": URL}, "route": route, **tables}))

    @property
    def store(self) -> SimulatedStore:
        assert self._store is not None, "this world has no store"
        return self._store

    def standing(self) -> dict[str, int]:
        """Messages that are still somewhere in the broker."""
        return {name: count for name, count in self.broker.vhosts["/"].depths().items() if count}


def loop() -> SimLoop:
    return detangle.current_loop()
