"""Notifications to the owner of a lane, by LISTEN and NOTIFY: another process put a row into the lane.

Parks of a limited route, restores, imports, reschedules and retries notify. The owner's own parks need no notification.
A notification is a hint: an owner that misses one finds the row by its scan, once a minute.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Final

from asyncpg import Connection

WAITING: Final = "waiting"
HELD: Final = "held"
# In the order of lanes: two processes that lower the same ones must not wait for each other.
_LOWER = (
    "UPDATE lane AS l SET watermark = told.due"
    " FROM (SELECT number, due FROM lane JOIN unnest($1::smallint[], $2::timestamptz[]) AS t (lane, due)"
    " ON number = t.lane WHERE watermark > due ORDER BY number FOR NO KEY UPDATE OF lane) AS told"
    " WHERE l.number = told.number"
)


def channel(lane: int) -> str:
    """The notification channel of a lane."""
    return f"delayer_lane_{lane}"


def soonest(dues: Iterable[tuple[int, int]]) -> dict[int, int]:
    """The soonest instant of each lane."""
    found: dict[int, int] = {}
    for lane, at_ms in dues:
        found[lane] = min(at_ms, found.get(lane, at_ms))
    return found


async def notify(connection: Connection, waiting: Mapping[int, int], held: Mapping[int, int]) -> None:
    """Notify the owners of these lanes when the open transaction commits: the soonest instant for each lane.

    A lane may have no owner at this moment. Its next owner begins at the written watermark, so that is lowered. Raises
    the driver's errors.
    """
    if waiting:
        lanes = sorted(waiting)
        await connection.execute(_LOWER, lanes, [waiting[lane] for lane in lanes])
    for kind, dues in ((WAITING, waiting), (HELD, held)):
        for lane, at_ms in dues.items():
            await connection.execute("SELECT pg_notify($1, $2)", channel(lane), f"{kind} {at_ms}")


async def listen(connection: Connection, lane: int, told: Callable[[str, int], None]) -> Callable[[], Awaitable[None]]:
    """Pass on notifications from now on, on the connection that holds the lock of ``lane``. ``told`` hears of a WAITING
    or a HELD row, and from which instant on it is to be claimed (epoch ms). Returns the function that ends this."""

    def on_notification(_connection: object, _pid: int, _channel: str, payload: str) -> None:
        if (one := parsed(payload)) is not None:
            told(*one)

    await connection.add_listener(channel(lane), on_notification)
    return partial(connection.remove_listener, channel(lane), on_notification)


def parsed(payload: str) -> tuple[str, int] | None:
    """The kind and the instant of a payload; None if it is not ours, as any session may notify."""
    kind, _, at = payload.partition(" ")
    if kind not in (WAITING, HELD):
        return None
    try:
        return kind, int(at)
    except ValueError:
        return None
