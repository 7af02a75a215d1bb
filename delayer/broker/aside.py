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
published again. Of such channels there are a bounded number; what is let go of is a copy, perhaps, one day. Where all
of them are taken, what is known to be stuck is held without being tried, but for some of these now and then.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from delayer.broker.alone import Probe
from delayer.broker.apart import ends_connections
from delayer.broker.doubts import BRIEFLY, LONG, Destination, Doubt, Doubts, Known, destination
from delayer.broker.relay import Relay
from delayer.broker.trials import Places, Silence, Trial, Trials
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
AT_ONCE: Final = 128
"""Destinations that are tried side by side for one batch: a channel each, where there are so many (trials.py)."""
TURN: Final = 10.0
"""Seconds after which some that are stuck, and that nobody listens for, have their turn: a second of a batch's time."""
TURNS: Final = 32
"""How many of them at a time."""
LONELY: Final = 6.0
"""Seconds after which a destination is stuck where the broker answers, and nothing else was published that could have
been confirmed. If that is wrong, its messages are held for the first pause, and known to be out when they are tried
again."""
CONNECTING: Final = 2.0
"""Seconds for the connection to be there, or an answer to a message that nobody can route."""
SHUT_OUT: Final = 30.0
"""Seconds that nobody waits for the connection after it was not there in time."""


