"""What a message keeps of an earlier trip, and why that must not decide the next trip. Pure.

A message may come back: dead-lettered into a route, or republished with the headers it was received with. Three things
may be left from its earlier trip: the marks of a finished delay (:data:`LAST_DUE`, a negative ``x-delay``), a form of
the delay that a release does not remove (a ``timestamp``, an ``eta``), and the stamp of that publish.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from delayer.amqp.values import Timestamp

ID: Final = b"x-delayer-id"
"""The id of a message's last publish; every edit sets it."""
LAST_DUE: Final = b"x-delayer-due"
"""The due time of the last delay, in epoch milliseconds; every release sets it."""
OWN_PREFIX: Final = b"x-delayer-"
"""Prefix of the headers that are delayer's own notes."""
RECEIVED_AT: Final = b"timestamp_in_ms"
"""The broker's stamp of when it accepted the publish, in epoch milliseconds."""
X_DEATH: Final = b"x-death"
_FIRST_DEATH: Final = frozenset({b"x-first-death-exchange", b"x-first-death-queue", b"x-first-death-reason"})
MARKS: Final = frozenset({LAST_DUE, RECEIVED_AT, X_DEATH}) | _FIRST_DEATH
"""The headers that these functions read."""


def is_over(due_ms: int | None, headers: Mapping[bytes, object], now_ms: int) -> bool:
    """Whether the delay in the message is left from a release, and has passed. ``due_ms``: its due time in epoch ms. A
    relative delay (None) counts again, because it may be new, and nothing may be early."""
    if due_ms is None or LAST_DUE not in headers:
        return False
    last_due = headers[LAST_DUE]
    # Clients and other protocols may turn the number into text, or into a type without its last digits.
    is_exact = type(last_due) is int or (isinstance(last_due, str) and re.fullmatch("[0-9]{1,19}", last_due))
    return due_ms <= (min(int(last_due), now_ms) if is_exact else now_ms)  # type: ignore[call-overload]


def received_ms(headers: Mapping[bytes, object], now_ms: int) -> int | None:
    """The broker's stamp in epoch ms if it can be from this publish; else None. By default the broker keeps an existing
    stamp. A stamp ahead of the clock, or older than the last release or dead-lettering, is from another publish."""
    stamp = headers.get(RECEIVED_AT)
    if type(stamp) is not int or not 0 < stamp <= now_ms:
        return None
    if LAST_DUE in headers:
        last_due = headers[LAST_DUE]
        if type(last_due) is not int or stamp <= last_due:
            return None
    dead_lettered = not headers.keys().isdisjoint({X_DEATH, *_FIRST_DEATH})
    return None if dead_lettered and not _died_before(stamp, headers.get(X_DEATH)) else stamp


def _died_before(stamp_ms: int, deaths: object) -> bool:
    """Whether each death in ``x-death`` certainly precedes the stamp. Its times are whole seconds, rounded down, and a
    repeated death has the time of the first."""
    if not isinstance(deaths, list) or not deaths:
        return False
    return all(
        isinstance(death, dict)
        and death.get("count", 1) == 1
        and isinstance(at := death.get("time"), Timestamp)
        and (at + 1) * 1000 <= stamp_ms
        for death in deaths
    )


WATCHED_MS: Final = 10_000
"""How long a message loops before it is reported."""
MOST_TRIPS_PER_SECOND: Final = 10
LOST_MS: Final = 1_000
"""A message that has not come back within this time is not in a loop."""


@dataclass(slots=True)
class _Followed:
    message: int
    """The hash of the message's id, or of its body."""
    since_ms: int
    last_ms: int
    """When the message was last on the route."""
    trips: int = 0


class LoopWatch:
    """Follows one message per route, to detect a loop: the route passes it on at once, and it comes back at once. That
    is an error of configuration: a queue dead-letters into a route that does not delay its messages. The marks do not
    show it, because other routes and daemons set them too."""

    def __init__(self) -> None:
        self._followed: dict[bytes, _Followed] = {}
        self._reported: set[bytes] = set()

    def returned(self, route: bytes, message: bytes, due_ms: int, now_ms: int) -> bool:
        """Note that a message came back to ``route``. Returns True if it loops, once for each route. ``message``: its
        id, or its body. ``due_ms``: when it is due now. Times are epoch milliseconds."""
        if route in self._reported or due_ms - now_ms > LOST_MS:  # A message that waits is in no loop.
            return False
        one, found = self._followed.get(route), hash(message)
        if one is None or now_ms - one.last_ms > LOST_MS:
            self._followed[route] = _Followed(found, now_ms, now_ms)
        elif one.message == found:
            one.trips, one.last_ms = one.trips + 1, now_ms
            watched_ms = now_ms - one.since_ms
            if watched_ms >= WATCHED_MS:
                if one.trips * 1000 > MOST_TRIPS_PER_SECOND * watched_ms:
                    self._reported.add(route)
                    return True
                del self._followed[route]
        return False
