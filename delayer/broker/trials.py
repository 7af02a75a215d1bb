"""Messages on their way alone, to destinations that may not answer: those that are waited for, a bounded number that is
listened for after that, and the last that is known of the others. What an answer means is decided in aside.py.

Each has a channel of its own, and brokers allow a connection only so many (``channel_max``: 2047, or a hundred where
operators want few of them). One that finds none free waits for it, and its time begins when it has one.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

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
RESERVE: Final = 8
"""Channels of a connection that are left for others, if it may have so many that this is a quarter at most: for the
message that asks whether the broker answers, or for whoever publishes there."""
SHARE: Final = 4
"""Of a connection that others publish on, trials take one of so many channels."""
AGAIN: Final = 0.05
"""Seconds until one that found no channel looks again: the broker says when one is closed, and mostly at once."""


class Places:
    """The channels that trials may have on one connection, all of them together. Who comes first has one first."""

    def __init__(self, connection: Connection, *, shared: bool) -> None:
        """``shared``: others publish on it."""
        self.connection = connection
        self.most = max(2, connection.channel_max // (SHARE if shared else 1))
        self.kept = min(RESERVE, connection.channel_max // 4)
        self.turns = asyncio.Semaphore(self.most)

    @property
    def lingering(self) -> int:
        """How many of them those may have that nobody waits for any more."""
        return min(LINGERING, self.most // 2)

    @property
    def full(self) -> bool:
        """Whether none is free. Not of a lost connection: whoever is to publish there is to hear of it."""
        return self.connection.free_channels <= self.kept and not self.connection.closed.done()


class Trial:
    """One message on its way, alone."""

    def __init__(self, message: Outgoing, places: Places) -> None:
        self.message = message
        self.connection = places.connection
        self.places = places
        self.began = time.monotonic()
        self.out: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done as soon as it has a channel to go by."""
        self.missed = False
        """Whether a batch has gone on without its answer."""
        self.ended = False
        """Whether the broker ended the connection for what was sent over it, by this or by another trial."""
        self.task = asyncio.create_task(self._publish(), name="a destination that may not answer")

    async def is_out(self, until: float) -> None:
        """Until it has a channel, or is over, or it is then (monotonic seconds)."""
        either: set[asyncio.Future[Any]] = {self.task, self.out}
        left = max(0.0, until - time.monotonic())
        await asyncio.wait(either, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    async def _publish(self) -> Outcome | None:
        """None: it is not known, and will not be."""
        waited = self.places.turns.locked()
        async with self.places.turns:
            while self.places.full:
                waited = True
                await asyncio.sleep(AGAIN)
            if waited:
                self.began = time.monotonic()
            self.out.set_result(None)
            return await self._probe()  # takes a number before it first waits for anything: the free one is still free

    async def _probe(self) -> Outcome | None:
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
        self._places: dict[Connection, Places] = {}

    def __contains__(self, one: Destination) -> bool:
        return one in self._all

    def places(self, connection: Connection, *, shared: bool) -> Places:
        """Those of this connection, which is one that others publish on, or is not."""
        if connection not in self._places:
            self._places = {one: its for one, its in self._places.items() if not one.closed.done()}
            self._places[connection] = Places(connection, shared=shared)
        return self._places[connection]

    def begin(self, one: Destination, message: Outgoing, places: Places) -> Trial:
        """The one that is under way, or another."""
        if one not in self._all:
            trial = self._all[one] = Trial(message, places)
            trial.task.add_done_callback(partial(self._ended, one, trial))
        return self._all[one]

    def miss(self, one: Destination, trial: Trial) -> None:
        """Nobody waits for this one any more, unless it has its answer. Whoever is listened for the longest is let go
        of where they are too many: never one that somebody waits for still. One that is not out yet never will be."""
        if trial.task.done() or trial.missed:
            return
        trial.missed = True
        if not trial.out.done():
            self._let_go(one, trial)
            return
        lingering = self._lingering()
        size = sum(len(trial.message.body) for _, trial in lingering)
        for oldest, old in lingering[:-1]:
            if len(lingering) <= trial.places.lingering and size <= LINGERING_BYTES:
                break
            lingering = lingering[1:]
            size -= len(old.message.body)
            self._let_go(oldest, old)

    def room(self, places: Places) -> int:
        """How many more can be listened for there without letting go of one."""
        lingering = self._lingering()
        full = sum(len(trial.message.body) for _, trial in lingering) >= LINGERING_BYTES
        return 0 if full else max(0, places.lingering - len(lingering))

    def silence(self, one: Destination) -> Silence | None:
        """How long there was no answer at the last trial; None where there was one, or is none to come."""
        trial = self._all.get(one)
        if trial is None or not trial.out.done():
            return self._silences.get(one)
        return None if trial.task.done() else Silence(trial.began, time.monotonic())

    def tried(self, one: Destination) -> float:
        """When one that is not under way was tried last, as far as that is remembered."""
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
        if not trial.out.done():
            return  # nothing was heard because nothing was said
        self._silences.pop(one, None)
        if len(self._silences) >= REMEMBERED:
            del self._silences[next(iter(self._silences))]
        self._silences[one] = Silence(trial.began, time.monotonic())

    def _ended(self, one: Destination, trial: Trial, task: asyncio.Task[Outcome | None]) -> None:
        if self._all.get(one) is trial:
            del self._all[one]
            self._silences.pop(one, None)
            self._over(one, trial, None if task.cancelled() or task.exception() is not None else task.result())
