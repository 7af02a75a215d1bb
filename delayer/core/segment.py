"""What became of a segment: a run of far-future messages that was packed, and is asked for again."""

from __future__ import annotations

from typing import NamedTuple


class Restored(NamedTuple):
    """Its messages wait in a lane again, each under its old identity; the segment is gone.

    ``messages`` without those that were cancelled since; ``first_due_ms`` is epoch milliseconds.
    """

    segment: int
    messages: int
    first_due_ms: int


class Broken(NamedTuple):
    """It did not read back. It keeps its bytes, is marked, and stands in nobody's way from now on."""

    segment: int
    messages: int
    first_due_ms: int
    reason: str
