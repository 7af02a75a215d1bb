"""The part of a daemon's life that serves HTTP: in the daemon's own loop, with none of uvicorn's signal handlers.

A port that is taken, or any other failure of this part, is told and tried again; it never stops the daemon.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import structlog
import uvicorn

from delayer.core.backoff import Sparing
from delayer.core.hosts import is_loopback
from delayer.ops.http import lines
from delayer.ops.http.app import Answers
from delayer.ops.http.ports import Inside
from delayer.ops.http.site import application
from delayer.ops.http.view import View

log = structlog.get_logger(__name__)

AGAIN: Final = 5.0
"""Seconds until a port that could not be had is tried again."""
AT_ONCE: Final = 2 * lines.MOST
"""Connections that are served side by side, once none of them is silent any more; the next hear 503."""
OPEN: Final = "not loopback: who reaches this address reads messages without a token, by whatever name he calls it"
FAREWELL: Final = 1
"""Seconds for answers under way, once told to stop."""


class HttpPart:
    """The HTTP server of this daemon."""

    def __init__(self, inside: Inside) -> None:
        self._inside = inside

    async def run(self, stopping: asyncio.Event) -> None:
        """Until stopping is set."""
        sparing = Sparing()
        while not stopping.is_set():
            try:
                await self._serve(stopping)
            except OSError as taken:
                reason = (taken.strerror or str(taken)).partition(" (")[0].capitalize()
                if sparing.worth(reason, asyncio.get_running_loop().time()):
                    log.error("http not served", listen=self._inside.settings.http.listen, reason=reason)
                try:
                    await asyncio.wait_for(stopping.wait(), AGAIN)
                except TimeoutError:
                    continue

    async def _serve(self, stopping: asyncio.Event) -> None:
        sockets = await listening(self._inside.settings.http.listen)
        view = View(self._inside)
        try:
            addresses = [_shown(one) for one in sockets]
            if all(is_loopback(one.rpartition(":")[0]) for one in addresses):
                log.info("http served", addresses=addresses)
            else:
                log.warning("http served", addresses=addresses, reason=OPEN)
            server = _Server(_config(application(Answers(self._inside, view))))
            serving = asyncio.create_task(server.serve(sockets=sockets), name="http server")
            stop = asyncio.create_task(stopping.wait(), name="stopping")
            try:
                await asyncio.wait([serving, stop], return_when=asyncio.FIRST_COMPLETED)
                server.should_exit = True
                await serving
            finally:
                stop.cancel()
                serving.cancel()
                await asyncio.wait([serving])
        finally:
            for one in sockets:
                one.close()
            await view.close()


class _Server(uvicorn.Server):
    """Signals are the daemon's."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="off",
        http=lines.Line,
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=AT_ONCE,
        backlog=AT_ONCE,
        timeout_graceful_shutdown=FAREWELL,
    )


async def listening(listen: str) -> list[socket.socket]:
    """Sockets that listen at ``host:port``, one for each address of the host. Raises OSError."""
    host, _, port = listen.rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            sockets.append(socket.create_server(address[:2], family=family, backlog=AT_ONCE))
            sockets[-1].setblocking(False)
    except OSError:
        for one in sockets:
            one.close()
        raise
    return sockets


def _shown(one: socket.socket) -> str:
    host, port = one.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
