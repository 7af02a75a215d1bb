"""The store as the other services see it, whether one is configured, reached, or neither."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from delayer.core.errors import StoreLost
from delayer.core.hold import Hold
from delayer.core.message import Parcel
from delayer.core.values import TakenOut
from delayer.services.lanes import Lanes


class Shelf:
    """Parks and holds in the lanes, once there are any. Satisfies ports.Parking and ports.Holder."""

    def __init__(self) -> None:
        self.lanes: Lanes | None = None

    @property
    def usable(self) -> bool:
        """A lane of ours is there to park into."""
        return self.lanes is not None and self.lanes.ready.is_set()

    def now_ms(self) -> int | None:
        """An upper bound of the store's clock; None before the store was first reached."""
        return None if self.lanes is None else self.lanes.now_ms()

    def sure_ms(self) -> int | None:
        """A lower bound of the store's clock; None before the store was first reached."""
        return None if self.lanes is None else self.lanes.sure_ms()

    async def wait_usable(self, seconds: float) -> None:
        """Raises StoreLost if no lane is there after ``seconds``."""
        lanes = self._lanes()
        try:
            await asyncio.wait_for(lanes.ready.wait(), seconds)
        except TimeoutError as late:
            raise StoreLost(f"no lane of ours after {seconds:g} s: the store is out of reach, or refuses us") from late

    async def wait_known(self, seconds: float) -> None:
        """Wait until a lane of ours is there, or is known not to be: there is no store, or none in reach. For
        ``seconds`` at most."""
        if self.lanes is None:
            return
        known = [asyncio.create_task(event.wait()) for event in (self.lanes.ready, self.lanes.out_of_reach)]
        try:
            await asyncio.wait(known, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in known:
                waiting.cancel()

    async def park(self, parcels: Sequence[Parcel], cancels: Sequence[bytes]) -> TakenOut:
        """See ports.Parking."""
        return await self._lanes().park(parcels, cancels)

    async def hold(self, items: Sequence[tuple[Parcel, Hold]]) -> None:
        """See ports.Holder."""
        await self._lanes().hold(items)

    def _lanes(self) -> Lanes:
        if self.lanes is None:
            raise StoreLost("no store is configured")
        return self.lanes
