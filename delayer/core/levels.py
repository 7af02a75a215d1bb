"""The due time of a message in a level queue of a cascade. Pure.

In level L a message waits up to 2^L more seconds, and then as many as the bits below L of its routing key say. So it is
due between ``bits below L`` and ``bits below L`` plus 2^L seconds from now. Headers can only choose a time within these
limits, because messages copy headers from others. An earlier time is from an earlier publish, so it is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from delayer.amqp.values import Timestamp
from delayer.core import nservicebus
from delayer.core.cascade import Cascade, delay_in_key
from delayer.core.delay_headers import ETA, UnreadableDelay, read_eta_ms
from delayer.core.marks import LAST_DUE, X_DEATH

T = TypeVar("T")
CLOCKS_MS: Final = 5_000
"""Tolerance for times in headers, because senders' clocks may be behind and cascades late."""
LEVEL_HEADERS: Final = nservicebus.HEADERS | {X_DEATH, LAST_DUE, ETA}
"""The headers that :func:`due_at_level` reads."""


def longest_wait_seconds(level: int, routing_key: bytes) -> int:
    """The maximum remaining delay of a message in ``level``'s queue: that of a message that just arrived. The level's
    own bit does not matter, because every message in the queue waits there."""
    delay = delay_in_key(routing_key) or 0
    return (1 << level) + (delay & ((1 << level) - 1))


def due_at_level(cascade: Cascade, level: int, routing_key: bytes, headers: Mapping[bytes, object], now_ms: int) -> int:
    """The due time in epoch ms: as exact as the headers allow, and never before the cascade could deliver it. The
    latest of several times in the headers wins. Unreadable and impossible times are ignored."""
    latest_ms = now_ms + longest_wait_seconds(level, routing_key) * 1000
    soonest_ms = latest_ms - (1000 << level)
    asked_ms = _asked_ms(cascade, headers)
    due_times = [
        one
        for one in (*asked_ms, _died_ms(cascade, level, routing_key, headers))
        if one is not None and one >= soonest_ms - CLOCKS_MS
    ]
    if not due_times:
        return latest_ms
    if cascade.kind == "celery" and asked_ms[0] in due_times:
        latest_ms += 1000  # Celery cuts the fraction of a second off; its workers then wait for the eta themselves.
    return min(max(soonest_ms, *due_times), latest_ms)


def _asked_ms(cascade: Cascade, headers: Mapping[bytes, object]) -> tuple[int | None, ...]:
    """The due times in the publisher's headers."""
    match cascade.kind:
        case "nservicebus-v1" | "nservicebus-v2":
            # Messages that came from a timeout manager's store have Expire, and were sent long before.
            return _or_none(nservicebus.delayed_until_ms, headers), _or_none(nservicebus.expires_ms, headers)
        case "celery":
            return (_or_none(read_eta_ms, headers.get(ETA)),)
        case "delayer":
            due_ms = headers.get(LAST_DUE)
            return (due_ms if type(due_ms) is int else None,)


def _or_none(read: Callable[[T], int | None], value: T) -> int | None:
    try:
        return read(value)
    except UnreadableDelay:
        return None


def _died_ms(cascade: Cascade, level: int, routing_key: bytes, headers: Mapping[bytes, object]) -> int | None:
    """The due time by the broker's note that the message left the previous level; None without such a note. The note
    has whole seconds, rounded down. If its count is above 1, it has the time of the first visit, so it is ignored.
    Publishers may copy notes."""
    before = _level_before(level, routing_key)
    deaths = headers.get(X_DEATH)
    if before is None or not isinstance(deaths, list) or not deaths or not isinstance(deaths[0], dict):
        return None
    last = deaths[0]
    at = last.get("time")
    expected = (cascade.level(before), "expired", 1)
    if (last.get("queue"), last.get("reason"), last.get("count")) != expected or not isinstance(at, Timestamp):
        return None
    return (at + 1 + longest_wait_seconds(level, routing_key)) * 1000


def _level_before(level: int, routing_key: bytes) -> int | None:
    """The level where the message waited before ``level``; None if ``level`` is its first."""
    above = (delay_in_key(routing_key) or 0) >> (level + 1)
    return level + (above & -above).bit_length() if above else None
