"""When a message is due that was met in the queue of one level of a cascade. Pure.

At level L the message still has to wait there for at most 2^L seconds, and after that as many as the bits below L say.
So without knowing anything else it is due between ``bits below L`` and that plus 2^L seconds from now. What its headers
say is believed between these two only: headers are copied from message to message. An instant that lies before both is
not of this sending at all: the message would not stand there any more, and when it came nothing tells.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from delayer.core import nservicebus
from delayer.core.cascade import LEVELS, Cascade
from delayer.core.delay_headers import UnreadableDelay, read_instant_ms, shown
from delayer.core.message import Timestamp

ETA: Final = b"eta"


def eta_ms(value: object) -> int | None:
    """The instant that an ``eta`` header says, in epoch ms, rounded up. Every task has the header; that of a task which
    is not delayed is void, and this is None.

    Without a zone it is UTC, as Celery's own setting ``enable_utc`` has it. Raises UnreadableDelay.

    >>> eta_ms("1970-01-01T00:00:01.000001"), eta_ms("1970-01-01T01:00:02+01:00"), eta_ms(None)
    (1001, 2000, None)
    """
    if value is None:
        return None
    if isinstance(value, str):
        for spelled in (value, value + "Z"):
            try:
                return read_instant_ms(spelled)
            except UnreadableDelay:
                continue
    raise UnreadableDelay(f"expected an instant in ISO 8601, found {shown(value)}")


T = TypeVar("T")
X_DEATH: Final = b"x-death"
LAST_DUE: Final = b"x-delayer-due"
CLOCKS_MS: Final = 5_000
"""By how much senders' clocks may be behind, and cascades late, and an instant still be believed: of a message that is
about to leave its level."""
CONSULTED: Final = nservicebus.CONSULTED | {X_DEATH, LAST_DUE, ETA}
"""The headers that :func:`due_at_level` looks at."""

_DIGITS = re.compile(rb"(?:[01]\.){%d}" % LEVELS)


def delay_in_key(routing_key: bytes) -> int | None:
    """The whole delay in seconds that a cascade's routing key says; None for any other key.

    >>> delay_in_key(b"0." * 26 + b"1.1.Sales.Orders"), delay_in_key(b"Sales.Orders")
    (3, None)
    """
    found = _DIGITS.match(routing_key)
    return None if found is None else int(found[0].replace(b".", b""), 2)


def longest_wait_seconds(level: int, routing_key: bytes) -> int:
    """How long a message may have to wait yet that stands in the queue of ``level``: when it has just come there.

    The level's own bit is not asked: a message in its queue waits there, whatever its key says.
    """
    delay = delay_in_key(routing_key) or 0
    return (1 << level) + (delay & ((1 << level) - 1))


def due_at_level(cascade: Cascade, level: int, routing_key: bytes, headers: Mapping[bytes, object], now_ms: int) -> int:
    """The due instant in epoch ms: as exact as the message tells, and never before the cascade would have let it out,
    as far as can be told.

    Of several instants that the headers say the latest counts. What cannot be read, or cannot be, says nothing: the
    bits do.
    """
    latest_ms = now_ms + longest_wait_seconds(level, routing_key) * 1000
    soonest_ms = latest_ms - (1000 << level)
    said = _said_ms(cascade, headers)
    told = [
        one
        for one in (*said, _died_ms(cascade, level, routing_key, headers))
        if one is not None and one >= soonest_ms - CLOCKS_MS
    ]
    if not told:
        return latest_ms
    if cascade.kind == "celery" and said[0] in told:
        latest_ms += 1000  # Celery cuts the rest of a second off; its workers then wait for the eta themselves
    return min(max(soonest_ms, *told), latest_ms)


def _said_ms(cascade: Cascade, headers: Mapping[bytes, object]) -> tuple[int | None, ...]:
    """What the publisher says, in one way or several."""
    match cascade.kind:
        case "nservicebus-v1" | "nservicebus-v2":
            # What was moved out of a timeout manager's store says when it expires, and was sent long before.
            return _or_none(nservicebus.delayed_until_ms, headers), _or_none(nservicebus.expires_ms, headers)
        case "celery":
            return (_or_none(eta_ms, headers.get(ETA)),)
        case "delayer":
            due_ms = headers.get(LAST_DUE)
            return (due_ms if type(due_ms) is int else None,)


def _or_none(read: Callable[[T], int | None], said: T) -> int | None:
    try:
        return read(said)
    except UnreadableDelay:
        return None


def _died_ms(cascade: Cascade, level: int, routing_key: bytes, headers: Mapping[bytes, object]) -> int | None:
    """By the broker's note of when the message left the level before this one; None where there is no such note.

    The note has whole seconds, rounded down. Of a message that was there twice (publishers may copy notes) it is the
    first time's, so it counts only where it counts one.
    """
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
    """The level that the message waited in before ``level``; None where it waits for the first time."""
    above = (delay_in_key(routing_key) or 0) >> (level + 1)
    return level + (above & -above).bit_length() if above else None
