"""Publishing one message at a time on a channel of its own, so that what the broker says can only be about that one."""

from __future__ import annotations

import asyncio
from typing import Final

from delayer.core.message import ClosedChannel, ClosedConnection, Outcome, Outgoing
from delayer.wire.channel import Channel
from delayer.wire.connection import Connection
from delayer.wire.errors import ChannelClosed, ConfirmTimeout

Objection = ClosedChannel | ClosedConnection
"""What the broker closes something for."""
NOT_FOUND: Final = 404
ACCESS_REFUSED: Final = 403


class Probe:
    """Publishes one message at a time, on a channel that is opened again whenever the broker closed it: then its
    objection is to that message, and to no other."""

    def __init__(self, connection: Connection, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline
        self._channel: Channel | None = None

    async def publish(self, message: Outgoing) -> tuple[Outcome, Objection | None]:
        """The outcome, and again if it is the broker's objection and not an answer of its queues.

        Raises TimeoutError when the time is over before anything is written.
        """
        if not left(self._deadline):
            raise TimeoutError
        if self._channel is None:
            self._channel = await confirming(self._connection)
        try:
            return (await self._channel.publish([message], timeout=left(self._deadline)))[0], None
        except ConfirmTimeout:
            raise
        except ChannelClosed as closed:
            self._channel = None
            objection = ClosedChannel(closed.code, closed.text)
            return objection, objection

    def close(self) -> None:
        if self._channel is not None:
            self._channel.abandon()


def concerns_exchange(objection: Objection) -> bool:
    """Missing, internal, or closed to this user; not if it is about this message or its key (topic permissions)."""
    return objection.code == NOT_FOUND or (objection.code == ACCESS_REFUSED and "topic '" not in objection.text)


async def confirming(connection: Connection) -> Channel:
    """A new channel that confirms."""
    channel = await connection.channel()
    try:
        await channel.confirm_select()
    except BaseException:
        channel.abandon()  # nobody else knows of it, and its number would never be free again
        raise
    return channel


def left(deadline: float) -> float:
    """Seconds until then, by the loop's clock."""
    return max(0.0, deadline - asyncio.get_running_loop().time())
