"""Telling the owner of a lane what somebody else put into it, so that it need not wait for its next look back.

A notification reaches the lane's own connection between two of its transactions. It is a hint: whoever misses it (a
lane without an owner, one of an older version) finds the row by looking back, once a minute. So nothing here is needed
for a message to arrive, only for it to be punctual. The parking and the releasing never notify: they own their lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import asyncpg

WAITING: Final = "waiting"
HELD: Final = "held"
_LOWER = (
    "UPDATE lane AS l SET watermark = told.due FROM unnest($1::smallint[], $2::timestamptz[]) AS told (lane, due)"
    " WHERE l.number = told.lane AND l.watermark > told.due"
)


class Told(NamedTuple):
    """What was put into a lane: WAITING or HELD, and the instant from which on it is to be looked at (epoch ms)."""

    kind: str
    at_ms: int


def channel(lane: int) -> str:
    """The name that the owner of a lane listens to."""
    return f"delayer_lane_{lane}"


async def tell(connection: asyncpg.Connection, waiting: Mapping[int, int], held: Mapping[int, int]) -> None:
    """Tell, when the open transaction commits: the soonest instants by lane. Lanes whose owner is gone are told by
    their watermark, which the next one begins at. Raises the driver's errors."""
    if waiting:
        lanes = sorted(waiting)
        await connection.execute(_LOWER, lanes, [waiting[lane] for lane in lanes])
    for kind, soonest in ((WAITING, waiting), (HELD, held)):
        for lane, at_ms in soonest.items():
            await connection.execute("SELECT pg_notify($1, $2)", channel(lane), f"{kind} {at_ms}")


class Mailbox:
    """Keeps what is told until somebody hears it: from the first moment that anything may be told."""

    def __init__(self) -> None:
        self._kept: list[Told] = []
        self._hear: Callable[[Told], None] = self._kept.append

    async def listen(self, connection: asyncpg.Connection, lane: int) -> None:
        """Take what the owner of ``lane`` is told, on the connection that holds its lock."""
        await connection.add_listener(channel(lane), self._on_note)

    def open(self, hear: Callable[[Told], None]) -> None:
        """Hear what was kept, and from now on everything at once."""
        self._hear = hear
        for told in self._kept:
            hear(told)

    def _on_note(self, _connection: object, _pid: int, _channel: str, payload: str) -> None:
        told = read(payload)
        if told is not None:
            self._hear(told)


def read(payload: str) -> Told | None:
    """What a notification says; None for what is none of ours: anybody may notify."""
    kind, _, at = payload.partition(" ")
    if kind not in (WAITING, HELD):
        return None
    try:
        return Told(kind, int(at))
    except ValueError:
        return None
