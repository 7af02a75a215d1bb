"""The traffic through a fleet while everything breaks: an endless stream of messages, in alternating modes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import psutil

from tests.faults.fleet import Fleet
from tests.support.ledger import Ledger
from tests.support.mixed_ledger import MixedLedger

MODES: Final[Mapping[str, float]] = {"store": 40.0, "native": 20.0}
"""Seconds of each mode in turn. A message in the cascade costs the broker ten times the work of one in the store, so
most messages go through the store."""
WAITING: Final[Mapping[str, int]] = {"store": 40_000, "native": 45_000}
"""The number of messages in flight at which publishing pauses. It is higher in native mode, so that some can enter
before all of store mode have returned."""
PORTION: Final[Mapping[str, int]] = {"store": 1_000, "native": 200}
"""Messages over AMQP that are sent together. By SQL and over HTTP it is a tenth: each message costs a call, or JSON."""
DOOMED: Final = 5
"""The number of doomed messages sent with each portion."""
PACE: Final[Mapping[str, float]] = {"store": 0.0, "native": 0.2}
"""Seconds between two portions over AMQP."""
OTHER_PACE: Final = 0.2
"""Seconds between two portions by SQL, and over HTTP."""
LONGEST_MS: Final = 5_000


class Traffic:
    """``modes``: messages published in each mode; ``ways``: over AMQP, by SQL and over HTTP. ``largest``: the most
    memory of a daemon so far, in bytes."""

    def __init__(self, fleet: Fleet) -> None:
        self.modes: Counter[str] = Counter()
        self.ways = Counter({"AMQP": 0, "SQL": 0, "HTTP": 0})
        self.largest = 0
        self._fleet = fleet

    async def publish(self, over: asyncio.Event) -> None:
        """Publish in every way until ``over`` is set. A way that waits for its server does not stop the others."""
        mixed = self._fleet.ledger
        assert isinstance(mixed, MixedLedger)
        mixed.sql.store = self._fleet.postgres.url(self._fleet.database)
        mixed.http.addresses = lambda: [daemon.address for daemon in self._fleet.daemons]
        async with asyncio.TaskGroup() as ways:
            for name, ledger in zip(self.ways, (mixed, mixed.sql, mixed.http), strict=True):
                ways.create_task(self._publish(name, ledger, over))

    async def _publish(self, way: str, ledger: Ledger, over: asyncio.Event) -> None:
        fleet, mixed, account = self._fleet, self._fleet.ledger, self._fleet.ledger.account
        while not over.is_set():
            mode = fleet.mode
            if account.sent - account.back >= WAITING[mode]:
                await mixed.is_soon(lambda mode=mode: account.sent - account.back < WAITING[mode], 1.0)
                continue
            if ledger is mixed:
                portion, doomed, pace = PORTION[mode], DOOMED, PACE[mode]
            else:
                portion, doomed, pace = PORTION[mode] // 10, 0, OTHER_PACE
            await ledger.publish(portion, longest_ms=LONGEST_MS, doomed_ones=doomed)
            self.modes[mode] += portion
            self.ways[way] += portion
            await asyncio.sleep(pace)

    async def alternate(self) -> None:
        """Switch from mode to mode, until cancelled."""
        while True:
            for mode, seconds in MODES.items():
                self._fleet.switch(mode)
                await asyncio.sleep(seconds)

    async def measure(self) -> None:
        """Record the memory of the daemons, until cancelled."""
        while True:
            for daemon in self._fleet.daemons:
                with suppress(psutil.Error, AssertionError):
                    self.largest = max(self.largest, psutil.Process(daemon.process.pid).memory_info().rss)
            await asyncio.sleep(1.0)
