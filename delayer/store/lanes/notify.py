"""LISTEN and NOTIFY for the owner of a lane, when another process puts a row into it.

Parks of a limited route, restores, imports, reschedules and retries notify. An owner's own parks need no notification.
A notification is only a hint. An owner that misses it finds the row in its scan, once a minute. Any role may send one,
for nothing, as often as it likes (docs/security.md).
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Final

from asyncpg import Connection

from delayer.core.filters import EARLIEST_MS, LAST_MS

WAITING: Final = "waiting"
HELD: Final = "held"
INBOX: Final = "delayer_inbox"
"""The channel on which the functions of the SQL inbox notify."""
INBOX_READER: Final = "delayer inbox"
"""The name of the session that reads it, and holds its lock."""
VAIN_SECONDS: Final = 0.02
"""Seconds between two queries that notifications caused, and that found nothing."""
# In the order of lanes, so that two processes that lower the same lanes cannot deadlock.
_LOWER = (
    "UPDATE lane AS l SET watermark = told.due"
    " FROM (SELECT number, due FROM lane JOIN unnest($1::smallint[], $2::timestamptz[]) AS t (lane, due)"
    " ON number = t.lane WHERE watermark > due ORDER BY number FOR NO KEY UPDATE OF lane) AS told"
    " WHERE l.number = told.number"
)


class VainPace:
    """Limits the queries that a flood of notifications causes. It delays neither the first notification after a quiet
    time, nor one after a query that found a row."""

    def __init__(self) -> None:
        self._next = -math.inf

    def pause(self, now: float) -> float:
        """Seconds to pause at ``now``, after a query that found nothing."""
        seconds = max(0.0, self._next - now)
        self._next = now + seconds + VAIN_SECONDS
        return seconds


def channel(lane: int) -> str:
    return f"delayer_lane_{lane}"


def soonest(dues: Iterable[tuple[int, int]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for lane, at_ms in dues:
        found[lane] = min(at_ms, found.get(lane, at_ms))
    return found


async def notify(connection: Connection, waiting: Mapping[int, int], held: Mapping[int, int]) -> None:
    """At the commit, notify the owners of these lanes of the soonest instant of each. A lane may have no owner now, and
    its next owner begins at the saved watermark, so lower that too. Raises the driver's errors."""
    if waiting:
        lanes = sorted(waiting)
        await connection.execute(_LOWER, lanes, [waiting[lane] for lane in lanes])
    for kind, dues in ((WAITING, waiting), (HELD, held)):
        for lane, at_ms in dues.items():
            await connection.execute("SELECT pg_notify($1, $2)", channel(lane), f"{kind} {at_ms}")


async def listen(connection: Connection, lane: int, told: Callable[[str, int], None]) -> Callable[[], Awaitable[None]]:
    """Call ``told`` for each notification about ``lane``, on the connection that holds its lock, with the kind (WAITING
    or HELD) and the instant (epoch ms) from which the row can be claimed. Returns the function that stops listening."""

    def on_notification(_connection: object, _pid: int, _channel: str, payload: str) -> None:
        if (one := parse_payload(payload)) is not None:
            told(*one)

    await connection.add_listener(channel(lane), on_notification)
    return partial(connection.remove_listener, channel(lane), on_notification)


def parse_payload(payload: str) -> tuple[str, int] | None:
    """The kind and instant of a payload; None if it is not ours, because any session may notify. An instant that no row
    can have would make every claim fail, or stop the process."""
    kind, _, at = payload.partition(" ")
    if kind not in (WAITING, HELD):
        return None
    try:
        at_ms = int(at)
    except ValueError:
        return None
    return (kind, at_ms) if EARLIEST_MS <= at_ms <= LAST_MS else None
