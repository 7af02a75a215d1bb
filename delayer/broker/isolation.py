"""Isolation of failed publishes: finds the message or the destination at fault, on a second connection.

A batch on the shared channel loses outcomes if a queue does not confirm, or if the broker closes the channel or the
connection because of one message. The messages without an outcome come here, and so do messages that may end a
connection. Isolation publishes them in rounds, and :class:`FaultSearch` decides what each round publishes:

- A probing round publishes one message of each destination, each on its own channel. If a destination stays silent
  while the broker answers, its circuit breaker opens and its messages are held.
- Every other round publishes a portion on one channel. The portion grows after a success. It shrinks to one message
  after the broker closed the channel or the connection, until the message at fault is found.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

import structlog

from delayer.amqp.channel import seconds_until_due
from delayer.amqp.connection import Connection
from delayer.amqp.errors import INTERNAL, BrokerLost, ChannelClosed, ConfirmTimeout, ConnectionLost, ReplyCode
from delayer.amqp.properties import encode_headers, entry, long_string
from delayer.amqp.values import Answer, Outgoing, Pace
from delayer.broker.circuit_breaker import CircuitBreaker, Destination, destination_of
from delayer.broker.connection import ReconnectingConnection
from delayer.broker.second_connection import CONNECT_SECONDS, SecondConnection
from delayer.core.hold import Outcome, closed_channel, closed_connection, outcome_of, unanswered
from delayer.core.marks import ID
from delayer.retry import raise_first

log = structlog.get_logger(__name__)

PROBE_SECONDS: Final = 2.0
"""Timeout of a probe. The broker itself must answer in three quarters of it. If every probed destination is suspect,
the timeout is half of this, because the whole batch waits."""
ISOLATE_SECONDS: Final = 10.0
"""After a message ended a connection, every batch is published here for this long."""
MARGIN_SECONDS: Final = 0.1
"""Probes end this long before a batch's deadline, because other messages may wait for them."""
SMALL_PORTION: Final = 8
"""Messages in a portion if one of them may close a channel or a connection."""
MAX_PROBES: Final = 512
"""Maximum number of parallel probes, if the connection allows as many channels."""
MAX_EXCHANGES: Final = 10_000
"""Maximum number of exchanges that are remembered."""
NOT_TRIED: Final = closed_connection(541, "INTERNAL_ERROR at an earlier attempt; there is no isolation connection now")
_Loss = ChannelClosed | ConnectionLost
_Groups = Mapping[Destination, Sequence[int]]


class Suspicion(Enum):
    """The possible fault of isolated messages."""

    DESTINATION = "a destination is silent, missing or forbidden"
    ONE_ENDS_CONNECTION = "one message ended a connection"
    ALL_END_CONNECTIONS = "each message ended a connection before"


@dataclass(frozen=True, slots=True)
class FaultSearch:
    """The state of the search for the message or destination at fault. Pure: each round leads to the next state."""

    suspicion: Suspicion
    portion: int
    """Number of messages that the next portion has."""
    probed: frozenset[Destination] | None
    """Destinations probed so far; None means that the search does not probe."""

    @classmethod
    def begin(cls, suspicion: Suspicion) -> FaultSearch:
        portion = 1 if suspicion is Suspicion.ALL_END_CONNECTIONS else SMALL_PORTION
        return cls(suspicion, portion, frozenset() if suspicion is Suspicion.DESTINATION else None)

    @property
    def is_exclusive(self) -> bool:
        """Whether a round needs the connection for itself, because it may end."""
        return self.suspicion is not Suspicion.DESTINATION

    def split(self, groups: _Groups) -> tuple[list[Destination], list[int]]:
        """Return the destinations to probe, the largest groups first, and the messages of answered destinations, which
        are published before the next probes."""
        probed = self.probed or frozenset()
        fresh = sorted(groups.keys() - probed, key=lambda one: (-len(groups[one]), groups[one][0]))
        return fresh, sorted(index for one in groups.keys() & probed for index in groups[one])

    def has_found(self, sent: int, lost: _Loss | None) -> bool:
        """Whether ``lost`` proves one message at fault: the broker closed something after that message was sent
        alone."""
        if isinstance(lost, ConnectionLost) and not self.is_exclusive:
            return False  # A message of another round may have ended the connection.
        return sent == 1 and lost is not None and not isinstance(lost, ConfirmTimeout)

    def after_probes(self, probed: Iterable[Destination], lost: _Loss | None) -> FaultSearch:
        """Return the next state after probes."""
        if isinstance(lost, ConnectionLost):
            return self._after_connection_lost()
        return replace(self, portion=SMALL_PORTION, probed=(self.probed or frozenset()).union(probed))

    def after_portion(self, sent: int, lost: _Loss | None, *, is_all_probed: bool, batch_size: int) -> FaultSearch:
        """Return the next state after a portion of ``sent`` messages, which grows up to ``batch_size``."""
        if isinstance(lost, ConfirmTimeout):
            return replace(self, probed=frozenset())
        if isinstance(lost, ConnectionLost) and not self.has_found(sent, lost):
            return self._after_connection_lost()
        portion = self.portion
        if lost is None:
            portion = min(SMALL_PORTION if self.is_exclusive else batch_size, 2 * portion)
        elif sent > 1:
            portion = 1
        return replace(self, portion=portion, probed=None if is_all_probed else self.probed)

    def _after_connection_lost(self) -> FaultSearch:
        if self.is_exclusive:
            return replace(self, portion=1, probed=None)
        return FaultSearch.begin(Suspicion.ONE_ENDS_CONNECTION)


