"""What became of a segment: a run of far-future messages that was packed, and is restored ahead of time."""

from __future__ import annotations

from typing import Final, NamedTuple

FORMAT: Final = 1
"""The packing that this program reads and writes (store/segments/codec.py)."""


class Restored(NamedTuple):
    """Its messages wait in a lane again, each under its old identity; the segment is gone.

    ``messages`` without those that were cancelled since; ``first_due_ms`` is epoch milliseconds.
    """

    segment: int
    messages: int
    first_due_ms: int


class Broken(NamedTuple):
    """It did not read back. It keeps its bytes, is marked, and stands in nobody's way until an operator tries again."""

    segment: int
    messages: int
    first_due_ms: int
    reason: str

    @property
    def advice(self) -> str:
        return (
            "after the repair of disk or memory `delayer restore --all` tries it again; if that does not help, put its "
            "row of the table segment back from a backup"
        )


class Locked(NamedTuple):
    """Others are restoring all segments that are due by then. If they die at it, the segments are there again."""

    first_due_ms: int


Restoration = Restored | Broken | Locked | None
"""What became of the attempt to restore the soonest segment. None: none is due by then."""
