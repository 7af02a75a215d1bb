"""The broker's resource alarm: while it is raised, the broker takes no publishes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from delayer.wire.errors import ConnectionLost, again


class Alarm:
    """``raised``, and the broker's word for it, until it is cleared or the connection is lost."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.raised = False
        self.reason = ""
        self.heard: Callable[[str], object] = lambda _reason: None
        """Told the broker's word whenever it is raised, and "" when it is cleared."""
        self._loop = loop
        self._loss: ConnectionLost | None = None
        self._over: asyncio.Future[None] | None = None

    @property
    def over(self) -> Awaitable[None]:
        """Done as soon as there is no alarm: at once while none is raised. Raises ConnectionLost."""
        if self._over is None or (self._over.done() and (self.raised or self._loss is not None)):
            self._over = self._loop.create_future()
            self._over.add_done_callback(_look_at)
            if self._loss is not None:
                self._over.set_exception(again(self._loss))
            elif not self.raised:
                self._over.set_result(None)
        return asyncio.shield(self._over)

    def sound(self, reason: str) -> None:
        self.raised, self.reason = True, reason
        self.heard(reason)

    def clear(self) -> None:
        self.raised, self.reason = False, ""
        self.heard("")
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    def fail(self, loss: ConnectionLost) -> None:
        """The connection is gone: whoever waits hears of it."""
        self._loss = loss
        if self._over is not None and not self._over.done():
            self._over.set_exception(again(loss))


def _look_at(future: asyncio.Future[None]) -> None:
    """Tell asyncio that a failure was not overlooked, also when nobody waits any more."""
    if not future.cancelled():
        future.exception()
