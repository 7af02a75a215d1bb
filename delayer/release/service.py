"""The release of this process: a release loop for each of its lanes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from delayer.release.loop import LaneRelease
from delayer.release.ports import Lane, Releases


class ReleaseService:
    def __init__(self, releases: Releases, release: Callable[[Lane], LaneRelease]) -> None:
        self._releases = releases
        self._release = release

    async def run(self, stopping: asyncio.Event) -> None:
        """Release until the store yields no more lanes and every loop has closed its own. Raises the first bug."""
        try:
            async with asyncio.TaskGroup() as loops:
                async for lane in self._releases.lanes():
                    loops.create_task(self._release(lane).run(stopping), name=f"release lane {lane.number}")
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
