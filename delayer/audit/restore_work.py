"""What an executor of `delayer restore` does: rows of segments (store/segments.py: one transaction a segment).

Every Python process of Spark's loads this before its first segment: so nothing here that takes long to load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import asyncpg

from delayer.audit import turns
from delayer.audit.turns import Turns
from delayer.core.errors import StoreLost
from delayer.core.giving_way import Pace
from delayer.core.segment import Broken, Restored
from delayer.store import segments, session
from delayer.store.errors import DAMAGED, DRIVER_ERRORS, WORTH_REPEATING, describe
from delayer.store.segments import Fence

ATTEMPTS: Final = 5
PAUSE: Final = 0.005
"""Seconds after each portion of rows beside traffic, by Pace.share of them; a portion takes about as long."""
PATIENCE: Final = 0.1
"""Seconds to wait for somebody else's lock, twice as long each time: 3 s in all."""


class Back(NamedTuple):
    """What became of a segment. ``gone``: a daemon, or another job, was quicker. ``locked``: another session has it,
    and whether that one restores it nobody knows yet. ``lost``, ``broken``: reasons."""

    segment: int
    messages: int
    gone: bool = False
    locked: bool = False
    lost: str | None = None
    broken: str | None = None

    @property
    def restored(self) -> bool:
        return not (self.gone or self.locked or self.lost or self.broken)


def work(url: str, fence: Fence, ids: Iterable[int], *, soon: bool = False) -> list[Back]:
    """On an executor: restore the segments ``ids``, one after the other; in a hurry if they are due ``soon``."""
    return asyncio.run(_work(url, fence, soon, list(ids)))


async def _work(url: str, fence: Fence, soon: bool, ids: Sequence[int]) -> list[Back]:
    try:
        connection = await session.connect(url, "delayer restore", {**turns.SESSION, **session.LAZY})
    except StoreLost as error:
        return [Back(one, 0, lost=str(error)) for one in ids]
    back: list[Back] = []
    try:
        ours = Turns(connection, hurried=soon)
        for one in ids:
            back.append(await restore_segment(connection, fence, one, ours))
        await session.flush(connection)
    except DRIVER_ERRORS as error:  # of the flush: perhaps the last of them are undone
        return [_perhaps(one, describe(error)) if one.restored else one for one in back]
    else:
        return back
    finally:
        await session.close(connection)


async def restore_segment(
    connection: asyncpg.Connection, fence: Fence, segment: int, ours: Turns | None = None
) -> Back:
    """Restore one segment. A transaction that lost against another one is tried again, and so is a segment that
    another session has locked: a daemon that is about to restore it, or one that died and whose end the server sees
    later than we do."""
    lost: str | None = None
    ours = ours or Turns(connection, hurried=True)
    for attempt in range(ATTEMPTS):
        try:
            async with ours.turn() as pace:
                found = await _restored(connection, fence, segment, pace)
            if found is not None:
                return _back(segment, found)
            lost = None
            if not await segments.exists(connection, segment):
                return Back(segment, 0, gone=True)
            await asyncio.sleep(PATIENCE * 2**attempt)
        except WORTH_REPEATING as error:
            lost = describe(error)
        except DAMAGED as error:  # it ends nobody else's work
            return Back(segment, 0, broken=f"the store cannot read it, or write its rows: {describe(error)}")
        except DRIVER_ERRORS as error:
            return Back(segment, 0, lost=describe(error))
        except StoreLost as error:  # LaneLost too: our driver is gone, or hangs
            return Back(segment, 0, lost=str(error))
    return Back(segment, 0, locked=lost is None, lost=lost)


async def _restored(connection: asyncpg.Connection, fence: Fence, segment: int, pace: Pace) -> Restored | Broken | None:
    """At once, or in small portions with pauses, as daemons do it."""
    if not pace.giving_way:
        return await segments.restore(connection, fence, segment)
    return await segments.restore(
        connection, fence, segment, portion_bytes=segments.SMALL_PORTION_BYTES, pause=PAUSE * pace.share
    )


def _perhaps(one: Back, reason: str) -> Back:
    """What is not sure to be kept is in no total."""
    return Back(one.segment, 0, lost=f"{reason}; perhaps its {one.messages} messages are restored")


def _back(segment: int, found: Restored | Broken) -> Back:
    match found:
        case Broken():
            return Back(segment, 0, broken=f"{found.reason}; {found.advice}" if found.newer else found.reason)
        case Restored():
            return Back(segment, found.messages)
