"""Errors of a broker, and their translation from the driver's errors.

    BrokerLost (core)
    └─ BrokerUnreachable   there is no connection, it broke, or no answer came in time: try again later
    BrokerRefused          the broker refused: wrong user, no such vhost, no permission
    QueueMissing           a queue does not exist that the command needs
    TopologyMismatch       an exchange or a queue exists, but differs from the configured one

The texts contain no password: they name host, port and vhost only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from delayer.core.errors import BrokerLost


class BrokerUnreachable(BrokerLost):
    """There is no connection to the broker, it broke, or the broker did not answer in time."""


class BrokerRefused(Exception):
    """The broker answered and refused: the login, the vhost, or the operation. A retry seldom helps."""


class QueueMissing(Exception):
    """A queue does not exist that a command needs."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One part that differs. ``kind`` is "exchange" or "queue"; ``broker_says`` is the broker's text. ``messages``: the
    ready ones in the queue; None for an exchange, or a hidden queue."""

    kind: str
    name: str
    expected: str
    broker_says: str
    messages: int | None = None

    def __str__(self) -> str:
        found = f"{self.kind} {self.name!r}: expected {self.expected}; the broker says: {self.broker_says}"
        return f"{found}; messages in it: {self.messages}" if self.messages else found


class TopologyMismatch(Exception):
    """Parts of the topology exist, but differ from the wanted ones."""

    def __init__(self, mismatches: Sequence[Mismatch]) -> None:
        self.mismatches = tuple(mismatches)
        super().__init__("; ".join(str(mismatch) for mismatch in self.mismatches))


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Turn the driver's errors into ours. ``where`` names the broker: host, port, vhost.

    A ChannelClosed passes unchanged. It is the broker's answer to one call, and only the caller knows the question.
    """
    from aiormq import exceptions as driver  # noqa: PLC0415 - 30 ms, for commands that only need our errors' names.

    try:
        yield
    except driver.ChannelClosed:
        raise
    except (driver.ProbableAuthenticationError, driver.AuthenticationError) as error:
        raise BrokerRefused(f"{where}: the login was refused: {_text(error)}") from error
    except driver.ConnectionNotAllowed as error:
        raise BrokerRefused(f"{where}: {_text(error)}") from error
    except driver.InvalidFrameError as error:
        # If opening the vhost failed, the driver hides the broker's connection.close in this error.
        if "Connection.OpenOk" in str(error):
            raise BrokerRefused(f"{where}: the vhost does not exist, or this user may not enter it") from error
        raise BrokerUnreachable(f"{where}: does not speak AMQP 0-9-1: {_text(error)}") from error
    except driver.ConnectionClosed as error:
        raise BrokerUnreachable(f"{where}: the broker closed the connection: {_text(error)}") from error
    except TimeoutError as error:
        raise BrokerUnreachable(f"{where}: no answer in time") from error
    except (driver.AMQPConnectionError, OSError) as error:
        raise BrokerUnreachable(f"{where}: {_text(error)}") from error
    except (driver.AMQPError, driver.ChannelInvalidStateError) as error:
        raise BrokerUnreachable(f"{where}: the channel is gone: {_text(error)}") from error


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
