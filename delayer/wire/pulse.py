"""Heartbeats: telling the other side that we live, and noticing that it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from delayer.wire.outlet import Outlet
from delayer.wire.serialize import HEARTBEAT_FRAME


class Pulse:
    """Beats when nothing was written for half of ``heartbeat`` seconds; calls ``lost``, once, when nothing was read for
    twice as long as ``heartbeat``. Whoever reads sets ``read_at`` (loop time), and ``reading`` while it does.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, outlet: Outlet, lost: Callable[[str], None]) -> None:
        self._loop = loop
        self._outlet = outlet
        self._lost = lost
        self._heartbeat = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._overdue = False
        self.read_at = loop.time()
        self.reading = True

    def start(self, heartbeat: float) -> None:
        """Begin; 0 is no heartbeat."""
        self._heartbeat = heartbeat
        if heartbeat:
            self._look()

    def stop(self) -> None:
        """Safe to call twice, or without start."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._heartbeat = 0.0

    def _look(self) -> None:
        now = self._loop.time()
        half, deadline = self._heartbeat / 2, 2 * self._heartbeat
        if now - self._outlet.written_at >= half:
            self._outlet.write(HEARTBEAT_FRAME)
        due = self._outlet.written_at + half
        next_look = due if due > now else now + half  # a closing transport takes no write
        if not self.reading:
            self._overdue = False  # we do not listen: silence means nothing
        elif now - self.read_at < deadline:
            self._overdue = False
            next_look = min(next_look, self.read_at + deadline)
        elif self._overdue:
            self._lost(f"nothing was heard from the broker for {now - self.read_at:.1f} s")
            return
        else:
            # After a stop of the whole process this may run before the socket is looked at. One more turn shows.
            self._overdue = True
            next_look = now + self._heartbeat / 10
        if self._heartbeat:
            self._timer = self._loop.call_at(next_look, self._look)