@dataclass(slots=True)
class Pending:
    """A batch whose outcomes become known over time."""

    batch: Sequence[Outgoing]
    deadline: float
    """When the caller stops waiting, in the loop's time."""
    pace: Pace | None
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    in_doubt: set[int] = field(default_factory=set)
    """Messages that were written, got no answer, and are not to be published again now: the broker was silent as a
    whole, or the isolation was interrupted."""

    def publishable(self, indexes: Sequence[int]) -> list[int]:
        """Return the indexes of messages that can be published again."""
        return [index for index in indexes if index not in self.outcomes and index not in self.in_doubt]


@dataclass(slots=True)
class _Case:
    """The isolated messages of one batch."""

    pending: Pending
    indexes: Sequence[int]
    until: float
    search: FaultSearch
    written: set[int] = field(default_factory=set)

    def hold(self, indexes: Sequence[int], outcome: Outcome) -> bool:
        """Enter the outcome of messages that have none. Returns whether there are any."""
        held = self.pending.publishable(indexes)
        self.pending.outcomes.update(dict.fromkeys(held, outcome))
        return bool(held)


class Isolation:
    """The isolation that all publishers of a process share. ``reconnecting`` is their connection, and opens the second
    one."""

    def __init__(
        self, reconnecting: ReconnectingConnection, *, timeout: float, probe_seconds: float = PROBE_SECONDS
    ) -> None:
        """``timeout``: seconds that a publish waits, as the text of a hold states. A probe waits ``probe_seconds``."""
        self.breaker = CircuitBreaker()
        self.exchanges: set[bytes] = set()
        """Exchanges that accepted a publish. A missing exchange closes the channel, which leaves others in doubt."""
        self.isolating_until = -math.inf
        """Until this time of the loop every batch is isolated: a message ended a connection, and such messages often
        come together."""
        self._reconnecting = reconnecting
        self._second = SecondConnection(reconnecting)
        self._timeout = timeout
        self._probe_seconds = probe_seconds

    def close(self) -> None:
        """Close the second connection. Safe to call twice."""
        self._second.close()

    async def publish(
        self, pending: Pending, indexes: Sequence[int], suspicion: Suspicion = Suspicion.DESTINATION
    ) -> None:
        """Publish these messages once all are due. A message that was written and has no outcome is then in doubt; an
        unwritten message may be published again.

        If all may end connections, each gets an outcome within two seconds, because the rest of the batch waits.
        """
        all_end = suspicion is Suspicion.ALL_END_CONNECTIONS
        indexes = sorted(indexes)  # Doubtful messages come grouped by destination, and the last one decides the wait.
        while indexes and (left := seconds_until_due(pending.pace, indexes[-1])):  # noqa: ASYNC110 - a clock
            await asyncio.sleep(left)
        until = min(pending.deadline, _now() + CONNECT_SECONDS if all_end else math.inf)
        if self.isolating_until > _now() and not all_end:
            suspicion = Suspicion.ONE_ENDS_CONNECTION
        case = _Case(pending, indexes, until, FaultSearch.begin(suspicion))
        try:
            async with asyncio.timeout_at(until):
                await self._settle(case)
        except (BrokerLost, TimeoutError) as lost:
            log.warning("isolation interrupted", messages=len(indexes), reason=str(lost) or "no answer in time")
            # The daemon publishes these again only when it reads or claims them again.
            pending.in_doubt.update(case.written - pending.outcomes.keys())
        for index in indexes if all_end else ():
            one = pending.batch[index]
            silent = unanswered(self._timeout, one.exchange, one.routing_key)
            pending.outcomes.setdefault(index, silent if index in case.written else NOT_TRIED)

    async def _settle(self, case: _Case) -> None:
        """Publish in rounds. Raises BrokerLost.

        The broker confirms nothing before it closes, so the messages before the message at fault are published twice.
        """
        batch = case.pending.batch
        while todo := case.pending.publishable(case.indexes):
            search = case.search
            is_required = search.suspicion is Suspicion.ALL_END_CONNECTIONS
            async with self._second.use(is_exclusive=search.is_exclusive, is_required=is_required) as connection:
                groups = {} if search.probed is None else self.breaker.groups(batch, todo)
                fresh, answered = search.split(groups)
                if fresh and not answered:
                    at_once = max(1, min(MAX_PROBES, connection.free_channels // 2))
                    probes = {one: groups[one] for one in fresh[:at_once]}
                    case.search = search.after_probes(probes, await self._probe(case, connection, probes))
                    continue
                ready = (answered or todo)[: search.portion]
                # Distinct tokens, because a return names only the token.
                portion = list({batch[index].token: index for index in reversed(ready)}.values())[::-1]
                seconds = min(self._probe_seconds, case.until - _now())
                lost = await self._publish_portion(case, connection, portion, seconds)
            if lost is not None and search.has_found(len(portion), lost):
                self._enter_objection(case, portion[0], lost)
            case.search = search.after_portion(len(portion), lost, is_all_probed=not fresh, batch_size=len(batch))

    async def _probe(self, case: _Case, connection: Connection, groups: _Groups) -> _Loss | None:
        """Publish the first message of each group on its own channel, and hold the groups of silent destinations.
        Returns the connection's loss, or None. A silent destination is held only if the broker confirmed another
        publish early in this round; otherwise its messages are in doubt."""
        suspect = all(self.breaker.suspects(one) for one in groups)
        seconds = min(self._probe_seconds / (2 if suspect else 1), case.until - MARGIN_SECONDS - _now())
        before = {one: self.breaker.table.get(one) for one in groups}
        try:
            async with asyncio.TaskGroup() as probes:  # No probe outlives its round.
                answering = probes.create_task(self._is_answering(connection, seconds * 0.75))  # Before the probes.
                sent = [
                    probes.create_task(self._publish_portion(case, connection, group[:1], seconds))
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
                case.hold(group, outcome)
                if self.breaker.table.get(one) is before[one]:  # Otherwise a simultaneous probe opened it.
                    self.breaker.open(one, outcome)
        if silent:
            first = {"exchange": silent[0].exchange, "routing_key": silent[0].routing_key or b""}
            unproven = 0 if proven else len(silent)
            log.warning("destination silent", destinations=len(silent), unproven=unproven, **first, next_step=INTERNAL)
        return None

    async def _is_answering(self, connection: Connection, seconds: float) -> bool:
        """Whether the broker answers at all within ``seconds``. Publishes a message to a queue that does not exist."""
        token = b"delayer.nobody." + uuid.uuid4().hex.encode()
        message = Outgoing(b"", token, encode_headers(entry(ID, long_string(token))), b"", token)
        try:
            async with asyncio.timeout(seconds):
                await self._second.publish(connection, [message], seconds)
        except (BrokerLost, TimeoutError):
            return False
        return True

    async def _publish_portion(
        self, case: _Case, connection: Connection, portion: Sequence[int], seconds: float
    ) -> _Loss | None:
        """Publish on one channel, and enter the known outcomes. Returns the reason if any are missing. Raises
        BrokerLost if no message is the reason."""
        answers: Sequence[Answer | None]
        lost: _Loss | None = None
        case.written.update(portion)
        try:
            messages = [case.pending.batch[index] for index in portion]
            answers = await self._second.publish(connection, messages, seconds)
        except (ChannelClosed, ConnectionLost) as error:
            lost, answers = error, error.answers
        answered = zip(portion, answers, strict=bool(answers))
        case.pending.outcomes.update((index, outcome_of(answer)) for index, answer in answered if answer is not None)
        if isinstance(lost, ConnectionLost) and not lost.caused_by_client:
            raise lost
        return lost

    def _enter_objection(self, case: _Case, index: int, lost: _Loss) -> None:
        """Enter the outcome of the message that made the broker close something. A missing exchange affects all its
        messages, a missing permission those with the same key."""
        batch, outcomes = case.pending.batch, case.pending.outcomes
        if isinstance(lost, ConnectionLost):
            # Messages known to end connections end only the second connection, at each retry.
            if case.search.suspicion is not Suspicion.ALL_END_CONNECTIONS:
                self.isolating_until = _now() + ISOLATE_SECONDS
            outcomes[index] = closed_connection(lost.code, lost.text)
            return
        one = destination_of(batch[index])
        every_key = Destination(one.exchange, None)
        outcome = closed_channel(lost.code, lost.text)
        # Do not reopen a breaker that another probe of this round has opened.
        if lost.code == ReplyCode.NOT_FOUND:
            self.exchanges.discard(one.exchange)
            if case.hold([i for i in case.indexes if batch[i].exchange == one.exchange], outcome):
                self.breaker.open(every_key, outcome)
            return
        self.breaker.close(every_key)  # The exchange exists by now.
        if lost.code != ReplyCode.ACCESS_REFUSED:
            self.breaker.close(one)
            outcomes[index] = outcome
            return
        same_key = [i for i in case.indexes if batch[i][:2] == one[:2]]
        if case.hold([i for i in same_key if destination_of(batch[i]) == one], outcome):
            self.breaker.open(one, outcome)


def _now() -> float:
    return asyncio.get_running_loop().time()
