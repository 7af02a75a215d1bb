"""Progress: when a lane or a queue counts as stuck, and the port of the watchdog, where loops report theirs."""

from __future__ import annotations

from typing import Final, Protocol

STUCK_SECONDS: Final = 30.0
"""A lane with due rows, or a queue with unsettled deliveries, counts as stuck after this time without progress. A claim
or a batch takes at most ten seconds while broker and store are well."""


class Heartbeat(Protocol):
    """Tracks which loops make progress, to feed the watchdog."""

    def beat(self, loop: str) -> None:
        """Note that ``loop`` made progress. The first beat of a name starts its watch."""

    def forget(self, loop: str) -> None:
        """Stop watching ``loop``, which ended on purpose."""
