"""Isolation of failed publishes: finds the message or the destination at fault, on a second connection.

A batch on the shared channel loses some outcomes in two cases. A queue does not confirm, or the broker closes the
channel or the connection for one message. These messages come here, and so do messages that may end a connection.

- Unanswered: one message of each destination is published on a channel of its own. If one stays silent while the broker
  confirms others, its circuit breaker opens and its messages are held.
- Closed: smaller and smaller portions are published until one message alone closes the channel or the connection.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import structlog

from delayer.amqp.channel import TOKEN_HEADER, Channel
from delayer.amqp.connection import Connection
from delayer.amqp.errors import ACCESS_REFUSED, NOT_FOUND, ChannelClosed, ConfirmTimeout, ConnectionLost
from delayer.amqp.properties import encode_headers, entry, long_string
from delayer.broker.circuit_breaker import CircuitBreaker, Destination, destination
from delayer.broker.connection import ReconnectingConnection
from delayer.core.errors import BrokerLost
from delayer.core.message import (
    CONFIRMED,
    NACKED,
    ClosedChannel,
    ClosedConnection,
    Outcome,
    Outgoing,
    Unanswered,
)

log = structlog.get_logger(__name__)

PATIENCE: Final = 2.0
"""Seconds that a destination has to answer its probe."""
BRIEF: Final = 1.0
"""The same for doubtful destinations beside open breakers, because the whole batch waits."""
CONNECTING: Final = 2.0
"""Seconds for the second connection, and for an answer of the broker itself."""
ISOLATING: Final = 10.0
"""After a message ended a connection, every batch is published here for so many seconds."""
SPARE: Final = 0.1
"""Probes end so many seconds before a batch's deadline."""
FEW: Final = 8
"""Messages of a portion, if one of them may close a channel or a connection."""
AT_ONCE: Final = 512
"""Parallel probes, if the connection allows as many channels."""
NOT_TRIED: Final = ClosedConnection(541, "INTERNAL_ERROR at an earlier attempt; there is no isolation connection now")


class _Silent(NamedTuple):
    """A destination whose probe got no answer; ``group``: all its messages."""

    where: Destination
    group: list[int]
    began: float


@dataclass(slots=True)
class _Case:
    """The isolated messages of one batch. ``outcomes`` fills as they become known."""

    batch: Sequence[Outgoing]
    outcomes: dict[int, Outcome]
    deadline: float
    own: bool = False
    """Whether only a connection of our own may carry these messages, because they may end it."""
    alone: bool = False
    """Whether each step has the connection for itself."""
    began: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    written: set[int] = field(default_factory=set)
    in_doubt: set[int] = field(default_factory=set)
    """Published messages without an answer, while nothing else was confirmed."""
    silent: list[_Silent] = field(default_factory=list)
    """The destinations of the messages in doubt."""

    def unknown(self, indexes: Sequence[int]) -> list[int]:
        return [index for index in indexes if index not in self.outcomes and index not in self.in_doubt]

    def portion(self, todo: Sequence[int], size: int) -> list[int]:
        """The first ``size`` messages with distinct tokens, because a return names only the token."""
        return list({self.batch[index].token: index for index in reversed(todo[:size])}.values())[::-1]


