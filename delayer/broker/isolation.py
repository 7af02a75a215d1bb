"""Isolation of failed publishes: finds the message or the destination at fault, on a second connection.

A batch on the shared channel loses some outcomes in two cases. A queue does not confirm, or the broker closes the
channel or the connection for one message. These messages come here, and so do messages that may end a connection.
Isolation publishes in rounds:

- A probing round publishes one message of each destination, each on a channel of its own. If a destination stays silent
  while the broker answers, its circuit breaker opens and its messages are held.
- Every other round publishes a portion on one channel. A portion grows after a success. It shrinks to one message after
  the broker closed the channel or the connection, until that one message is found.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import structlog

from delayer.amqp.channel import TOKEN_HEADER, Channel, seconds_until_due
from delayer.amqp.connection import Connection
from delayer.amqp.errors import ChannelClosed, ConfirmTimeout, ConnectionLost, ReplyCode
from delayer.amqp.properties import encode_headers, entry, long_string
from delayer.broker.circuit_breaker import CircuitBreaker, Destination, destination
from delayer.broker.connection import ReconnectingConnection
from delayer.core.errors import BrokerLost
from delayer.core.hold import Outcome, closed_channel, closed_connection, unanswered
from delayer.core.message import Outgoing, Schedule
from delayer.retry import raise_first

log = structlog.get_logger(__name__)

PROBE_SECONDS: Final = 2.0
"""The timeout of a destination's probe. The broker itself has three quarters of it. If every probed destination is
suspect, the timeout is half of this, because the whole batch waits."""
CONNECT_SECONDS: Final = 2.0
"""For the second connection. Also the longest wait of a batch for messages that may end a connection."""
OPEN_SECONDS: Final = 5.0
"""To open a channel there. Then the connection is replaced, so this is longer than a busy broker needs."""
ISOLATE_SECONDS: Final = 10.0
"""After a message ended a connection, every batch is published here for this long."""
MARGIN_SECONDS: Final = 0.1
"""Probes end this long before a batch's deadline, because other messages may wait behind them."""
SMALL_PORTION: Final = 8
"""Messages of a portion, if one of them may close a channel or a connection."""
MAX_PROBES: Final = 512
"""Parallel probes, if the connection allows as many channels."""
MAX_EXCHANGES: Final = 10_000
"""Exchanges that are remembered."""
NOT_TRIED: Final = closed_connection(541, "INTERNAL_ERROR at an earlier attempt; there is no isolation connection now")
_Loss = ChannelClosed | ConnectionLost


@dataclass(slots=True)
class Pending:
    """A batch whose outcomes become known one after the other."""

    batch: Sequence[Outgoing]
    deadline: float
    """When the caller stops waiting, in seconds of the loop."""
    schedule: Schedule | None = None
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    in_doubt: set[int] = field(default_factory=set)
    """Messages not to publish again: the broker answered nothing at all, or the isolation was interrupted."""

    def publishable(self, indexes: Sequence[int]) -> list[int]:
        """Return the indexes of messages that can be published again."""
        return [index for index in indexes if index not in self.outcomes and index not in self.in_doubt]


@dataclass(slots=True)
class _Case:
    """The isolated messages of one batch."""

    pending: Pending
    indexes: Sequence[int]
    until: float
    own: bool
    """Whether only a connection of our own may carry these messages, because they may end it."""
    alone: bool
    """Whether each round has the connection for itself."""
    written: set[int] = field(default_factory=set)
    probed: set[Destination] = field(default_factory=set)


