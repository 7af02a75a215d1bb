"""What an executor of `delayer compact` does: segments of windows (store/compacting.py: one transaction a segment).

Every Python process of Spark's loads this before its first segment: so no settings here, and nothing that takes long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import asyncpg

from delayer.audit import turns
from delayer.audit.errors import DaemonsOutdated
from delayer.audit.turns import Turns
from delayer.core.errors import StoreLost
from delayer.store import compacting, owners, session
from delayer.store.compacting import Compacted, Window
from delayer.store.errors import DRIVER_ERRORS, WORTH_REPEATING, describe

PORTION: Final = 1_000
"""Rows that are locked at once beside traffic: 10 ms of the server's, and a megabyte of its log."""
PAUSE: Final = 0.01
"""Seconds after each portion, by Pace.share of them."""
ATTEMPTS: Final = 5
"""How often a window is tried that loses against other transactions."""


class Packed(NamedTuple):
    """What became of a window. ``lost`` and ``broken`` are reasons: the store was out of reach; a segment did not read
    back and was not kept. What was committed before stays."""

    window: Window
    segments: int
    messages: int
    raw_bytes: int
    packed_bytes: int
    lost: str | None = None
    broken: str | None = None
    perhaps: int = 0
    """Messages that were packed, but may be undone: they are in no total."""


def work(url: str, rows: int, windows: Iterable[Window]) -> list[Packed]:
    """On an executor: make segments of ``windows``, one after the other."""
    return asyncio.run(_work(url, rows, list(windows)))


async def _work(url: str, rows: int, windows: Sequence[Window]) -> list[Packed]:
    try:
        connection = await session.connect(url, "delayer compact", {**turns.SESSION, **session.LAZY})
    except StoreLost as error:
        return [Packed(window, 0, 0, 0, 0, lost=str(error)) for window in windows]
    packed: list[Packed] = []
    try:
        if lanes := await owners.without_segments(connection):  # started since it was planned
            return [Packed(window, 0, 0, 0, 0, lost=str(DaemonsOutdated(lanes))) for window in windows]
        ours = Turns(connection)
        for window in windows:
            packed.append(await pack_window(connection, window, rows, ours))
        await session.flush(connection)
    except DRIVER_ERRORS as error:  # of the flush, mostly: perhaps the last of them are undone
        told = {one.window: one for one in packed}
        return [_perhaps(told.get(window, Packed(window, 0, 0, 0, 0)), describe(error)) for window in windows]
    else:
        return packed
    finally:
        await session.close(connection)


def _perhaps(one: Packed, reason: str) -> Packed:
    """What is not sure to be kept is in no total, but its day is looked at."""
    lost = one.lost or (f"{reason}; perhaps {one.messages} messages more were packed" if one.messages else reason)
    return Packed(one.window, 0, 0, 0, 0, lost, one.broken, one.messages)


async def pack_window(connection: asyncpg.Connection, window: Window, rows: int, ours: Turns | None = None) -> Packed:
    """Segments of ``window`` until nothing is left there that can be taken."""
    from delayer.store.packing import SegmentBroken  # noqa: PLC0415 - pyarrow

    made: list[Compacted] = []
    ours = ours or Turns(connection)
    lost = broken = None
    attempts = 0
    while attempts < ATTEMPTS:
        try:
            async with ours.turn() as pace:
                portion = PORTION if pace.giving_way else None
                one = await compacting.compact_one(
                    connection, window, rows=rows, portion=portion, pause=PAUSE * pace.share
                )
                if one is not None:
                    made.append(one)  # whatever happens to the turn
        except WORTH_REPEATING as error:
            attempts += 1
            lost = describe(error)
            continue
        except DRIVER_ERRORS as error:
            lost = describe(error)
            break
        except SegmentBroken as error:
            broken = f"lane {window.lane}, due from {window.first_ms}: {error.reason}"
            break
        lost, attempts = None, 0
        if one is None or not one.more:
            break
    return Packed(
        window,
        len(made),
        sum(one.messages for one in made),
        sum(one.raw_bytes for one in made),
        sum(one.packed_bytes for one in made),
        lost,
        broken,
    )
