"""Asking others for lanes, which takes seconds: beside the looks of lanes.py, and ended with them."""

from __future__ import annotations

import asyncio

from delayer.services.ports import Lane, Store
from delayer.services.retry import LOSSES, raise_first


class Asking:
    """One question at a time."""

    def __init__(self) -> None:
        self._task: asyncio.Task[list[Lane]] | None = None

    @property
    def tasks(self) -> list[asyncio.Task[list[Lane]]]:
        """What to wait for: the question under way, if there is one."""
        return [] if self._task is None else [self._task]

    def begin(self, store: Store, count: int) -> None:
        self._task = asyncio.create_task(store.own_lanes(count), name="ask for lanes")

    def answer(self) -> list[Lane]:
        """The lanes that came of it, once. Raises what it failed of."""
        if self._task is None or not self._task.done():
            return []
        asked, self._task = self._task, None
        return asked.result()

    async def stop(self) -> None:
        """Raises what it failed of, if that was a bug."""
        if self._task is None:
            return
        asked, self._task = self._task, None
        asked.cancel()
        [lanes] = await asyncio.gather(asked, return_exceptions=True)
        if isinstance(lanes, BaseException):
            raise_first([lanes], unless=(*LOSSES, asyncio.CancelledError))
            return
        for lane in lanes:  # it was over just now
            await lane.release()
