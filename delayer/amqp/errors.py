"""What can go wrong on the wire.

WireError
├─ Malformed                 bytes that are not what the protocol says they are; the message is at fault, not the link
│  ├─ MalformedProperties    a content header's property list
│  └─ MalformedTable         a field table, or a value in it
├─ HeaderTooLarge            a message whose content header fits no frame; nothing was written
├─ NoFreeChannel  (*)        every channel number that the broker allows is in use; nothing was written
├─ ConnectionLost  (*)       the connection is gone, whoever ended it
│  ├─ AccessRefused          the broker would not let us in: credentials or virtual host
│  └─ ProtocolError          one side broke the protocol, and the connection was closed for it
├─ ChannelClosed  (*)        the channel is gone, its connection may live on
│  └─ ConfirmTimeout         the broker did not confirm in time; the channel was closed for it
└─ ConsumerCancelled  (*)    the broker cancelled the consumer, for instance because its queue was deleted

(*) is also a delayer.core.errors.BrokerLost: what was in flight is in doubt, and trying again may help.
"""

from __future__ import annotations

from collections.abc import Sequence

from delayer.core.errors import BrokerLost
from delayer.core.message import Outcome

REPLY_SUCCESS = 200
ACCESS_REFUSED = 403
NOT_FOUND = 404
FRAME_ERROR = 501
SYNTAX_ERROR = 502
UNEXPECTED_FRAME = 505


class WireError(Exception):
    """Base of everything that this package raises on purpose."""


class Malformed(WireError):
    """Bytes of a message that cannot be read as AMQP 0-9-1 says."""


class MalformedProperties(Malformed):
    """The property flags or the property list of a content header."""


class MalformedTable(Malformed):
    """A field table whose bytes do not add up, or a value in it that cannot be read."""


class HeaderTooLarge(WireError):
    """Message ``index`` of a batch has a content header of ``size`` bytes where a frame carries ``limit``.

    Nothing of the batch was written: it can be published again without that message.
    """

    def __init__(self, index: int, size: int, limit: int) -> None:
        super().__init__(f"message {index} of the batch: content header of {size} bytes, a frame carries {limit}")
        self.index = index
        self.size = size
        self.limit = limit


class NoFreeChannel(WireError, BrokerLost):
    """Every channel number that the broker allows is in use, until others are closed or the connection is lost."""


class _Closed(WireError, BrokerLost):
    """``code`` and ``text`` are the peer's, or ours where we ended it; code 0 where nobody gave one.

    ``outcomes``: those of a publish's batch that were there by then, None for each message in doubt.
    """

    outcomes: Sequence[Outcome | None] = ()

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text

    def __str__(self) -> str:
        return f"{self.code} {self.text}" if self.code else self.text


class ConnectionLost(_Closed):
    """The connection is gone: closed by the broker, by us, or cut. The cause is chained where there is one."""

    @property
    def objects(self) -> bool:
        """Whether the broker ended it for what was sent over it, and not because it stops, is told to, or allows no
        more channels."""
        # Codes from 500 on are about what the peer sent, and end the connection. 530 alone is about no message: the
        # user has as many channels or connections as it may have.
        return self.code >= 500 and self.code != 530 and type(self) is ConnectionLost


class AccessRefused(ConnectionLost):
    """The broker refused the credentials or the virtual host. Trying again will not help by itself."""


class ProtocolError(ConnectionLost):
    """A frame that AMQP 0-9-1 does not allow at this point; ``code`` is what we close the connection with."""


class ChannelClosed(_Closed):
    """The channel is gone: closed by the broker (``code`` says why), or by us (200)."""

    @property
    def objects(self) -> bool:
        """Whether the broker closed it for what was sent over it."""
        return self.code > REPLY_SUCCESS


class ConfirmTimeout(ChannelClosed):
    """Confirms were missing at the deadline. Their outcomes are in doubt and the channel was closed."""


class ConsumerCancelled(WireError, BrokerLost):
    """The broker cancelled the consumer. What was delivered can still be settled."""


def again(error: _Closed) -> _Closed:
    """A fresh copy to raise: one loss ends many waiters, and a traceback belongs to one of them."""
    copy = type(error)(error.code, error.text)
    copy.__cause__ = error.__cause__
    return copy
