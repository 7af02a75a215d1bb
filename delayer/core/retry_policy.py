"""Retries by configuration: a queue's dead letters return to it, with growing delays and up to a limit. Pure. The
broker's ``x-death`` has queue and reason. Our own header counts the retries, as every trip removes ``x-death``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from delayer.amqp.values import Timestamp
from delayer.core.delay_headers import quote_value
from delayer.core.marks import X_DEATH
from delayer.core.message import as_bytes

RETRIES: Final = b"x-delayer-retries"
FAILED_IN: Final = b"x-delayer-failed-in"
RETRY_HEADERS: Final = frozenset({X_DEATH, RETRIES, FAILED_IN})
"""The headers that :func:`failure` reads."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """``retry`` of a route. The n-th retry waits ``first_ms * factor ** (n - 1)``, plus a random part of up to
    ``jitter`` of that, so that messages that failed together do not return together. ``longest_ms`` limits the wait.
    ``exhausted`` is the queue for messages that failed after ``attempts`` retries."""

    first_ms: int
    factor: float
    longest_ms: int
    jitter: float
    attempts: int
    exhausted: bytes


class FailedAttempt(NamedTuple):
    """One failure of a message, in ``queue``, which it reached by ``exchange`` and ``routing_key``. ``retries``
    includes the coming retry. An exhausted message is not retried."""

    retries: int
    queue: bytes
    reason: str
    at: int
    exchange: bytes
    routing_key: bytes
    exhausted: bool


class NoFailure(ValueError):
    """The message does not say where it failed. The text names the expected and the found value."""


def wait_ms(retry: RetryPolicy, retries: int, chance: float) -> int:
    """The wait before the ``retries``-th retry, in ms; ``chance`` is 0 to 1.

    >>> wait_ms(RetryPolicy(5_000, 2, 3_600_000, 0.1, 10, b"parked"), 3, 0.5)
    21000
    """
    try:
        grown = retry.first_ms * retry.factor ** (retries - 1)
    except OverflowError:
        grown = math.inf
    # The limit leaves room for the jitter, so that even the longest waits are spread.
    grown = min(grown, retry.longest_ms / (1 + retry.jitter))
    return min(math.ceil(grown * (1 + retry.jitter * chance)), retry.longest_ms)


def failure(headers: Mapping[bytes, object], retry: RetryPolicy) -> FailedAttempt:
    """Read the failure of a dead letter. Raises NoFailure."""
    deaths = headers.get(X_DEATH)
    last = deaths[0] if isinstance(deaths, list) and deaths else None
    queue = as_bytes(last.get("queue")) if isinstance(last, dict) else None
    if not isinstance(last, dict) or not queue:
        raise NoFailure(
            "retry: expected x-death, the broker's note of the queue that dead-lettered the message, found "
            f"{quote_value(deaths)}. Only dead letters come back; set the queue's x-dead-letter-exchange"
        )
    if len(queue) > 255:
        raise NoFailure(f"retry: expected x-death to name a queue of at most 255 bytes, found one of {len(queue)}")
    keys, at = last.get("routing-keys"), last.get("time")
    retries = _so_far(headers, queue) + 1
    return FailedAttempt(
        retries,
        queue,
        str(last.get("reason", "")),
        int(at) if isinstance(at, Timestamp) else 0,
        as_bytes(last.get("exchange")) or b"",
        (as_bytes(keys[0]) if isinstance(keys, list) and keys else None) or b"",
        exhausted=retries > retry.attempts,
    )


def _so_far(headers: Mapping[bytes, object], queue: bytes) -> int:
    """The number of retries into this queue. A consumer may pass a message on with its headers, so failures in another
    queue do not count. Raises NoFailure."""
    if as_bytes(headers.get(FAILED_IN)) != queue or RETRIES not in headers:
        return 0
    value = headers[RETRIES]
    if type(value) is not int or not 0 <= value < (1 << 31):
        raise NoFailure(f"{RETRIES.decode()}: expected a whole number, found {quote_value(value)}")
    return value
