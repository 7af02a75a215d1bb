"""A publisher that keeps a steady rate while something else happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tests.support.ledger import Ledger

TURN = 0.1
"""Seconds between two portions."""


@dataclass
class Flow:
    """The number of messages published so far, and the seconds that took."""

    count: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Confirmed messages per second."""
        return self.count / self.seconds if self.seconds else 0.0


@asynccontextmanager
async def flowing(
    ledger: Ledger, rate: int, *, shortest_ms: int = 0, longest_ms: int = 5_000, delay_ms: int | None = None
) -> AsyncIterator[Flow]:
    """Publish ``rate`` messages a second for as long as the body takes. After a wait for the broker it continues at
    that rate and does not catch up."""
    over = asyncio.Event()
    flow = Flow()
    began = time.monotonic()

    async def publish() -> None:
        portion = max(1, round(rate * TURN))
        due = began
        while not over.is_set():
            await ledger.publish(portion, shortest_ms=shortest_ms, longest_ms=longest_ms, delay_ms=delay_ms)
            flow.count += portion
            flow.seconds = time.monotonic() - began
            due = max(due + TURN, began + flow.seconds - TURN)
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    task = asyncio.create_task(publish())
    try:
        yield flow
    finally:
        over.set()
        await task
