"""Compacting: rows that are due in the far future become segments, one transaction each."""

from __future__ import annotations

from typing import Final, NamedTuple

import asyncpg

ROWS: Final = 10_000
"""Messages of a segment at most."""
BYTES: Final = 32 << 20
"""Bodies and properties of a segment at most, in bytes; one message is taken whatever its size."""


class Window(NamedTuple):
    """A piece of a lane: its rows due from ``first_ms`` to ``last_ms``, both included (epoch milliseconds).

    ``rows`` is how many there are about, for the progress bar: counted without locks, rows with a key among them.
    """

    lane: int
    first_ms: int
    last_ms: int
    rows: int


class Compacted(NamedTuple):
    """A segment that was committed. ``more``: the window may have rows left, as a limit was met."""

    segment: int
    messages: int
    raw_bytes: int
    packed_bytes: int
    more: bool


async def windows(connection: asyncpg.Connection, after_ms: int, rows: int = ROWS) -> list[Window]:
    """Cut what is due after ``after_ms`` (epoch ms) into windows of about ``rows`` rows. Raises the driver's errors."""
    raise NotImplementedError


async def compact_one(
    connection: asyncpg.Connection, window: Window, *, rows: int = ROWS, max_bytes: int = BYTES
) -> Compacted | None:
    """One segment from the first rows of ``window``, in one transaction of its own; None when nothing is left there.

    Call it again while ``more``. Rows with a key and rows that somebody has locked stay rows. Raises the driver's
    errors, and SegmentBroken when what was written does not read back: then nothing is committed.
    """
    raise NotImplementedError
