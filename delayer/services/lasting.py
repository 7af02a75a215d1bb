"""For how long something has not been so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Lasting:
    """Ask often enough: what came and went between two looks was not seen."""

    def __init__(self, well: Callable[[], bool]) -> None:
        self._well = well
        self._since: float | None = None

    def seconds(self) -> float:
        """0 while all is well; else since when it is not, and a moment at least."""
        now = asyncio.get_running_loop().time()
        if self._well():
            self._since = None
            return 0.0
        if self._since is None:
            self._since = now
        return max(now - self._since, 1e-9)
