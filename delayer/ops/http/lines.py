"""Connections of browsers and programs: who says nothing, or does not hear what he is told, keeps no place for long."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST: Final = 64
"""Connections; then the one that has been silent for longest makes room for the next."""
QUIET: Final = 10.0
"""Seconds for saying all of a request, and for taking something of the answer."""
LOOK: Final = 1.0


class Line(H11Protocol):
    """uvicorn's connection, whose own limit of time begins with the first answer only."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._heard = self.loop.time()
        self._timer = self.loop.call_later(LOOK, self._look)
        if len(self.connections) > MOST:
            silent = [one for one in self.connections if isinstance(one, Line) and one is not self and not one.at_work]
            if silent:
                min(silent, key=lambda one: one._heard).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """See uvicorn."""
        self._heard = self.loop.time()
        super().on_response_complete()

    @property
    def at_work(self) -> bool:
        """Whether it waits for us: all of a request was said, and not all of the answer."""
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete and not cycle.more_body and not self.flow.write_paused

    def _look(self) -> None:
        now = self.loop.time()
        if self.at_work:
            self._heard = now
        elif now - self._heard > QUIET:
            self.transport.abort()
            return
        self._timer = self.loop.call_later(LOOK, self._look)
