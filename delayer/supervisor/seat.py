"""One worker's place: a process is started in it, and another one when that has ended, until the service stops."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

import structlog

from delayer.settings import ConfigError
from delayer.supervisor.agreement import Disagreement
from delayer.supervisor.policy import GiveUp, after_end, again
from delayer.supervisor.state import State

log = structlog.get_logger(__name__)


class Service(Protocol):
    """What a place has to say to the supervisor, and to ask."""

    @property
    def proven(self) -> bool:
        """Whether any worker was ready once."""

    def check(self) -> None:
        """Whether a daemon could be started now. Raises ConfigError, Disagreement."""

    def began(self, state: State) -> None:
        """A process runs."""

    def ended(self, state: State) -> None:
        """It does not run any more."""

    def give_up(self, code: int) -> None:
        """It will not run, and waiting does not mend it: stop everybody, and exit with ``code``."""


class Seat:
    """``start`` starts a process, or raises OSError."""

    def __init__(self, state: State, start: Callable[[], Awaitable[Process]], service: Service) -> None:
        self.state = state
        self._start = start
        self._service = service
        self._process: Process | None = None

    async def keep(self, stopping: asyncio.Event) -> None:
        """Have a process here until stopping is set; then tell it to stop, and wait for its end. Cancelled: kill it."""
        failures = 0
        while not stopping.is_set():
            began = time.monotonic()
            try:
                self._service.check()
                code = await self._live(stopping)
            except (ConfigError, Disagreement, OSError) as wrong:
                step = again(failures, random.random())
                log.error("worker not started", worker=self.state.number, reason=str(wrong))
            else:
                if stopping.is_set():
                    return
                lived = time.monotonic() - began
                end = after_end(code, lived, failures, random.random(), proven=self._service.proven)
                if isinstance(end, GiveUp):
                    log.error("worker refused", worker=self.state.number, code=end.code)
                    self._service.give_up(end.code)
                    return
                step = end
                log.error("worker died", worker=self.state.number, restart_seconds=round(step.pause, 1), **_how(code))
            failures = step.failures
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), step.pause)

    def signal(self, signum: signal.Signals) -> None:
        """To the process, if there is one."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signum)

    async def _live(self, stopping: asyncio.Event) -> int:
        """One process from its start to its end; its exit code, or minus the signal that killed it. Raises OSError."""
        self._process = process = await self._start()
        try:
            log.info("worker started", worker=self.state.number, pid=process.pid)
            self.state.began(process.pid)
            self._service.began(self.state)
            return await self._end(process, stopping)
        finally:
            self.signal(signal.SIGKILL)  # to nobody, unless we were cancelled or something failed
            await process.wait()
            self._process = None
            self.state.ended()
            self._service.ended(self.state)

    async def _end(self, process: Process, stopping: asyncio.Event) -> int:
        """Wait for it, and ask for it when stopping is set."""
        end = asyncio.create_task(process.wait(), name=f"end of worker {self.state.number}")
        stop = asyncio.create_task(stopping.wait(), name="stopping")
        try:
            await asyncio.wait([end, stop], return_when=asyncio.FIRST_COMPLETED)
            if not end.done():
                self.signal(signal.SIGTERM)
            return await end
        finally:
            stop.cancel()
            end.cancel()


def _how(code: int) -> dict[str, int | str]:
    """How a process ended, for the log."""
    try:
        return {"signal": signal.Signals(-code).name} if code < 0 else {"exit_code": code}
    except ValueError:
        return {"signal": str(-code)}  # one of those without a name
