"""Segments, packed runs of far-future messages: the results of restoring one, and the error of one that is damaged."""

from __future__ import annotations

from typing import Final, NamedTuple

FORMAT: Final = 1
"""The format that this program reads (store/segments/codec.py) and writes (packing.py)."""


class SegmentBroken(Exception):
    """A segment does not read back. The text has the expected and the found; it quotes no message."""


class Restored(NamedTuple):
    """The segment is gone, and its messages wait in a lane again, each under its old identity.

    ``messages`` does not count messages cancelled since the packing; ``first_due_ms`` is epoch milliseconds.
    """

    segment: int
    messages: int
    first_due_ms: int


class Broken(NamedTuple):
    """The segment is unreadable. Its bytes stay, and it is skipped until an operator tries again."""

    segment: int
    messages: int
    first_due_ms: int
    reason: str


class Locked(NamedTuple):
    """Other processes are restoring all segments that are due by then. If they die, the segments are there again."""

    first_due_ms: int


Restoration = Restored | Broken | Locked | None
"""The result of an attempt to restore the soonest segment. None: no segment is due by then."""
