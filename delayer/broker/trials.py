"""Messages on their way alone, to destinations that may not answer: those that are waited for, a bounded number that is
listened for after that, and the last that is known of the others. What an answer means is decided in aside.py."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from delayer.broker.alone import Probe
from delayer.broker.doubts import REMEMBERED, Destination
from delayer.core.errors import BrokerLost
from delayer.core.message import Outcome, Outgoing
from delayer.wire.connection import Connection
from delayer.wire.errors import ConnectionLost

LINGERING: Final = 64
"""Messages without an answer that are listened for; the oldest is let go of for another."""
LINGERING_BYTES: Final = 32 << 20
"""Of their bodies, but for one."""
LINGER: Final = 600.0
"""Seconds that one is listened for."""


class Trial:
    """One message on its way, alone."""

    def __init__(self, message: Outgoing, connection: Connection) -> None:
        self.message = message
        self.connection = connection
        self.began = time.monotonic()
        self.missed = False
        """Whether a batch has gone on without its answer."""
        self.ended = False
        """Whether the broker ended the connection for what was sent over it, by this or by another trial."""
        self.task = asyncio.create_task(self._publish(), name="a destination that may not answer")

    async def _publish(self) -> Outcome | None:
        """None: it is not known, and will not be."""
        probe = Probe(self.connection, asyncio.get_running_loop().time() + LINGER)
        try:
            return (await probe.publish(self.message))[0]
        except (BrokerLost, TimeoutError) as lost:
            self.ended = isinstance(lost, ConnectionLost) and lost.objects
            return None
        finally:
            probe.close()


class Silence(NamedTuple):
    """A destination was listened to for its answer from then till then (monotonic seconds), and there was none."""

    began: float
    until: float


class Trials:
    """One at a time of each destination. ``over`` is told of each one's end, but of those that are let go of."""

    def __init__(self, over: Callable[[Destination, Trial, Outcome | None], object]) -> None:
        self._over = over
        self._all: dict[Destination, Trial] = {}  # the oldest first
        self._silences: dict[Destination, Silence] = {}  # of those that were let go of, the oldest first

    def __contains__(self, one: Destination) -> bool:
        return one in self._all

    def begin(self, one: Destination, message: Outgoing, connection: Connection) -> Trial:
        """The one that is under way, or another."""
        if one not in self._all:
            self._silences.pop(one, None)
            trial = self._all[one] = Trial(message, connection)
            trial.task.add_done_callback(partial(self._ended, one, trial))
        return self._all[one]

    def miss(self, one: Destination, trial: Trial) -> None:
        """Nobody waits for this one any more, unless it has its answer. Whoever is listened for the longest is let go
        of where they are too many: never one that somebody waits for still."""
        if trial.task.done() or trial.missed:
            return
        trial.missed = True
        lingering = self._lingering()
        size = sum(len(trial.message.body) for _, trial in lingering)
        for oldest, old in lingering[:-1]:
            if len(lingering) <= LINGERING and size <= LINGERING_BYTES:
                break
            lingering = lingering[1:]
            size -= len(old.message.body)
            self._let_go(oldest, old)

    @property
    def places(self) -> int:
        """How many more can be listened for without letting go of one."""
        lingering = self._lingering()
        full = sum(len(trial.message.body) for _, trial in lingering) >= LINGERING_BYTES
        return 0 if full else max(0, LINGERING - len(lingering))

    def silence(self, one: Destination) -> Silence | None:
        """How long there was no answer at the last trial; None where there was one, or is none to come."""
        trial = self._all.get(one)
        if trial is None:
            return self._silences.get(one)
        return None if trial.task.done() else Silence(trial.began, time.monotonic())

    def tried(self, one: Destination) -> float:
        """When one that is not under way was tried, as far as that is remembered."""
        silence = self._silences.get(one)
        return -math.inf if silence is None else silence.began

    def tasks(self) -> list[asyncio.Task[Outcome | None]]:
        return [trial.task for trial in self._all.values()]

    def _lingering(self) -> list[tuple[Destination, Trial]]:
        return [(one, trial) for one, trial in self._all.items() if trial.missed]

    def _let_go(self, one: Destination, trial: Trial) -> None:
        if trial.task.done():
            return  # it has its answer, and ends by itself
        del self._all[one]
        trial.task.cancel()
        if len(self._silences) >= REMEMBERED:
            del self._silences[next(iter(self._silences))]
        self._silences[one] = Silence(trial.began, time.monotonic())

    def _ended(self, one: Destination, trial: Trial, task: asyncio.Task[Outcome | None]) -> None:
        if self._all.get(one) is trial:
            del self._all[one]
            self._over(one, trial, None if task.cancelled() or task.exception() is not None else task.result())
