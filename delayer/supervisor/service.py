"""The supervisor: has the workers started, listens to them, kills those that hang, and speaks for all to systemd."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Final

import structlog

from delayer import __version__, telemetry
from delayer.ops.notify import FEEDS, Notifier, Watchdog
from delayer.services.lifecycle import Life
from delayer.settings import ConfigError, Settings
from delayer.supervisor import worker
from delayer.supervisor.agreement import Agreement
from delayer.supervisor.ear import listening
from delayer.supervisor.seat import Seat
from delayer.supervisor.state import Reading, State, summary

log = structlog.get_logger(__name__)

GRACE: Final = 9.0
"""Seconds that the workers have to stop, once told; whoever is left is killed then. Ten are promised, and a worker
takes 8.5 at most (services/lifecycle.py, daemon.py, ops/loop.py)."""
LIMIT: Final = 30.0
"""Seconds within which a worker has to say that it moves, where systemd sets no other limit."""
FIRST_WORD: Final = 60.0
"""Seconds that a new worker has to say so for the first time: an interpreter starts slowly where many do."""
LOOK: Final = 0.5
"""Seconds between two looks at the workers."""
ABSENT: Final = 5.0
"""Seconds between two looks that show that it was us who stood still: then we cannot say who else did."""
RELOAD: Final = 60.0
"""Seconds that the workers have to read the configuration again before systemd hears that the reload is over."""


class Supervisor:
    """Runs ``settings.workers`` workers, in one event loop that waits nearly always. Satisfies seat.Service."""

    def __init__(self, settings: Settings, load: Callable[[], Settings], notifier: Notifier) -> None:
        self.life = Life(GRACE)
        self.proven = False
        self._agreement = Agreement(settings)
        self._settings = settings
        self._load = load
        self._notifier = notifier
        self._limit = FEEDS * notifier.watchdog_interval if notifier.watchdog_interval else LIMIT
        self._states = [State(number) for number in range(1, settings.workers + 1)]
        self._seats: dict[int, Seat] = {}
        self._watchdog = Watchdog()
        self._code = 0
        self._announced = False
        self._said = ""
        self._looked = time.monotonic()
        self._fed = float("-inf")
        self._reload_since: float | None = None
        self._reload_again = False

    async def run(self) -> int:
        """Until :meth:`stop`, or until a worker refuses; the exit code of the service."""
        log.info("starting", version=__version__, mode=self._settings.mode, workers=len(self._states))
        with ExitStack() as lines:
            for state in self._states:
                line = lines.enter_context(listening(self._heard))
                environ = worker.environment(os.environ, state.number, self._limit)
                seat = Seat(state, partial(worker.start, worker.command(), environ, line), self)
                self._seats[state.number] = seat
                self.life.add(f"worker {state.number}", seat.keep)
            self.life.add("watch", self._watch)
            await self.life.run()
        log.info("stopped")
        return self._code

    def stop(self) -> None:
        """Tell every worker to stop."""
        log.info("stopping")
        self._notifier.stopping(f"stopping {len(self._states)} workers")
        self.life.stop()

    def reload(self) -> None:
        """Let every worker read the configuration again. Requests that come meanwhile are one more."""
        if self._reload_since is not None:
            self._reload_again = True
            return
        self._reload_since = time.monotonic()
        if self._announced:  # before that systemd waits for the start, and would take the end of this for it
            self._notifier.reloading()
        try:
            new = self._load()
        except ConfigError as wrong:
            log.error("reload refused", reason=str(wrong))  # here, once: every worker would say the same
        else:
            telemetry.configure(new.log.format, new.log.level)
            self._agreement.reloaded(new)
            for state in self._states:
                if state.ask_to_read():
                    self._seats[state.number].signal(signal.SIGHUP)
        self._changed()

    def check(self) -> None:
        """See seat.Service. A file that is just being edited must not make a dead worker's successor refuse."""
        new = self._load()
        if any(state.pid is not None for state in self._states):
            self._agreement.check(new)
        else:
            self._agreement = Agreement(new)  # nobody is left to differ from: this is as good as a restart

    def began(self, state: State) -> None:
        """See seat.Service."""
        self._watchdog.register(_name(state), max(FIRST_WORD, self._limit), time.monotonic())
        self._changed()

    def ended(self, state: State) -> None:
        """See seat.Service."""
        self._watchdog.forget(_name(state))
        self._changed()

    def give_up(self, code: int) -> None:
        """See seat.Service. The first one's reason is everybody's."""
        self._code = self._code or code
        self.life.stop()

    def _heard(self, pid: int, fields: Mapping[str, str]) -> None:
        state = next((one for one in self._states if one.pid == pid), None)
        if state is None:
            return  # one that is dead by now, or one whose start is not known here yet: it will say it again
        if "WATCHDOG" in fields or not state.heard:
            self._watchdog.register(_name(state), self._limit, time.monotonic())
        wanted = state.hear(fields)
        self.proven = self.proven or state.ready
        if wanted:
            self._seats[state.number].signal(signal.SIGHUP)
        self._changed()

    def _changed(self) -> None:
        """Tell systemd what has become true."""
        if self.life.stopping.is_set():
            return
        status = summary(self._states)
        before, self._said = self._said, status
        if not self._announced and all(state.ready for state in self._states):
            self._announced = True
            log.info("workers ready", workers=len(self._states))
            self._notifier.ready(status)
        elif self._reload_since is not None and all(state.reading is Reading.IDLE for state in self._states):
            self._reload_over(status)
        elif status != before:
            self._notifier.status(status)

    def _reload_over(self, status: str) -> None:
        self._reload_since = None
        if self._announced:
            self._notifier.ready(status)
        if self._reload_again:
            self._reload_again = False
            self.reload()

    async def _watch(self, stopping: asyncio.Event) -> None:
        """Look at the workers until stopping is set."""
        while not stopping.is_set():
            self._look(time.monotonic())
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), LOOK)

    def _look(self, now: float) -> None:
        """Kill who hangs, and feed systemd's watchdog while nobody does."""
        if now - self._looked > ABSENT:
            self._begin_anew(now)
        self._looked = now
        silent = self._watchdog.stalled(now)
        for state in self._states:
            if _name(state) in silent and not state.killed:
                log.error("worker silent", worker=state.number, pid=state.pid)
                self._seats[state.number].signal(signal.SIGKILL)
                state.killed = True
        interval = self._notifier.watchdog_interval
        if interval is not None and not silent and now - self._fed >= interval:
            self._notifier.feed_watchdog()
            self._fed = now
        self._hurry_reload(now)

    def _begin_anew(self, now: float) -> None:
        """We were stopped, or had no time: what the workers said meanwhile is not read yet, or found no room."""
        for state in self._states:
            if state.pid is not None:
                self._watchdog.register(_name(state), max(FIRST_WORD, self._limit), now)

    def _hurry_reload(self, now: float) -> None:
        """A word that was lost must not keep systemd waiting for ever."""
        if self._reload_since is None or now - self._reload_since < RELOAD:
            return
        late = [state for state in self._states if state.reading is not Reading.IDLE]
        log.warning("reload unanswered", workers=[state.number for state in late])
        for state in late:
            state.reading = Reading.IDLE
        self._changed()


def _name(state: State) -> str:
    return f"worker {state.number}"