class Isolation:
    """One isolation for all publishers of a process. ``reconnecting`` is theirs, and opens the second connection."""

    def __init__(
        self, reconnecting: ReconnectingConnection, *, timeout: float, probe_seconds: float = PROBE_SECONDS
    ) -> None:
        """``timeout``: seconds that a publish waits, for the text of a hold. A probe waits ``probe_seconds``."""
        self.breaker = CircuitBreaker()
        self.exchanges: set[bytes] = set()
        """Exchanges that accepted a publish. A missing exchange closes the channel, which leaves others in doubt."""
        self.isolating_until = -math.inf
        """Until this time of the loop every batch is isolated: a message ended a connection, and such messages often
        come together."""
        self._reconnecting = reconnecting
        self._timeout = timeout
        self._probe_seconds = probe_seconds
        self._connection: Connection | None = None
        self._idle_channels: list[Channel] = []
        """Channels of the second connection that earlier rounds left open: another one costs two round trips."""
        self._turns = asyncio.Lock()
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()
        self._refused = -math.inf

    def close(self) -> None:
        """End the second connection. Safe to call twice."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abandon()

    async def publish(
        self, pending: Pending, indexes: Sequence[int], *, own: bool = False, alone: bool = False
    ) -> None:
        """Publish these messages once all are due. A message without an outcome afterwards is in doubt.

        ``alone``: one of these messages ended a connection. ``own``: each of them may end one; then all get an outcome
        within two seconds, because the rest of the batch waits.
        """
        indexes = sorted(indexes)  # Doubtful messages come grouped by destination, and the last one decides the wait.
        while indexes and (left := seconds_until_due(pending.schedule, indexes[-1])):  # noqa: ASYNC110 - a clock
            await asyncio.sleep(left)
        until = min(pending.deadline, _now() + CONNECT_SECONDS if own else math.inf)
        case = _Case(pending, indexes, until, own, alone or own or self.isolating_until > _now())
        try:
            async with asyncio.timeout_at(until):
                await self._settle(case)
        except (BrokerLost, TimeoutError) as lost:
            log.warning("isolation interrupted", messages=len(indexes), reason=str(lost) or "no answer in time")
            # The daemon publishes these again only when it reads or claims them again.
            pending.in_doubt.update(case.written - pending.outcomes.keys())
        for index in indexes if own else ():
            one = pending.batch[index]
            silent = unanswered(self._timeout, one.exchange, one.routing_key)
            pending.outcomes.setdefault(index, silent if index in case.written else NOT_TRIED)

    async def _settle(self, case: _Case) -> None:
        """Publish in rounds. Raises BrokerLost.

        The broker confirms nothing before it closes, so the messages before the one at fault are published twice.
        """
        batch = case.pending.batch
        probing, size = not case.alone, 1 if case.own else SMALL_PORTION
        while todo := case.pending.publishable(case.indexes):
            some: list[int] = []
            async with self._using(case) as connection:
                groups = self.breaker.groups(batch, todo) if probing else {}
                fresh = sorted(groups.keys() - case.probed, key=lambda one: (-len(groups[one]), groups[one][0]))
                # Publish the rest of answered groups before the next probes.
                ready = sorted(index for one in groups.keys() & case.probed for index in groups[one]) or todo
                if fresh and ready is todo:
                    at_once = max(1, min(MAX_PROBES, connection.free_channels // 2))
                    lost = await self._probe(case, connection, {one: groups[one] for one in fresh[:at_once]})
                else:
                    probing = bool(fresh)
                    # Distinct tokens, because a return names only the token.
                    some = list({batch[index].token: index for index in reversed(ready[:size])}.values())[::-1]
                    lost = await self._published(case, connection, some, min(self._probe_seconds, case.until - _now()))
            if isinstance(lost, ConnectionLost) and not (case.alone and len(some) == 1):
                probing, size = False, 1 if case.alone else SMALL_PORTION
                case.alone = True
            elif not some:
                size = SMALL_PORTION
            elif isinstance(lost, ConfirmTimeout):
                probing = True
                case.probed.clear()
            elif lost is None:
                size = min(SMALL_PORTION if case.alone else len(batch), 2 * size)
            elif len(some) == 1:
                self._enter_objection(case, some[0], lost)
            else:
                size = 1

    async def _probe(self, case: _Case, connection: Connection, groups: dict[Destination, list[int]]) -> _Loss | None:
        """Publish the first message of each group on a channel of its own, and hold the groups of silent destinations.
        Returns the connection's loss, or None. A silence counts only if the broker answered early in this round."""
        patience = self._probe_seconds / 2 if all(self.breaker.suspects(one) for one in groups) else self._probe_seconds
        seconds = min(patience, case.until - MARGIN_SECONDS - _now())
        case.probed.update(groups)
        before = {one: self.breaker.table.get(one) for one in groups}
        try:
            async with asyncio.TaskGroup() as probes:  # No probe outlives its round.
                answering = probes.create_task(self._answers(connection, seconds * 0.75))  # Before the others.
                sent = [
                    probes.create_task(self._published(case, connection, group[:1], seconds))
                    for group in groups.values()
                ]
        except BaseExceptionGroup as failed:
            raise_first(failed.exceptions)
        proven = answering.result() and not self._reconnecting.blocked
        silent: list[Destination] = []
        for (one, group), lost in zip(groups.items(), [probe.result() for probe in sent], strict=True):
            if isinstance(lost, ConnectionLost):
                return lost
            if lost is None:
                self.breaker.close(one)
                if len(self.exchanges) >= MAX_EXCHANGES:
                    self.exchanges.clear()
                self.exchanges.add(one.exchange)
            elif not isinstance(lost, ConfirmTimeout):
                self._enter_objection(case, group[0], lost)
            else:
                silent.append(one)
                if not proven:
                    case.pending.in_doubt.update(group)
                    continue
                outcome = unanswered(self._timeout, one.exchange, one.routing_key or b"")
                case.pending.outcomes.update(dict.fromkeys(case.pending.publishable(group), outcome))
                if self.breaker.table.get(one) is before[one]:  # Otherwise a probe at the same time opened it.
                    self.breaker.open(one, outcome)
        if silent:
            first = {"exchange": silent[0].exchange, "routing_key": silent[0].routing_key or b""}
            unproven = 0 if proven else len(silent)
            log.warning("destination silent", destinations=len(silent), unproven=unproven, **first)
        return None

    async def _answers(self, connection: Connection, seconds: float) -> bool:
        """Whether the broker answers at all, within ``seconds``: publish a message without a queue."""
        token = b"delayer.nobody." + uuid.uuid4().hex.encode()
        message = Outgoing(b"", token, encode_headers(entry(TOKEN_HEADER, long_string(token))), b"", token)
        try:
            async with asyncio.timeout(seconds):
                await self._on_channel(connection, [message], seconds)
        except (BrokerLost, TimeoutError):
            return False
        return True

    async def _published(
        self, case: _Case, connection: Connection, some: Sequence[int], seconds: float
    ) -> _Loss | None:
        """Publish these on one channel, and enter the known outcomes. Returns the reason if others are missing. Raises
        BrokerLost if no message is the reason."""
        answers: Sequence[Outcome | None]
        lost: _Loss | None = None
        case.written.update(some)
        try:
            answers = await self._on_channel(connection, [case.pending.batch[index] for index in some], seconds)
        except (ChannelClosed, ConnectionLost) as error:
            lost, answers = error, error.outcomes
        answered = zip(some, answers, strict=bool(answers))
        case.pending.outcomes.update((index, outcome) for index, outcome in answered if outcome is not None)
        if isinstance(lost, ConnectionLost) and not lost.objects:
            raise lost
        return lost

    async def _on_channel(self, connection: Connection, messages: Sequence[Outgoing], seconds: float) -> list[Outcome]:
        """Publish on a channel that no other publish uses. Raises BrokerLost."""
        ours = connection is self._connection
        self._idle_channels = [one for one in self._idle_channels if not one.closed.done()]
        if ours and self._idle_channels:
            channel = self._idle_channels.pop()
        else:
            channel = await self._reconnecting.confirming_channel(connection, OPEN_SECONDS if ours else None)
        try:
            outcomes = await channel.publish(messages, timeout=seconds)
            if ours and len(self._idle_channels) < SMALL_PORTION:
                self._idle_channels.append(channel)
            return outcomes
        finally:
            if channel not in self._idle_channels:
                channel.abandon()

    def _enter_objection(self, case: _Case, index: int, lost: _Loss) -> None:
        """Enter the outcome of the one message for which the broker closed something. A missing exchange concerns all
        messages for it, a missing permission those with the same key."""
        if isinstance(lost, ConnectionLost):
            if not case.own:  # Known messages end the second connection only, at each retry.
                self.isolating_until = _now() + ISOLATE_SECONDS
            case.pending.outcomes[index] = closed_connection(lost.code, lost.text)
            return
        batch = case.pending.batch
        one = destination(batch[index])
        everywhere = Destination(one.exchange, None)
        outcome = closed_channel(lost.code, lost.text)
        if lost.code == ReplyCode.NOT_FOUND:
            self.exchanges.discard(one.exchange)
            return self._hold(case, everywhere, outcome, [i for i in case.indexes if batch[i].exchange == one.exchange])
        self.breaker.close(everywhere)  # The exchange exists by now.
        if lost.code == ReplyCode.ACCESS_REFUSED:
            same_key = [i for i in case.indexes if batch[i][:2] == one[:2]]
            return self._hold(case, one, outcome, [i for i in same_key if destination(batch[i]) == one])
        self.breaker.close(one)
        case.pending.outcomes[index] = outcome

    def _hold(self, case: _Case, one: Destination, outcome: Outcome, indexes: Sequence[int]) -> None:
        """Open the breaker, unless another probe of this round did. Enter the outcome for its messages."""
        if held := case.pending.publishable(indexes):
            self.breaker.open(one, outcome)
            case.pending.outcomes.update(dict.fromkeys(held, outcome))

    # The second connection.

    @asynccontextmanager
    async def _using(self, case: _Case) -> AsyncIterator[Connection]:
        """The second connection for a round, beside other cases or alone. Raises BrokerLost."""
        async with AsyncExitStack() as turn:
            await turn.enter_async_context(self._turns)
            if case.alone:
                await self._unused.wait()
            connection = await self._connected(own=case.own)
            self._users += 1
            self._unused.clear()
            if not case.alone:
                await turn.aclose()
            try:
                yield connection
            finally:
                self._users -= 1
                if not self._users:
                    self._unused.set()

    async def _connected(self, *, own: bool) -> Connection:
        """The second connection, opened if there is none. If the broker refuses a second one, the publishers'
        connection serves, unless ``own``."""
        connection = self._connection
        full = connection is not None and connection.free_channels <= connection.limits.channel_max // 2
        if connection is not None and full and not self._users:
            connection.abandon()  # The broker then ends its channels that wait for silent queues.
        if connection is not None and not connection.closed.done():
            return connection
        if own or self._refused + 30.0 < _now():
            try:
                self._connection = await self._reconnecting.another(CONNECT_SECONDS)
            except BrokerLost as lost:
                self._refused = _now()
                log.warning("no isolation connection", reason=str(lost))
                if own:
                    raise
            else:
                return self._connection
        return await self._reconnecting.connection(CONNECT_SECONDS)


def _now() -> float:
    return asyncio.get_running_loop().time()
