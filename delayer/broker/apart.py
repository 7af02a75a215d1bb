"""Publishing on a connection of its own: for messages that may end one.

Some messages make the broker close the whole connection: headers of values that its own language cannot hold,
destinations that it cannot read. Over a connection that others use, each would take their publishes along.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, TypeGuard

import structlog

from delayer.broker.alone import Objection, Probe, confirming, left
from delayer.broker.relay import Relay
from delayer.core.errors import BrokerLost
from delayer.core.message import NACKED, ClosedConnection, Outcome, Outgoing, Unanswered, is_direct_reply
from delayer.wire.channel import Channel
from delayer.wire.connection import Connection
from delayer.wire.errors import ChannelClosed, ConfirmTimeout, ConnectionLost

log = structlog.get_logger(__name__)

CONNECTING: Final = 3.0
"""Seconds for the connection to be there."""
BRIEFLY: Final = 2.0
"""Seconds for those of a batch that are known to end connections, or may: the others wait meanwhile."""
ENDED: Final = 5
"""Direct replies of a batch that may each end a connection; then it is believed of the others."""
LATE: Final = 3
"""Times in a row that the connection may not be there in time, until it counts as refused: nobody is stopped for good
where the way to the broker swallows the second connection of a client."""
NOT_TRIED: Final = ClosedConnection(541, "INTERNAL_ERROR at an earlier attempt; none alone was to be had for this one")
"""Of a message that ended a connection before, and for which there is none now."""


class Lone(Probe):
    """A connection of its own, which is made again whenever the broker ended it over a message."""

    def __init__(self, relay: Relay, connection: Connection, deadline: float) -> None:
        super().__init__(connection, deadline)
        self._relay = relay
        self.in_doubt = False
        """Whether something was written that is not answered."""

    async def publish(self, message: Outgoing) -> tuple[Outcome, Objection | None]:
        """As its base, and what ended the connection is such an objection as well."""
        await self._ready()
        self.in_doubt = True
        try:
            said = await super().publish(message)
        except ConnectionLost as lost:
            if not lost.objects:
                raise
            objection = ClosedConnection(lost.code, lost.text)
            said = objection, objection
        self.in_doubt = False
        return said

    async def together(self, messages: Sequence[Outgoing]) -> list[Outcome] | None:
        """All at once. None: the broker objected, nobody knows to which."""
        channel = await self._ready()
        self.in_doubt = True
        outcomes: list[Outcome] | None = None
        try:
            outcomes = await channel.publish(messages, timeout=left(self._deadline))
        except ConfirmTimeout:
            raise
        except ChannelClosed:
            self._channel = None
        except ConnectionLost as lost:
            if not lost.objects:
                raise
        self.in_doubt = False
        return outcomes

    async def _ready(self) -> Channel:
        if not left(self._deadline):
            raise TimeoutError
        if self._connection.closed.done():
            self._channel = None
            self._connection = await self._relay.another(min(CONNECTING, left(self._deadline)))
        if self._channel is None:
            try:
                self._channel = await confirming(self._connection)
            except BaseException:
                self._connection.abandon()  # it may be mute
                raise
        return self._channel

    def close(self) -> None:
        """The connection is kept for the next one, if it is in order."""
        if self.in_doubt or self._connection.closed.done():
            self._connection.abandon()
        else:
            super().close()
            self._relay.give_back(self._connection)


class Apart:
    """What goes that way, for one publisher."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._late = 0

    async def open(self, deadline: float) -> Lone | None:
        """None where the broker lets nobody in besides. Raises TimeoutError where that is not known."""
        seconds = min(CONNECTING, left(deadline))
        if not seconds:
            raise TimeoutError
        try:
            connection = await self._relay.another(seconds)
        except BrokerLost as lost:
            if isinstance(lost.__cause__, TimeoutError):
                self._late += seconds == CONNECTING
                if self._late < LATE:
                    raise TimeoutError from lost
            log.warning("no connection to publish alone", reason=str(lost))
            return None
        self._late = 0
        return Lone(self._relay, connection, deadline)

    async def first(self, batch: Sequence[Outgoing], outcomes: dict[int, Outcome], deadline: float) -> None:
        """Publish those of the batch that are known to end connections, and direct replies, which may: both rare, and
        neither ever goes by a connection that others use. Enters an outcome for each of them."""
        enders: list[int] = []
        replies: list[int] = []
        for index, one in enumerate(batch):
            if one.isolated:
                enders.append(index)
            elif not one.exchange and is_direct_reply(one.exchange, one.routing_key):  # for all but a few: one look
                replies.append(index)
        enders = [index for index in enders if index not in outcomes]
        replies = [index for index in replies if index not in outcomes]
        if not enders and not replies:
            return
        lone: Lone | None = None
        try:
            lone = await self.open(min(deadline, asyncio.get_running_loop().time() + BRIEFLY))
            if lone is not None:
                await _replies(lone, batch, replies, outcomes)
                await _enders(lone, batch, enders, outcomes)
        except (BrokerLost, TimeoutError) as lost:
            log.warning("no connection to publish alone", reason=str(lost) or f"not within {BRIEFLY:g} s")
        finally:
            if lone is not None:
                lone.close()
        for index in replies:
            outcomes.setdefault(index, NACKED)  # nobody took it, and nobody waits for it for long
        for index in enders:
            outcomes.setdefault(index, NOT_TRIED)


def ends_connections(objection: Outcome | None) -> TypeGuard[ClosedConnection]:
    """Whether it took the connection along."""
    return isinstance(objection, ClosedConnection)


async def _enders(lone: Lone, batch: Sequence[Outgoing], indexes: Sequence[int], outcomes: dict[int, Outcome]) -> None:
    for index in indexes:
        one = batch[index]
        try:
            outcomes[index], _ = await lone.publish(one)
        except (BrokerLost, TimeoutError):
            if lone.in_doubt:  # its destination perhaps has it
                outcomes[index] = Unanswered(BRIEFLY, one.exchange, one.routing_key)
            raise


async def _replies(lone: Lone, batch: Sequence[Outgoing], indexes: Sequence[int], outcomes: dict[int, Outcome]) -> None:
    """At once; and one by one, each perhaps once more, where the broker objected to one of them."""
    at_once = list({batch[index].token: index for index in indexes}.values())
    if len(at_once) > 1:
        try:
            said = await lone.together([batch[index] for index in at_once])
        except ConfirmTimeout as late:
            answered = zip(at_once, late.outcomes, strict=bool(late.outcomes))
            outcomes.update((index, outcome) for index, outcome in answered if outcome is not None)
            raise
        if said is not None:
            outcomes.update(zip(at_once, said, strict=True))
    ended = 0
    for index in indexes:
        if index in outcomes:
            continue
        outcomes[index], objection = await lone.publish(batch[index])
        ended += ends_connections(objection)
        if objection is not None and ended >= ENDED:
            outcomes.update({other: objection for other in indexes if other not in outcomes})
