"""What a message keeps of an earlier trip, and why that must not decide the next trip. Pure.

A message may come back: dead-lettered into a route, or republished with the headers it was received with. It then
carries the marks of the delay that is over (:data:`LAST_DUE`, a negative ``x-delay``), the forms of a delay that
releases leave in place (a ``timestamp``, an ``eta``), and the stamp of an earlier publish.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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
    """Whether the delay that a release left in the message is the one that has passed. ``due_ms``: its due time in
    epoch ms. A relative one (None) counts again, because it may be new, and nothing may be early."""
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
