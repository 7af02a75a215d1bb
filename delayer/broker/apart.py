"""Publishing one message at a time on a connection of its own: for those that may end one.

Some messages make the broker close the whole connection: headers of values that its own language cannot hold,
destinations that it cannot read. Over a connection that others use, each would take their publishes along.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import structlog

from delayer.broker.alone import Probe, confirming, left
from delayer.broker.relay import Relay
from delayer.core.errors import BrokerLost
from delayer.core.message import NACKED, Outcome, Outgoing, Returned, is_direct_reply
from delayer.wire.connection import Connection
from delayer.wire.errors import FIRST_OBJECTION, ConnectionLost

log = structlog.get_logger(__name__)

CONNECTING: Final = 3.0
"""Seconds for the connection to be there."""
DIRECT: Final = 2.0
"""Seconds for the direct replies of a batch: nobody waits for them for long."""


class Lone(Probe):
    """A connection of its own, which is made again whenever the broker ended it over a message."""

    def __init__(self, relay: Relay, connection: Connection, deadline: float) -> None:
        super().__init__(connection, deadline)
        self._relay = relay

    @classmethod
    async def open(cls, relay: Relay, deadline: float) -> Lone | None:
        """None where the broker lets nobody in besides, or not now."""
        try:
            return cls(relay, await relay.another(min(CONNECTING, left(deadline))), deadline)
        except BrokerLost as lost:
            log.warning("no connection to publish alone", reason=str(lost))
            return None

    async def publish(self, message: Outgoing) -> tuple[Outcome, Returned | None]:
        """As its base, and what ended the connection is such an objection as well."""
        if not left(self._deadline):
            raise TimeoutError
        if self._connection.closed.done():
            self._channel = None
            self._connection = await self._relay.another(min(CONNECTING, left(self._deadline)))
        if self._channel is None:
            self._channel = await confirming(self._connection)
        try:
            return await super().publish(message)
        except ConnectionLost as lost:
            if not lost.objects:
                raise
            objection = Returned(lost.code, lost.text)
            return objection, objection

    def close(self) -> None:
        self._connection.abandon()


def ends_connections(objection: Returned) -> bool:
    """Whether it took the connection along."""
    return objection.code >= FIRST_OBJECTION


async def direct_replies(
    relay: Relay, batch: Sequence[Outgoing], outcomes: dict[int, Outcome], deadline: float
) -> None:
    """Publish those messages of the batch that are direct replies: rare, each may end its connection, and none is worth
    waiting for. What one of them does to the connection is believed of the others."""
    indexes = [
        index
        for index, one in enumerate(batch)
        if not one.exchange and is_direct_reply(one.exchange, one.routing_key)  # for all but a few: one look
    ]
    if not indexes:
        return
    found: dict[int, Outcome] = {}
    rest: Outcome = NACKED
    lone = await Lone.open(relay, min(deadline, asyncio.get_running_loop().time() + DIRECT))
    if lone is not None:
        try:
            for index in indexes:
                found[index], objection = await lone.publish(batch[index])
                if objection is not None and ends_connections(objection):
                    rest = objection
                    break
        except (BrokerLost, TimeoutError):
            pass  # nobody took the others
        finally:
            lone.close()
    outcomes.update(dict.fromkeys(indexes, rest) | found)
