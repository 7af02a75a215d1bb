"""A message and a segment as the rules see them, and the constants that the rules share. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Final, NamedTuple

from delayer.store.status import RESTORED_MS

WAITING, HELD, PACKED = "waiting", "held", "segment"
"""Where a message stands: a row of ``message``, a row of ``held``, inside a segment."""
PACED = "paced"
"""Overdue rows of a route with ``max_rate`` are counted apart: they wait because somebody wants them to."""

DAY_MS: Final = 86_400_000
GRACE_MS: Final = 60_000
"""How long past its due time a message is before it counts as overdue: a release at work is not worth a word."""
STUCK_MS: Final = 3_600_000
"""Overdue for longer than this is a violation even in a lane with an owner: it should have been released long ago."""
EXAMPLES: Final = 5
"""Ids that a finding names."""


class Message(NamedTuple):
    """``home`` is the partition's name, and empty in held and in segments. ``retry_ms``: when a held one is to be tried
    again. ``crc`` is what the checksum of its bytes is now."""

    where: str
    home: str | None
    id: int
    lane: int
    due_ms: int
    parked_ms: int
    checksum: int
    format: int
    route: bytes
    to_exchange: bytes
    to_key: bytes
    properties: bytes
    key: bytes | None
    retry_ms: int | None
    body_bytes: int
    crc: int
    body_digest: bytes


class Segment(NamedTuple):
    """One segment. ``unpacked`` messages came out of it now, ``live`` of them without a tombstone, and what is
    ``found_…`` of them should be what the segment says of itself; ``fault`` says why it did not read back, or is None.
    ``tombstones`` are its rows of segment_cancelled. A segment without ``lane`` is not there: only its tombstones."""

    id: int
    lane: int | None
    first_due_ms: int
    last_due_ms: int
    first_id: int
    last_id: int
    messages: int
    cancelled: int
    raw_bytes: int
    packed_bytes: int
    unpacked: int | None
    live: int | None
    found_first_due_ms: int | None
    found_last_due_ms: int | None
    found_first_id: int | None
    found_last_id: int | None
    found_raw_bytes: int | None
    fault: str | None
    broken_ms: int | None
    broken: str | None
    tombstones: int


class Lane(NamedTuple):
    """``alive`` is None where the lanes' locks cannot be seen."""

    number: int
    owner: str
    alive: bool | None


@dataclass(frozen=True)
class Context:
    """What judging one message needs beside it. ``partitions``: the interval [first, after) of each partition of days,
    in epoch ms; the default partition is not in it. ``whole``: every row is read, not a sample. ``restored_ms``: how
    long before its first message is due a segment should have been restored. ``paced``: what routes may release, in
    messages a second, where that is limited."""

    now_ms: int
    partitions: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    whole: bool = True
    restored_ms: int = RESTORED_MS
    paced: Mapping[bytes, int] = field(default_factory=dict)

    @cached_property
    def _intervals(self) -> list[tuple[int, int]]:
        return sorted(self.partitions.values())

    def has_partition(self, due_ms: int) -> bool:
        """Is there a partition of days for this instant?"""
        position = bisect_right(self._intervals, due_ms, key=itemgetter(0))
        return position > 0 and due_ms < self._intervals[position - 1][1]
