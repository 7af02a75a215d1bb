"""What became of a segment: a run of far-future messages that was packed, and is asked for again."""

from __future__ import annotations

from typing import Final, NamedTuple

FORMAT: Final = 1
"""The newest packing that this program reads and the one that it writes (store/segments/codec.py)."""

NEWER: Final = "let daemons of the version that packed it run here: they restore it, and this one leaves it to them"
MEND: Final = (
    "it is tried again at every start and every hour, and by `delayer restore --all` at once; if that does not help, "
    "put its row of the table segment back from a backup"
)


class Restored(NamedTuple):
    """Its messages wait in a lane again, each under its old identity; the segment is gone.

    ``messages`` without those that were cancelled since; ``first_due_ms`` is epoch milliseconds.
    """

    segment: int
    messages: int
    first_due_ms: int


class Broken(NamedTuple):
    """It did not read back. It keeps its bytes, is marked, and stands in nobody's way until it is tried again.

    ``newer``: it is not ours to read, as a newer program packed it. Then it is not marked: others restore it.
    ``known``: it was marked before.
    """

    segment: int
    messages: int
    first_due_ms: int
    reason: str
    newer: bool = False
    known: bool = False

    @property
    def advice(self) -> str:
        return NEWER if self.newer else MEND


class Locked(NamedTuple):
    """Others are restoring all segments that are due by then. If they die at it, the segments are there again."""

    first_due_ms: int


Restoration = Restored | Broken | Locked | None
"""What became of the attempt to restore the soonest segment. None: none is due by then."""
