"""Segments, packed runs of far-future messages: the results of restoring, and the error for a damaged segment."""

from __future__ import annotations

from typing import Final, NamedTuple

FORMAT: Final = 1
"""The format that this program reads (store/segments/codec.py) and writes (packing.py)."""


class SegmentBroken(Exception):
    """A segment is unreadable. The text names the expected and the found value, and quotes no message."""


class Restored(NamedTuple):
    """The segment is gone, and its messages wait in a lane again, with their old identities. ``messages`` does not
    count messages cancelled since the packing; ``first_due_ms`` is epoch milliseconds."""

    segment: int
    messages: int
    first_due_ms: int


class Broken(NamedTuple):
    """The segment is unreadable. Its bytes stay, and it is skipped until an operator retries."""

    segment: int
    messages: int
    first_due_ms: int
    reason: str


class Locked(NamedTuple):
    """Other processes are restoring all segments due by then. If they die, the segments are available again."""

    first_due_ms: int


Restoration = Restored | Broken | Locked | None
"""The result of restoring the soonest segment; None if no segment is due by then."""
