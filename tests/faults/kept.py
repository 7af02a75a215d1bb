"""One daemon of a fleet: started again by whoever ends it, behind proxies and a clock of its own."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from tests.support.daemon import DaemonProcess
from tests.support.odd import Clock, program
from tests.support.proxy import Proxy

if TYPE_CHECKING:
    from tests.faults.fleet import Fleet

USER, PASSWORD = "delayer", "secret"
EVENTS_KEPT = 20_000
BEGINNING = 200
"""Events of the log's beginning that are always kept, and tell whether it is ready."""
STARTUP = 240.0
"""Seconds within which a daemon is ready, on a machine where everybody starts at once."""


class Kept:
    """One of the daemons: started again by whoever ends it, with the proxies and the clock of its own."""

    def __init__(self, number: int, fleet: Fleet) -> None:
        self.number = number
        self.broker = Proxy(fleet.rabbitmq.port)
        self.store = Proxy(fleet.postgres.port)
        self.clock = Clock(fleet.directory / f"clock-{number}")
        self.log = (fleet.directory / f"daemon-{number}.log").open("a", buffering=1)
        self.told: Counter[str] = Counter()
        """How often it said what, by event; all its processes together."""
        self.process = DaemonProcess({})
        self._fleet = fleet
        self._meant = 0
        self._left: DaemonProcess | None = None

    async def start(self, fault: str = "") -> None:
        """A new process in place of the one before; does not wait for anything else."""
        fleet = self._fleet
        if self.process.running:
            await self.kill()
        given = fleet.place.environ | fleet.environ
        environ = {name: value for name, value in given.items() if name != "MODE"} | {
            "BROKER__URL": fleet.rabbitmq.url(fleet.vhost, port=self.broker.port, user=f"{USER}:{PASSWORD}"),
            "STORE__URL": fleet.postgres.url(fleet.database, port=self.store.port),
        }
        if fault:
            environ["FAULT"] = fault
        odd = program(clock=self.clock.path, bug=fleet.bug)
        process = DaemonProcess(environ, config=fleet.config, program=odd)
        process.told = self._told
        await process.start()
        self.process = process

    def _told(self, event: dict[str, Any] | str) -> None:
        self.log.write(f"{event}\n")
        if isinstance(event, dict):
            self.told[str(event.get("event"))] += 1
        if len(self.process.events) > 2 * EVENTS_KEPT:
            del self.process.events[BEGINNING:EVENTS_KEPT]

    @property
    def up(self) -> bool:
        """It is ready, so that it knows what to do when it gets a signal."""
        return self.process.running and any(one.get("event") == "ready" for one in self.process.events[:BEGINNING])

    @property
    def mode(self) -> str:
        """In which it works, by its own word; empty before it has said so."""
        said = [one for one in self.process.events if one.get("event") in ("starting", "mode switched")]
        return str(said[-1].get("now") or said[-1].get("mode")) if said else ""

    async def ready(self) -> None:
        await self.process.event("ready", timeout=STARTUP)

    async def kill(self) -> None:
        if self.process.running:
            self.process.signal(signal.SIGKILL)
        await self.process.wait()

    @asynccontextmanager
    async def meant(self) -> AsyncIterator[None]:
        """Whoever ends the process in here does so on purpose; if it is left so, it stays so."""
        self._meant += 1
        try:
            yield
        finally:
            self._meant -= 1
            self._left = None if self.process.running else self.process

    async def mind(self) -> None:
        """Start it again whenever it ends by itself, and say so: no fault of somebody else is a reason to end."""
        while True:
            process = self.process
            code = await process.wait(timeout=float("inf"))
            if process is not self.process:
                continue
            if not self._meant and process is not self._left and not self._fleet.over:
                self._fleet.surprises.append(
                    f"daemon {self.number} ended with {code}; its log ends:\n{process.tail(5)}"
                )
                await self.start()
            else:
                await asyncio.sleep(0.1)  # perhaps whoever ended it starts another one
