"""Errors of AMQP connections, channels and messages. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import ClassVar, Final

from delayer.amqp.values import Answer


class ReplyCode(IntEnum):
    """Reply codes of AMQP 0-9-1 (section 1.4 of its definition)."""

    SUCCESS = 200
    ACCESS_REFUSED = 403
    NOT_FOUND = 404
    RESOURCE_LOCKED = 405
    PRECONDITION_FAILED = 406
    FRAME_ERROR = 501
    SYNTAX_ERROR = 502
    UNEXPECTED_FRAME = 505
    NOT_ALLOWED = 530
    INTERNAL_ERROR = 541


LOGIN: Final = "check user and password, and that the broker has them"
PERMISSION: Final = "give the user this permission"
NOT_ALLOWED: Final = (
    "do what the reason asks for: create the virtual host, give the user permissions in it, or raise the limit of the "
    "virtual host or the user (rabbitmqctl set_vhost_limits, set_user_limits)"
)

INTERNAL: Final = "see the broker's log; `rabbitmq-queues quorum_status QUEUE` shows whether a queue has no majority"


class MalformedProperties(Exception):
    """The property flags or the property list of a content header are malformed."""


class MalformedTable(Exception):
    """A field table has the wrong length, or contains an unreadable value."""


class BrokerLost(Exception):
    """The broker, or the channel in use, is gone. A publish in flight may have succeeded, and a retry may help.
    ``advice``: how an operator can fix the cause, as an imperative; may be empty."""

    def __init__(self, *text: object, advice: str = "") -> None:
        super().__init__(*text)
        self.advice = advice


class NoFreeChannel(BrokerLost):
    """Every channel number that the broker allows is in use."""


class _Closed(BrokerLost):
    """A closed connection or channel. ``code`` and ``text`` are from the side that closed it; code 0 if there is none.
    The text loses its full stop, because our sentences continue after it. ``answers``: the known answers to the
    published batch, None for messages in doubt."""

    answers: Sequence[Answer | None] = ()
    ADVICE: ClassVar[Mapping[int, str]] = {}
    """The next step by reply code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text, advice=self.ADVICE.get(code, ""))
        self.code = code
        self.text = text.removesuffix(".")

    def __str__(self) -> str:
        return f"{self.code} {self.text}" if self.code else self.text


class ConnectionLost(_Closed):
    """The connection is gone: the broker or this side closed it, or it was cut. A known cause is chained."""

    ADVICE: ClassVar[Mapping[int, str]] = {
        ReplyCode.ACCESS_REFUSED: LOGIN,
        ReplyCode.NOT_ALLOWED: NOT_ALLOWED,
        ReplyCode.INTERNAL_ERROR: INTERNAL,
    }

    @property
    def caused_by_client(self) -> bool:
        """Whether the broker closed it because of what this side sent, not for a shutdown or a limit."""
        # Reply codes from 500 on blame the peer's input and close the connection. Only 530 is not about a message: the
        # user has reached the limit of channels or connections.
        return self.code >= 500 and self.code != ReplyCode.NOT_ALLOWED and type(self) is ConnectionLost


class AccessRefused(ConnectionLost):
    """The broker rejected the credentials or the virtual host. A retry alone does not help."""

    ADVICE: ClassVar[Mapping[int, str]] = {**ConnectionLost.ADVICE, 0: LOGIN}


class ProtocolError(ConnectionLost):
    """The peer sent a frame that AMQP 0-9-1 forbids here; this side closes the connection with ``code``."""


class ChannelClosed(_Closed):
    """The channel is gone: the broker closed it (``code`` is its reason), or this side did (200)."""

    ADVICE: ClassVar[Mapping[int, str]] = {ReplyCode.ACCESS_REFUSED: PERMISSION}

    @property
    def caused_by_client(self) -> bool:
        """Whether the broker closed it because of what this side sent."""
        return self.code > ReplyCode.SUCCESS


class ConfirmTimeout(ChannelClosed):
    """Confirms were missing at the deadline. Their outcomes are in doubt, and the channel was closed."""


class ConsumerCancelled(BrokerLost):
    """The broker cancelled the consumer. Its deliveries can still be settled."""


def fresh_copy(error: _Closed) -> _Closed:
    """Copy the error: one loss fails many waiting calls, and each needs its own traceback."""
    copy = type(error)(error.code, error.text)
    copy.__cause__ = error.__cause__
    return copy
