"""The port of the watchdog: every loop that must not stand still reports its progress there."""

from __future__ import annotations

from typing import Protocol


class Heartbeat(Protocol):
    """The loops that make progress; they feed the watchdog."""

    def beat(self, loop: str) -> None:
        """Note that ``loop`` made progress. The first beat of a name begins its watch."""

    def forget(self, loop: str) -> None:
        """Stop watching ``loop``, which ended on purpose."""