class Isolation:
    """One isolation for all publishers of a process. ``reconnecting`` is theirs, and opens the second connection."""

    def __init__(
        self, reconnecting: ReconnectingConnection, *, timeout: float, breaker: CircuitBreaker | None = None
    ) -> None:
        """``timeout``: seconds that a publish waits for its confirms. Only the text of a hold uses it."""
        self.breaker = breaker or CircuitBreaker()
        self.exchanges: set[bytes] = set()
        """Exchanges that accepted a publish. A missing exchange closes the channel, which leaves others in doubt."""
        self._reconnecting = reconnecting
        self._timeout = timeout
        self._connection: Connection | None = None
        self._spare: Channel | None = None
        """A channel of the second connection that the last portion left open: another one costs two round trips."""
        self._connecting = asyncio.Lock()
        self._bisecting = asyncio.Lock()
        self._unshared = asyncio.Event()
        self._unshared.set()
        self._sharing = 0
        self._users = 0
        self._idle: asyncio.TimerHandle | None = None
        self.isolating_until = -math.inf
        """Until this time of the loop every batch is isolated: a message ended a connection less than WARY seconds ago.
        Such messages often come together."""
        self.last_confirm = -math.inf
        """The begin of the last confirmed publish, in seconds of the loop: the broker has answered since then."""
        self._refused = -math.inf

    def close(self) -> None:
        """End the second connection. Safe to call twice."""
        if self._idle is not None:
            self._idle.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abandon()

    async def replace(self, connection: Connection) -> None:
        """End the publishers' ``connection``, which opened no channel in time, if the broker answers on this one. A
        channel that waits for a queue may keep the broker from reading its connection."""
        if not self._reconnecting.blocked and await self._answers() and self._reconnecting.current is connection:
            connection.drop("the broker does not read this connection, and answers on another")

    # The publishers' requests. A message without an outcome afterwards is in doubt.

    async def publish_isolated(
        self, batch: Sequence[Outgoing], indexes: Sequence[int], outcomes: dict[int, Outcome], deadline: float
    ) -> None:
        """Publish messages that may end a connection: known ones, and direct replies. All of them get an outcome within
        two seconds, because the rest of their batch waits."""
        case = _Case(batch, outcomes, min(deadline, _now() + 2.0), own=True, alone=True)
        replies = [index for index in indexes if not batch[index].isolated]
        isolated = [index for index in indexes if batch[index].isolated]
        try:
            async with asyncio.timeout_at(case.deadline + SPARE):
                await self._settle(case, replies)
                await self._settle(case, isolated, size=1)
        except (BrokerLost, TimeoutError) as lost:
            log.warning("no isolation connection", messages=len(indexes), reason=str(lost) or "no answer in time")
        for index in replies:
            outcomes.setdefault(index, NACKED)  # The reader of the reply waits no longer either.
        for index in isolated:
            one = batch[index]
            silent = Unanswered(self._timeout, one.exchange, one.routing_key)
            outcomes.setdefault(index, silent if index in case.written else NOT_TRIED)

    async def probe(
        self, batch: Sequence[Outgoing], indexes: Sequence[int], outcomes: dict[int, Outcome], deadline: float
    ) -> None:
        """Publish one message to each destination, and then the other messages of destinations that answer."""
        case = _Case(batch, outcomes, deadline)
        await self._isolate(case, indexes, partial(self._settle, case, indexes, probing=True))

    async def try_exchange(
        self, batch: Sequence[Outgoing], indexes: Sequence[int], outcomes: dict[int, Outcome], deadline: float
    ) -> None:
        """Publish some of these messages for one exchange, alone, until the exchange is known to accept publishes."""
        case = _Case(batch, outcomes, deadline)

        async def work() -> None:
            while (todo := case.unknown(indexes)) and batch[todo[0]].exchange not in self.exchanges:
                if self._reconnecting.blocked:
                    raise BrokerLost("the broker blocks publishers (a resource alarm)")
                try:
                    async with self._turn(case):
                        await self._probe_destinations(
                            case, next(iter(self.breaker.groups(batch, todo).values())), indexes
                        )
                except ConnectionLost as lost:
                    if not (lost.objects and case.alone):
                        raise
                    self._enter_objection(case, todo[0], lost, indexes)

        await self._isolate(case, indexes, work)

    async def bisect(
        self, batch: Sequence[Outgoing], indexes: Sequence[int], outcomes: dict[int, Outcome], deadline: float
    ) -> None:
        """Publish these messages, and find each one for which the broker closes the channel or the connection."""
        case = _Case(batch, outcomes, deadline)
        await self._isolate(case, indexes, partial(self._settle, case, indexes))

    # The steps of a request.

    async def _isolate(self, case: _Case, indexes: Sequence[int], work: Callable[[], Awaitable[None]]) -> None:
        """Do ``work`` beside other callers. If the broker ends the connection for a message, repeat it: then the
        callers take turns, and each step has the connection for itself."""
        try:
            if self.isolating_until <= _now():
                try:
                    return await work()
                except ConnectionLost as lost:
                    if not lost.objects:
                        raise
            case.alone = True
            await work()
        except (BrokerLost, TimeoutError) as lost:
            log.warning("isolation interrupted", messages=len(indexes), reason=str(lost) or "no answer in time")
        for one in case.silent:
            self._hold_if_proven(case, one)  # Later confirms may prove the silence now.

    async def _settle(self, case: _Case, indexes: Sequence[int], *, size: int = FEW, probing: bool = False) -> None:
        """Publish these messages in portions. A portion grows after a success, and shrinks to one message after the
        broker closed the channel or connection. Unanswered messages get a probe for each destination. Raises
        BrokerLost, TimeoutError.

        The broker confirms nothing before it closes, so the messages before the one at fault are published twice.
        """
        most = FEW
        while todo := case.unknown(indexes):
            some = todo if probing else case.portion(todo, size)
            try:
                if probing:
                    async with self._turn(case):
                        await self._probe_destinations(case, some)
                    # A slow broker does not get all messages at once.
                    probing, size, most = False, 8 * FEW, len(indexes)
                else:
                    async with self._turn(case):
                        await self._together(case, some)
                    size = min(most, 2 * size)
            except ConfirmTimeout:
                probing = True
            except (ChannelClosed, ConnectionLost) as lost:
                if isinstance(lost, ConnectionLost) and not (lost.objects and case.alone):
                    raise
                if len(some) == 1:
                    self._enter_objection(case, some[0], lost, indexes)
                probing, size, most = False, 1, FEW

    @asynccontextmanager
    async def _turn(self, case: _Case) -> AsyncIterator[None]:
        """A step beside other callers, or alone on the connection."""
        if case.alone:
            async with self._bisecting:
                await self._unshared.wait()
                yield
            return
        async with self._bisecting:
            self._sharing += 1
            self._unshared.clear()
        try:
            yield
        finally:
            self._sharing -= 1
            if not self._sharing:
                self._unshared.set()

    async def _together(self, case: _Case, some: Sequence[int]) -> None:
        """Publish all of these on one channel. Enters the known outcomes, also when it raises."""
        began = _now()
        async with self._using(case.deadline, 1, own=case.own) as connection:
            spare, self._spare = self._spare, None
            usable = spare is not None and connection is self._connection and not spare.closed.done()
            channel = spare if spare is not None and usable else await connection.confirming_channel()
            case.written.update(some)
            answers: Sequence[Outcome | None] = ()
            try:
                messages = [case.batch[index] for index in some]
                answers = await channel.publish(messages, timeout=min(PATIENCE, left(case.deadline)))
                if connection is self._connection and self._spare is None:
                    self._spare = channel
            except (ChannelClosed, ConnectionLost) as lost:
                answers = lost.outcomes
                raise
            finally:
                if channel is not self._spare:
                    channel.abandon()
                known = zip(some, answers, strict=bool(answers))
                case.outcomes.update((index, outcome) for index, outcome in known if outcome is not None)
                if CONFIRMED in answers:
                    self.last_confirm = max(self.last_confirm, began)

    def _enter_objection(
        self, case: _Case, index: int, lost: ChannelClosed | ConnectionLost, indexes: Sequence[int]
    ) -> None:
        """Enter the outcome of the one message for which the broker closed something. A missing exchange concerns all
        messages for it, a missing permission those with the same key."""
        if isinstance(lost, ConnectionLost):
            if not case.own:  # Known messages end the second connection only, at each retry.
                self.isolating_until = _now() + ISOLATING
            case.outcomes[index] = ClosedConnection(lost.code, lost.text)
            return
        outcome = case.outcomes[index] = ClosedChannel(lost.code, lost.text)
        one = destination(case.batch[index])
        if lost.code == NOT_FOUND:
            self.exchanges.discard(one.exchange)
            one = Destination(one.exchange, None)
        elif lost.code != ACCESS_REFUSED:
            return self.breaker.close(one)
        self.breaker.open(one, outcome)
        for other in case.unknown(indexes):
            message = case.batch[other]
            if message.exchange == one.exchange and (one.routing_key is None or destination(message) == one):
                case.outcomes[other] = outcome

    async def _probe_destinations(self, case: _Case, indexes: Sequence[int], concerned: Sequence[int] = ()) -> None:
        """Publish the first message of each destination on a channel of its own. Hold all messages of silent ones."""
        waiting = deque(self.breaker.groups(case.batch, indexes).items())
        silent: list[_Silent] = []
        async with self._using(case.deadline, min(AT_ONCE, len(waiting))) as connection:
            at_once = max(1, min(AT_ONCE, len(waiting), connection.free_channels // 2))
            try:
                async with asyncio.TaskGroup() as workers:
                    for _ in range(at_once):
                        workers.create_task(self._worker(case, connection, waiting, silent, concerned or indexes))
            except* (BrokerLost, TimeoutError) as several:
                raise _first(several) from None
        case.in_doubt.update(index for _, group in waiting for index in case.unknown(group))
        await self._judge(case, silent)

    async def _worker(
        self,
        case: _Case,
        connection: Connection,
        waiting: deque[tuple[Destination, list[int]]],
        silent: list[_Silent],
        indexes: Sequence[int],
    ) -> None:
        """Probe one destination after the other. A silent one keeps its channel, and the next probe gets a new one."""
        channel: Channel | None = None
        until, began = case.deadline - SPARE, case.began
        try:
            while waiting and left(until):
                one, group = waiting.popleft()
                if not (group := case.unknown(group)):
                    continue
                channel = channel or await connection.confirming_channel()
                patience = min(left(until), BRIEF if self.breaker.suspects(one) else PATIENCE)
                case.written.add(group[0])
                try:
                    outcome = (await channel.publish([case.batch[group[0]]], timeout=patience))[0]
                except ConfirmTimeout:
                    channel = None
                    silent.append(_Silent(one, group, began))
                except ChannelClosed as lost:
                    channel = None
                    if one.routing_key is None and lost.code != NOT_FOUND:
                        self.breaker.close(one)  # The exchange exists by now.
                    self._enter_objection(case, group[0], lost, indexes)
                else:
                    case.outcomes[group[0]] = outcome
                    self._answered(one)
                    if outcome is CONFIRMED:
                        self.last_confirm = max(self.last_confirm, began)
                began = _now()
        finally:
            if channel is not None:
                channel.abandon()

    def _answered(self, one: Destination) -> None:
        self.breaker.close(one)
        if len(self.exchanges) >= 10_000:
            self.exchanges.clear()
        self.exchanges.add(one.exchange)

    async def _judge(self, case: _Case, silent: Sequence[_Silent]) -> None:
        """Open the breakers of destinations that were silent while the broker confirmed others. Without other confirms,
        a second silence counts if the broker answers a test message without a queue."""
        if self._reconnecting.blocked:  # A blocked broker proves nothing about a destination.
            case.in_doubt.update(index for one in silent for index in one.group)
            return
        unproven = [one for one in silent if not self._hold_if_proven(case, one)]
        again = [one for one in unproven if self.breaker.has(one.where) or self.last_confirm >= case.began]
        answers = bool(again) and await self._answers()
        for one in unproven:
            if answers and one in again:
                self._hold(case, one)
            else:
                self.breaker.suspect(one.where)
                case.in_doubt.update(one.group)
                case.silent.append(one)
        if silent:
            exchange, key, _ = silent[0].where
            log.warning(
                "destination silent",
                destinations=len(silent),
                unproven=len(case.silent),
                exchange=exchange,
                routing_key=key or b"",
            )

    def _hold_if_proven(self, case: _Case, one: _Silent) -> bool:
        """Hold the destination's messages if the broker confirmed a later publish. Returns whether it did."""
        if self.last_confirm >= one.began:
            self._hold(case, one)
        return self.last_confirm >= one.began

    def _hold(self, case: _Case, one: _Silent) -> None:
        outcome = Unanswered(self._timeout, one.where.exchange, one.where.routing_key or b"")
        self.breaker.open(one.where, outcome)
        case.outcomes.update((index, outcome) for index in one.group)

    async def _answers(self) -> bool:
        """Whether the broker answers at all: publish a message without a queue on the second connection."""
        token = b"delayer.nobody." + uuid.uuid4().hex.encode()
        message = Outgoing(b"", token, encode_headers(entry(TOKEN_HEADER, long_string(token))), b"", token)
        try:
            async with asyncio.timeout(CONNECTING), self._using(_now() + CONNECTING, 1) as connection:
                channel = await connection.confirming_channel()
                try:
                    await channel.publish([message], timeout=CONNECTING)
                finally:
                    channel.abandon()
        except (BrokerLost, TimeoutError):
            return False
        return True

    # The second connection.

    @asynccontextmanager
    async def _using(self, deadline: float, channels: int, *, own: bool = False) -> AsyncIterator[Connection]:
        """The second connection, opened if there is none, and kept for ten seconds afterwards. If the broker refuses a
        second one, the publishers' connection serves, unless ``own``. Raises BrokerLost, TimeoutError."""
        if not left(deadline):
            raise TimeoutError
        if self._idle is not None:
            self._idle.cancel()
        connection = await self._connected(deadline, channels, own=own)
        self._users += 1
        try:
            yield connection
        finally:
            self._users -= 1
            if not self._users:
                self._idle = asyncio.get_running_loop().call_later(10.0, self._close_idle)

    def _close_idle(self) -> None:
        """End the second connection, unless it is blocked: only there the broker announces the end of the alarm."""
        if self._connection is not None and self._connection.blocked:
            self._idle = asyncio.get_running_loop().call_later(10.0, self._close_idle)
        else:
            self.close()

    async def _connected(self, deadline: float, channels: int, *, own: bool) -> Connection:
        async with self._connecting:
            connection = self._connection
            if connection is not None and not self._users and connection.free_channels < 2 * channels + 1:
                connection.abandon()  # The broker then ends its channels that wait for silent queues.
            if connection is not None and not connection.closed.done():
                return connection
            if own or self._refused + 30.0 < _now():
                try:
                    self._connection = await self._reconnecting.another(min(CONNECTING, left(deadline)))
                except BrokerLost as lost:
                    self._refused = _now()
                    if own:
                        raise
                    log.warning("no isolation connection", reason=str(lost))
                else:
                    return self._connection
        while True:
            try:
                return await self._reconnecting.connection(left(deadline))
            except BrokerLost:  # It may be connecting again.
                if not left(deadline):
                    raise
                await asyncio.sleep(0.05)


def left(deadline: float) -> float:
    """Seconds until ``deadline``, by the loop's clock; at least 0."""
    return max(0.0, deadline - _now())


def _now() -> float:
    return asyncio.get_running_loop().time()


def _first(several: BaseExceptionGroup[BaseException]) -> BaseException:
    """One failure of many workers; a lost connection has priority."""
    all_of = list(several.exceptions)
    return next((one for one in all_of if isinstance(one, ConnectionLost)), all_of[0])
