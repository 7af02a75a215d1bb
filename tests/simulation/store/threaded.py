"""The simulated store on a real socket, in real time, in a thread of its own: tests use it in place of a real
Postgres."""

from __future__ import annotations

import asyncio
import random
import secrets
import threading
from typing import Any, Final, Self

from tests.simulation import clock
from tests.simulation.store.process import DATABASE, ClockedPostgres
from tests.simulation.store.server import SimulatedStore
from tests.simulation.store.session import Session
from tests.support import ports
from tests.support.postgres import SUPERUSER

_SECONDS: Final = 10.0


class _RealTime(SimulatedStore):
    """Only the primary listens. Its time of day passes as the loop's does."""

    def __init__(self, process: ClockedPostgres, port: int) -> None:
        super().__init__(process, random.Random(secrets.randbits(64)).randrange)
        self._port = port
        self._began = self.loop.time()
        self._made: list[Session] = []

    async def start(self) -> None:
        self.running = True
        self._servers[self.primary] = await self.loop.create_server(self._session, ports.HOST, self._port)

    def _session(self) -> Session:
        self._made.append(Session(self, self.primary))
        return self._made[-1]

    async def end(self) -> None:
        """Close every socket."""
        self.close()
        made = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*made)  # The loop accepts each connection in a task.
        for session in self._made:
            if session.connected:
                session.cut()
        for _ in range(2):  # They end in the next turn of the loop.
            await asyncio.sleep(0)

    def set_clock(self) -> None:
        self._process.set_clock(clock.EPOCH + self.loop.time() - self._began)


class ThreadedStore:
    """An empty store at :attr:`url`."""

    def __init__(self, process: ClockedPostgres) -> None:
        port = ports.reserve()
        self.url = f"postgresql://{SUPERUSER}@{ports.HOST}:{port}/{DATABASE}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._store = self._run(self._begin(process, port))

    async def _begin(self, process: ClockedPostgres, port: int) -> _RealTime:
        store = _RealTime(process, port)
        await store.start()
        return store

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._store.end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_SECONDS)
        self._loop.close()
