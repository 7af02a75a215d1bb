"""Segments as they stand in the store: how many, which, restoring them, and cancelling inside them.

Whoever changes a segment, or what it holds, has its row locked (FOR UPDATE): so a cancel is exact against a restore.
Locks are taken in the order of keys.py, and segments after held rows:

    keys' advisory locks, messages' rows, held rows, segments by id, rows of message_key, the lane's fence, the counters
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

import asyncpg

from delayer.core.segment import Broken, Restored


class Into(Protocol):
    """The lane that a segment is restored into; a PostgresLane, or a :class:`Fence` of one that somebody else holds."""

    @property
    def number(self) -> int: ...

    @property
    def epoch(self) -> int: ...


class Fence(NamedTuple):
    """Number and epoch of a lane, for executors: the driver of the job holds its lock."""

    number: int
    epoch: int


class Listed(NamedTuple):
    """A segment as it stands. Instants are epoch milliseconds, ``first_due_ms`` rounded down."""

    id: int
    lane: int
    first_due_ms: int
    last_due_ms: int
    messages: int
    cancelled: int
    raw_bytes: int
    packed_bytes: int
    made_ms: int
    broken: str | None

    @property
    def live(self) -> int:
        """Messages that will come back."""
        return self.messages - self.cancelled


class Counted(NamedTuple):
    """All segments together. ``next_due_ms`` is the first due instant of those that are not broken."""

    segments: int
    messages: int
    """The live ones, in broken segments too."""
    broken: int
    broken_messages: int
    next_due_ms: int | None


class Found(Enum):
    """Where a cancel met a message."""

    WAITING = "waiting"
    HELD = "held"
    SEGMENT = "segment"
    NOWHERE = "nowhere"


async def count(connection: asyncpg.Connection) -> Counted:
    """Count them: cheap, no segment is read. Raises the driver's errors."""
    raise NotImplementedError


async def listed(
    connection: asyncpg.Connection, before_ms: int | None = None, limit: int | None = None
) -> list[Listed]:
    """The segments whose first message is due before ``before_ms``, the soonest first. Raises the driver's errors."""
    raise NotImplementedError


async def due_soon(connection: asyncpg.Connection, horizon_ms: int, limit: int = 1000) -> list[int]:
    """Ids of the segments whose first message is due by ``horizon_ms`` (epoch ms), the soonest first; none that is
    broken. Raises the driver's errors."""
    raise NotImplementedError


async def restore_one(
    connection: asyncpg.Connection,
    into: Into,
    horizon_ms: int,
    *,
    portion_bytes: int = 1 << 20,
    pause: float = 0.0,
) -> Restored | Broken | None:
    """Restore the soonest segment that is due by ``horizon_ms`` and that nobody else has locked, in one transaction.

    The rows go into ``into``, in portions of about ``portion_bytes`` with ``pause`` seconds after each. Decoding and
    encoding are done in a thread. A lane of this process must be told: ``note_parked(restored.first_due_ms)``; after an
    error too, as the commit may be in doubt.

    None: there is no such segment. Broken: it did not read back, and was marked so. Raises LaneLost when the lane
    changed its owner, and the driver's errors; then nothing is committed.
    """
    raise NotImplementedError


async def restore(
    connection: asyncpg.Connection, into: Into, segment: int, *, portion_bytes: int = 1 << 20, pause: float = 0.0
) -> Restored | Broken | None:
    """Restore the segment of this id, as :func:`restore_one` does; broken ones are tried again. None: it is gone, or
    somebody else has it locked."""
    raise NotImplementedError


async def cancel(connection: asyncpg.Connection, ids: Collection[int]) -> dict[int, Found]:
    """Cancel messages by id, in one transaction: rows that wait, held ones, and those in segments.

    A message that is being released is waited for, and then NOWHERE, or waiting again. Raises the driver's errors.
    """
    raise NotImplementedError


async def mark_broken(connection: asyncpg.Connection, segment: int, reason: str) -> bool:
    """Write down that a segment did not read back, unless that is known. Whether it was news. Raises the driver's
    errors."""
    raise NotImplementedError


async def find(connection: asyncpg.Connection, ids: Sequence[int]) -> dict[int, int]:
    """In which segment each of the messages ``ids`` is, of those that are in one and not cancelled."""
    raise NotImplementedError
