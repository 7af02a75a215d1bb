"""Destinations that do not answer, tried aside: one message of each, alone on a channel, on a connection of their own.

A queue that neither confirms nor refuses (a quorum queue without its majority) holds up more than itself: up to 4.x the
broker's channel waits for it, and answers for nothing that stands behind; and from some hundred publishes on, the
broker does not even read the connection of that channel. So what was not answered in time is suspected, and what leads
there is published here next, while everything else takes the shared channel.

A destination is stuck when its message was alone and is not answered, while a publish that began after it was
confirmed. A broker that as a whole does not answer makes nobody stuck; where nothing else is published, a message that
nobody can route tells whether the broker answers at all, but is believed only after some time.

A message without an answer stays with its channel, and no second one goes to the same destination meanwhile: when the
answer comes, the destination is stuck no more, and the message, which is held by then, is known to be out and is not
published again. Of such channels there are a bounded number; what is let go of is a copy, perhaps, one day.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Final

from delayer.broker.alone import Probe
from delayer.broker.doubts import BRIEFLY, LONG, Destination, Doubt, Doubts, Known, destination
from delayer.broker.relay import Relay
from delayer.core.errors import BrokerLost
from delayer.core.message import CONFIRMED, Confirmed, Nacked, Outcome, Outgoing, Unanswered
from delayer.wire.confirms import TOKEN_HEADER
from delayer.wire.connection import Connection
from delayer.wire.properties import encode_headers, entry, long_string

PATIENCE: Final = 3.0
"""Seconds that a suspected destination has for its answer; its first message had a publish's whole time before."""
BRIEF: Final = 1.0
"""Seconds for one that is stuck, or beside such ones: whoever is in the same batch waits as long."""
SLACK: Final = 0.05
"""Seconds that a timer may be early, and more."""
SPARE: Final = 0.2
"""Seconds before a batch's deadline in which nobody is waited for any more."""
AT_ONCE: Final = 32
"""Destinations that are tried side by side for one batch."""
LINGERING: Final = 64
"""Messages without an answer that are listened for; the oldest is let go of for another."""
LINGERING_BYTES: Final = 32 << 20
"""Of their bodies, but for one."""
LINGER: Final = 600.0
"""Seconds that one is listened for."""
LONELY: Final = 6.0
"""Seconds after which a destination is stuck where the broker answers, and nothing else was published that could have
been confirmed. If that is wrong, its messages are held for the first pause, and known to be out when they are tried
again."""
CONNECTING: Final = 2.0
"""Seconds for the connection to be there, or an answer to a message that nobody can route."""


class Trial:
    """One message on its way, alone."""

    def __init__(self, message: Outgoing, connection: Connection) -> None:
        self.message = message
        self.connection = connection
        self.began = time.monotonic()
        self.missed = False
        """Whether a batch has gone on without its answer."""
        self.task = asyncio.create_task(self._publish(), name="a destination that may not answer")

    async def _publish(self) -> Outcome | None:
        """None: it is not known, and will not be."""
        probe = Probe(self.connection, asyncio.get_running_loop().time() + LINGER)
        try:
            return (await probe.publish(self.message))[0]
        except (BrokerLost, TimeoutError):
            return None
        finally:
            probe.close()


