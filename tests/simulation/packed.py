"""Segments in a simulation: messages of the far future are packed beside the traffic, and daemons restore them in time.

Spark cannot run here. The operator plans as its driver does, and does the work of its executors."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

import detangle

from delayer.audit import compact, restore
from delayer.retry import first_set
from tests.simulation.scheduled import LOST
from tests.simulation.store.server import URL

AHEAD_MS: Final = 100_000
"""Daemons restore what is due within this time, so that their look once a minute suffices. The configuration asks for
more."""
AFTER_MS: Final = AHEAD_MS + 5_000
"""What is due later is packed."""
ROWS: Final = 40


async def pack_now_and_then(stopping: asyncio.Event) -> None:
    while not await first_set(stopping, seconds=detangle.uniform(2.0, 30.0)):
        with suppress(TimeoutError, *LOST):
            async with asyncio.timeout(60):
                await (_restore_all() if detangle.flip(0.1) else _compact())


async def _compact() -> None:
    """`delayer compact`, without the shrinking of partitions at its end."""
    planned = await compact.plan(URL, AFTER_MS, ROWS)
    for one in await compact._pack(URL, ROWS, planned.fewest, planned.windows):
        assert one.broken is None, one.broken


async def _restore_all() -> None:
    """`delayer restore --all`."""
    loop = asyncio.get_running_loop()
    handler: Any = loop.get_exception_handler()
    try:
        done = await restore.run(URL, await restore.plan(URL, None), lambda *_: None)
    finally:
        loop.set_exception_handler(handler)
    assert not done.broken, done.broken