class Aside:
    """One for all publishers of a process. ``relay`` is its own, and started with the first doubt."""

    def __init__(self, relay: Relay, *, timeout: float) -> None:
        """``timeout``: seconds that a publish waits for its answers, for the words of a reason."""
        self._relay = relay
        self._timeout = timeout
        self._doubts = Doubts()
        self._brief, self._late = Known(BRIEFLY), Known(LONG)
        self._late_of: Connection | None = None
        self._trials = Trials(self._over)
        self._turn = self._shut_out = -math.inf
        self._witness = -math.inf
        self._renewing: asyncio.Task[None] | None = None

    @property
    def alert(self) -> bool:
        """Whether there is anything to ask here: hardly ever."""
        now = time.monotonic()
        return self._doubts.any(now) or self._brief.any(now) or self._late.any(now)

    async def close(self) -> None:
        """End what is listened for, and the connection. Safe to call twice."""
        tasks: list[asyncio.Task[Any]] = [*self._trials.tasks()]
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
            if isinstance(outcome, Confirmed) or ends_connections(outcome):
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
        if self._late_of is not None and self._late_of.closed.done():
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
        spare: Connection | None = None,
    ) -> dict[Destination, Sequence[int]]:
        """Publish one message to each of these destinations, within ``seconds``, and enter what became of it into
        ``outcomes``. Returns the destinations that did not answer: the messages of the others may go with the rest.

        ``spare``: the connection that is used where there is no other.
        """
        until = time.monotonic() + seconds - SPARE
        silent = dict(doubtful)
        connection = await self._connection(min(CONNECTING, seconds), spare) if doubtful else None
        if connection is None:
            return silent
        places = self._trials.places(connection, shared=connection is spare)
        waiting = deque(self._in_turn(doubtful, places))

        def begin(one: Destination) -> Trial:
            return self._trials.begin(one, batch[doubtful[one][0]], places)

        async def work() -> None:
            while waiting and time.monotonic() < until:
                trial = begin(one := waiting.popleft())
                outcome = await self._answer(one, trial, until)
                if outcome is not None:
                    del silent[one]
                    same = (index for index in doubtful[one] if batch[index] == trial.message)
                    if (index := next(same, None)) is not None:
                        outcomes[index] = outcome

        # At once: the others of the batch begin after these, and so can be what was confirmed meanwhile.
        begun = [(one, begin(one)) for one in islice(waiting, AT_ONCE)]
        try:
            async with asyncio.TaskGroup() as group:
                for _ in begun:
                    group.create_task(work())
        finally:
            for one, trial in begun:
                self._trials.miss(one, trial)
        return silent

    async def _connection(self, seconds: float, spare: Connection | None) -> Connection | None:
        """Where nobody is let in besides (so many connections, and no more), that of the others has to do."""
        if self._relay.current is None and time.monotonic() - self._shut_out < SHUT_OUT:
            return spare
        try:
            return self._relay.current or await self._relay.connection(seconds)
        except BrokerLost:
            self._shut_out = time.monotonic()
            return spare

    def _in_turn(self, doubtful: Mapping[Destination, Sequence[int]], places: Places) -> list[Destination]:
        """Those that are tried now. Of what is known to be stuck, and not listened for, as many as there are places
        for; or, now and then, those that were not tried for the longest time, in the place of others."""
        idle = [one for one in doubtful if one not in self._trials and self._doubts.of(one) is Doubt.STUCK]
        free, now = self._trials.room(places), time.monotonic()
        if len(idle) > free and now - self._turn >= TURN:
            self._turn = now
            free = max(free, TURNS)
        left_out = set(sorted(idle, key=self._trials.tried)[free:])
        return [one for one in doubtful if one not in left_out]

    async def verdicts(
        self, batch: Sequence[Outgoing], silent: Mapping[Destination, Sequence[int]]
    ) -> dict[int, Outcome]:
        """Outcomes, by index, of what is to be held because its destination is stuck; what is missing is in doubt."""
        found: dict[int, Outcome] = {}
        left = dict(silent)

        def judge(answers: bool) -> None:
            for one, indexes in list(left.items()):
                silence = self._trials.silence(one)
                if not self._is_stuck(one, silence, answers):
                    continue
                seconds = BRIEF if self._doubts.of(one) is Doubt.BESIDE else self._timeout
                if one in self._trials or self._doubts.of(one) is not Doubt.STUCK:
                    self._doubts.stuck(one, time.monotonic())
                found.update((index, Unanswered(seconds, one.exchange, one.routing_key)) for index in indexes)
                del left[one]

        judge(False)
        if any(self._is_lonely(one, self._trials.silence(one)) for one in left) and await self._answers():
            judge(True)
        return found

    def _over(self, one: Destination, trial: Trial, outcome: Outcome | None) -> None:
        if trial.ended:
            # Who ended it is found out where each goes alone; who does not answer, here again.
            self._doubts.unsuspect(one, time.monotonic())
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

    async def _answer(self, one: Destination, trial: Trial, until: float) -> Outcome | None:
        """Raises what is wrong with the message, as every publish does."""
        try:
            await trial.is_out(until)
            patient = min(until, trial.began + self._patience(one)) - time.monotonic()
            await asyncio.wait({trial.task}, timeout=max(0.0, patient))
        finally:
            self._trials.miss(one, trial)
        return trial.task.result() if trial.task.done() and not trial.task.cancelled() else None

    def _patience(self, one: Destination) -> float:
        return PATIENCE if self._doubts.of(one) is Doubt.SUSPECTED else BRIEF

    def _is_stuck(self, one: Destination, silence: Silence | None, answers: bool) -> bool:
        """``answers``: whether the broker does. What was found stuck is so until it answers, tried again or not."""
        if self._doubts.of(one) is Doubt.STUCK:
            return answers or self._witness > time.monotonic() - self._timeout
        if silence is None or silence.until - silence.began < self._patience(one) - SLACK:
            return False
        return self._witness >= silence.began or (answers and self._is_lonely(one, silence))

    def _is_lonely(self, one: Destination, silence: Silence | None) -> bool:
        """Whether there was time enough, and nothing that could have been confirmed instead."""
        if self._doubts.of(one) is Doubt.STUCK:
            return True
        if silence is None:
            return False
        enough = LONELY if self._doubts.of(one) is Doubt.SUSPECTED else BRIEF - SLACK
        return silence.until - silence.began >= enough and silence.began > self._witness

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