class Aside:
    """One for all publishers of a process. ``relay`` is its own, and started with the first doubt."""

    def __init__(self, relay: Relay, *, timeout: float) -> None:
        """``timeout``: seconds that a publish waits for its answers, for the words of a reason."""
        self._relay = relay
        self._timeout = timeout
        self._doubts = Doubts()
        self._brief, self._late = Known(BRIEFLY), Known(LONG)
        self._late_of: Connection | None = None
        self._trials: dict[Destination, Trial] = {}  # the oldest first
        self._witness = -math.inf
        self._renewing: asyncio.Task[None] | None = None

    @property
    def alert(self) -> bool:
        """Whether there is anything to ask here: hardly ever."""
        now = time.monotonic()
        return self._doubts.any(now) or self._brief.any(now) or self._late.any(now)

    async def close(self) -> None:
        """End what is listened for, and the connection. Safe to call twice."""
        tasks = [trial.task for trial in self._trials.values()]
        if self._renewing is not None:
            tasks.append(self._renewing)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._relay.close()

    # What publishers tell.

    def confirmed(self, began: float) -> None:
        """A publish that began then (monotonic seconds) was confirmed."""
        self._witness = max(self._witness, began)

    def given_up(self, batch: Sequence[Outgoing], outcomes: Sequence[Outcome | None]) -> None:
        """A batch ends with so much known, and may come again as a whole."""
        now = time.monotonic()
        for message, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, Confirmed):
                self._brief.note(message, outcome, now)

    def suspect(self, messages: Iterable[Outgoing]) -> None:
        """These were not answered in time."""
        now = time.monotonic()
        for one in {destination(message) for message in messages}:
            self._doubts.suspect(one, now)
        self._relay.start()

    def not_heard(self, relay: Relay, connection: Connection) -> None:
        """Not even a channel could be opened there. If the broker answers here, it does not read that connection, which
        is then replaced."""
        if self._renewing is None or self._renewing.done():
            self._relay.start()
            self._renewing = asyncio.create_task(self._renew(relay, connection), name="renew a connection")

    async def _renew(self, relay: Relay, connection: Connection) -> None:
        if not connection.blocked and await self._answers() and relay.current is connection:
            connection.drop("the broker does not read this connection, and answers on another")

    # What publishers ask.

    def known(self, batch: Sequence[Outgoing]) -> dict[int, Outcome]:
        """Outcomes, by index, of messages that were published before and answered."""
        if self._late_of is not self._relay.current:
            self._late.forget()  # a broker that was set back to what it was lost its connections
        found = {}
        for index, message in enumerate(batch):
            outcome = self._brief.of(message) or self._late.of(message)
            if outcome is not None:
                found[index] = outcome
        return found

    def doubtful(self, batch: Sequence[Outgoing], known: Mapping[int, Outcome]) -> dict[Destination, list[int]]:
        """The indexes of the others that are not to go with the rest, by destination."""
        found: dict[Destination, list[int]] = {}
        if self._doubts.any(time.monotonic()):
            meant = self._doubts.meant()
            for index, message in enumerate(batch):
                if index in known or not meant(message):
                    continue
                if self._doubts.of(one := destination(message)) is not None:
                    found.setdefault(one, []).append(index)
        return found

    async def ask(
        self,
        batch: Sequence[Outgoing],
        doubtful: Mapping[Destination, Sequence[int]],
        seconds: float,
        outcomes: dict[int, Outcome],
    ) -> dict[Destination, Sequence[int]]:
        """Publish one message to each of these destinations, within ``seconds``, and enter what became of it into
        ``outcomes``. Returns the destinations that did not answer: the messages of the others may go with the rest."""
        until = time.monotonic() + seconds - SPARE
        try:
            connection = self._relay.current or await self._relay.connection(min(CONNECTING, seconds))
        except BrokerLost:
            return dict(doubtful)
        silent = dict(doubtful)
        waiting = deque(doubtful)
        for one in islice(waiting, AT_ONCE):
            # At once: the others of the batch begin after these, and so can be what was confirmed meanwhile.
            self._trial(one, batch[doubtful[one][0]], connection)

        async def work() -> None:
            while waiting and time.monotonic() < until:
                one = waiting.popleft()
                trial = self._trial(one, batch[doubtful[one][0]], connection)
                outcome = await self._answer(one, trial, until)
                if outcome is not None:
                    del silent[one]
                    same = (index for index in doubtful[one] if batch[index] == trial.message)
                    if (index := next(same, None)) is not None:
                        outcomes[index] = outcome

        async with asyncio.TaskGroup() as group:
            for _ in range(min(AT_ONCE, len(doubtful))):
                group.create_task(work())
        return silent

    async def verdicts(
        self, batch: Sequence[Outgoing], silent: Mapping[Destination, Sequence[int]]
    ) -> dict[int, Outcome]:
        """Outcomes, by index, of what is to be held because its destination is stuck; what is missing is in doubt."""
        found: dict[int, Outcome] = {}
        trials = {one: self._trials[one] for one in silent if one in self._trials}
        now = time.monotonic()
        lonely = any(self._is_lonely(one, trial, now) for one, trial in trials.items())
        answers = lonely and await self._answers()
        for one, trial in trials.items():
            if self._is_stuck(one, trial, now, answers):
                seconds = BRIEF if self._doubts.of(one) is Doubt.BESIDE else self._timeout
                self._doubts.stuck(one, now)
                found |= {index: Unanswered(seconds, one.exchange, one.routing_key) for index in silent[one]}
        return found

    def _trial(self, one: Destination, message: Outgoing, connection: Connection) -> Trial:
        """The one that is under way, or another."""
        if one in self._trials:
            return self._trials[one]
        size = len(message.body)
        while self._trials and (len(self._trials) >= LINGERING or self._bytes + size > LINGERING_BYTES):
            self._trials.pop(next(iter(self._trials))).task.cancel()
        trial = self._trials[one] = Trial(message, connection)
        trial.task.add_done_callback(partial(self._over, one, trial))
        return trial

    def _over(self, one: Destination, trial: Trial, task: asyncio.Task[Outcome | None]) -> None:
        if self._trials.get(one) is trial:
            del self._trials[one]
        outcome = None if task.cancelled() or task.exception() is not None else task.result()
        if outcome is None:
            return
        if outcome is CONFIRMED:
            self.confirmed(trial.began)
        if not (trial.missed and isinstance(outcome, Nacked)):
            self._doubts.answered(one, time.monotonic())
        if trial.missed and outcome is CONFIRMED:
            if self._late_of is not trial.connection:
                self._late.forget()
            self._late_of = trial.connection
            self._late.note(trial.message, outcome, time.monotonic())

    @property
    def _bytes(self) -> int:
        return sum(len(trial.message.body) for trial in self._trials.values())

    async def _answer(self, one: Destination, trial: Trial, until: float) -> Outcome | None:
        """Raises what is wrong with the message, as every publish does."""
        patient = min(until, trial.began + self._patience(one)) - time.monotonic()
        try:
            await asyncio.wait({trial.task}, timeout=max(0.0, patient))
        finally:
            trial.missed = trial.missed or not trial.task.done()
        return trial.task.result() if trial.task.done() and not trial.task.cancelled() else None

    def _patience(self, one: Destination) -> float:
        return PATIENCE if self._doubts.of(one) is Doubt.SUSPECTED else BRIEF

    def _is_stuck(self, one: Destination, trial: Trial, now: float, answers: bool) -> bool:
        if trial.task.done() or now - trial.began < self._patience(one) - SLACK:
            return False
        return self._witness >= trial.began or (answers and self._is_lonely(one, trial, now))

    def _is_lonely(self, one: Destination, trial: Trial, now: float) -> bool:
        """Whether there was time enough, and nothing that could have been confirmed instead."""
        enough = LONELY if self._doubts.of(one) is Doubt.SUSPECTED else BRIEF - SLACK
        return now - trial.began >= enough and trial.began > self._witness

    async def _answers(self) -> bool:
        """Whether the broker answers anything: to a message that no queue can be meant by, on this connection."""
        token = uuid.uuid4().hex.encode()
        message = Outgoing(
            b"", b"delayer.nobody." + token, encode_headers(entry(TOKEN_HEADER, long_string(token))), b"", token
        )
        try:
            async with asyncio.timeout(CONNECTING):
                connection = await self._relay.connection(CONNECTING)
                probe = Probe(connection, asyncio.get_running_loop().time() + CONNECTING)
                try:
                    await probe.publish(message)
                finally:
                    probe.close()
        except (BrokerLost, TimeoutError):
            return False
        return True


def others(
    batch: Sequence[Outgoing], apart: Mapping[Destination, Sequence[int]], known: Mapping[int, Outcome]
) -> list[int]:
    """The indexes of all but these."""
    held_back = {index for indexes in apart.values() for index in indexes}
    return [index for index in range(len(batch)) if index not in held_back and index not in known]
