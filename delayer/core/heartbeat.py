"""The port of the watchdog: every loop that must not stall reports its progress there."""

from __future__ import annotations

from typing import Protocol


class Heartbeat(Protocol):
    """Tracks which loops make progress, to feed the watchdog."""

    def beat(self, loop: str) -> None:
        """Note that ``loop`` made progress. The first beat of a name starts its watch."""

    def forget(self, loop: str) -> None:
        """Stop watching ``loop``, which ended on purpose."""
