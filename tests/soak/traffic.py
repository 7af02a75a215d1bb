"""What passes a fleet while everything breaks: messages without an end, in one mode and then in the other."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import psutil

from tests.faults.fleet import Fleet

MODES: Final[Mapping[str, float]] = {"store": 40.0, "native": 20.0}
"""How long each lasts, in turn. The cascade costs the broker ten times the work of the store for a message, so most of
the messages go through the store either way."""
WAITING: Final[Mapping[str, int]] = {"store": 40_000, "native": 45_000}
"""How many may be under way before no more are published. The second is more, so that there is room for some of them
when the first have not come back."""
PORTION: Final[Mapping[str, int]] = {"store": 1_000, "native": 200}
DOOMED: Final = 5
"""Beside each portion, of those that have to be refused."""
PACE: Final[Mapping[str, float]] = {"store": 0.0, "native": 0.2}
"""Seconds between two portions."""
LONGEST_MS: Final = 5_000


class Traffic:
    """``modes``: how many were published in which. ``largest``: bytes of memory that a daemon ever had."""

    def __init__(self, fleet: Fleet) -> None:
        self.modes: Counter[str] = Counter()
        self.largest = 0
        self._fleet = fleet

    async def publish(self, over: asyncio.Event) -> None:
        """Until it is over."""
        fleet, ledger, account = self._fleet, self._fleet.ledger, self._fleet.ledger.account
        while not over.is_set():
            mode = fleet.mode
            if account.sent - account.back >= WAITING[mode]:
                with suppress(AssertionError):
                    await ledger.until(lambda mode=mode: account.sent - account.back < WAITING[mode], timeout=1.0)
                continue
            await ledger.publish(PORTION[mode], longest_ms=LONGEST_MS, doomed_ones=DOOMED)
            self.modes[mode] += PORTION[mode]
            await asyncio.sleep(PACE[mode])

    async def alternate(self) -> None:
        """From mode to mode, until cancelled."""
        while True:
            for mode, seconds in MODES.items():
                self._fleet.switch(mode)
                await asyncio.sleep(seconds)

    async def measure(self) -> None:
        """How large the daemons are, until cancelled."""
        while True:
            for daemon in self._fleet.daemons:
                with suppress(psutil.Error, AssertionError):
                    self.largest = max(self.largest, psutil.Process(daemon.process.pid).memory_info().rss)
            await asyncio.sleep(1.0)
