"""The HTTP server: its paths, and the service that runs uvicorn in the daemon's own loop. The service logs its
failures, such as a taken port, and retries. It never stops the daemon."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack, nullcontext
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, cast

import h11
import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from uvicorn.protocols.http.h11_impl import H11Protocol

from delayer.amqp.errors import BrokerLost
from delayer.config.texts import is_loopback
from delayer.core.backoff import LogThrottle
from delayer.http.access import AT_ONCE, PROBES, RequestGuard, Sessions, Tokens
from delayer.http.actions import Actions, ChangeHandler
from delayer.http.api import LARGER, WholeApi
from delayer.http.forms import FieldError
from delayer.http.health import Answers
from delayer.http.pages import Pages
from delayer.http.view import QUERIES, STORE_ERRORS, DaemonPort
from delayer.retry import first_set

log = structlog.get_logger(__name__)

AGAIN: Final = 5.0
"""Seconds until the next attempt to listen on a taken port."""
HEAD_SECONDS: Final = 10.0
"""Maximum time to receive the head of a request."""
READ_SECONDS: Final = 30.0
"""Maximum time for a client to read what was written to it."""
STOP_SECONDS: Final = 1
"""Seconds until a stop closes connections. After twice this time, requests that still run are cancelled."""
MOST_LINES: Final = 100
"""About how many lines the head of a request may have. More are a 400."""
MOST_UNREAD: Final = 1 << 20
"""Maximum bytes of pipelined requests that wait for the answer to an earlier one. More close the connection."""
HEAD_BYTES: Final = 16 << 10
"""Maximum bytes of the head of a request. h11 has this limit only for a head that comes in several pieces."""
MOST_CONNECTIONS: Final = 2 * AT_ONCE
"""Maximum number of connections. One more closes the connection that has waited longest for its client."""
OTHER_ADDRESS: Final = (
    "another program, perhaps a second daemon, listens there (`ss -ltnp`): give each configuration its own address"
)
NO_ADDRESS: Final = "check the name, the address and the port: this host cannot listen there"
OPEN: Final = "not loopback: anyone who can reach this address can read messages without a token"
_END_OF_HEAD: Final = re.compile(rb"\n\r?\n")
HttpHandler = Callable[[Request], Awaitable[Response]]
STATIC: Final = Path(__file__).parent / "static"


def _probes(answers: Answers) -> list[BaseRoute]:
    handlers = zip(PROBES, (answers.live, answers.ready), strict=True)
    found = [Route(path, handler, methods=["GET", "OPTIONS"]) for path, handler in handlers]
    return [*found, Route("/metrics", answers.metrics)]


def probes(answers: Answers) -> Starlette:
    """Serve only health and metrics."""
    guard = Middleware(RequestGuard, listen=lambda: answers.settings.http.metrics_listen)
    return Starlette(routes=_probes(answers), middleware=[guard])


def application(answers: Answers) -> Starlette:
    """Build the paths and their handlers."""
    sessions = Sessions(Tokens(lambda: answers.settings.http.tokens_file))
    pages = Pages(answers, sessions)
    looks, change_turns = asyncio.Semaphore(QUERIES), asyncio.Semaphore(QUERIES)
    actions = Actions(pages, change_turns)

    def shown(answer: HttpHandler, turns: asyncio.Semaphore | None = None) -> HttpHandler:
        """Require a token if the address is not loopback and the page not open."""

        async def answered(request: Request) -> Response:
            if not pages.readable(request):
                return await pages.locked(request)
            async with turns or nullcontext():
                return await answer(request)

        return answered

    def changing(path: str, change: ChangeHandler) -> Route:
        return Route(f"/actions/{path}", partial(actions.answer, change=change), methods=["POST"])

    refused, strays = partial(pages.set_aside, name="refused"), partial(pages.set_aside, name="strays")
    return Starlette(
        routes=[
            *_probes(answers),
            Route("/", shown(pages.overview)),
            Route("/parts/overview", shown(pages.part)),
            *WholeApi(pages, change_turns, looks).routes,
            Route("/waiting", shown(pages.waiting, looks)),
            Route("/find", shown(pages.find, looks)),
            Route("/message/{name:path}", shown(pages.message, looks)),
            Route("/body/{name:path}", shown(pages.body, looks)),
            Route("/held", shown(pages.held, looks)),
            Route("/refused", shown(refused)),
            Route("/strays", shown(strays)),
            Route("/schedules", shown(pages.schedules, looks)),
            Route("/audit-log", shown(pages.audit_log, looks)),
            Route("/login", pages.login, methods=["GET", "POST"]),
            Route("/logout", pages.logout, methods=["POST"]),
            changing("messages", actions.stored),
            changing("refused", partial(actions.set_aside, name="refused")),
            changing("strays", partial(actions.set_aside, name="strays")),
            changing("schedules", actions.schedules),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(RequestGuard, listen=lambda: answers.settings.http.listen, larger=LARGER)],
        exception_handlers=dict.fromkeys(
            (HTTPException, FieldError, BrokerLost, *STORE_ERRORS, Exception), pages.failed
        ),
    )


class FrugalConnection(h11.Connection):
    """h11's parser, which reads neither a body in chunks nor a head of many lines here. It takes about 6 µs for each
    chunk or line, however short, so megabytes of these would stop the event loop. The server refuses chunks anyway
    (411), and closes the connection then."""

    _chunked = False

    @property
    def unread(self) -> bytearray:
        """What h11 has not parsed. Its own ``trailing_data`` is a copy, and each of many requests would make one."""
        return self._receive_buffer._data

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self._chunked:
            return h11.PAUSED
        if self.their_state is h11.IDLE:
            head, *rest = _END_OF_HEAD.split(self.unread[:HEAD_BYTES], 1)
            if head.count(b"\n") > MOST_LINES or (not rest and len(head) == HEAD_BYTES):
                raise h11.RemoteProtocolError("a head that is too long", error_status_hint=431)
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunked = any(name == b"transfer-encoding" for name, _ in event.headers)
        return event


class ImpatientProtocol(H11Protocol):
    """uvicorn's protocol, with deadlines for clients that send the head of a request slowly or do not read the answer,
    and with a limit of connections. uvicorn itself has a deadline only for idle connections. While idle clients occupy
    all connections, it answers 503 to a health check."""

    _since: float = 0.0
    _waiting: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _stopping: asyncio.TimerHandle | None = None
    conn: FrugalConnection

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.conn = FrugalConnection(h11.SERVER)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # Writing pauses, and the deadline begins, at the first byte that the client does not read. uvicorn's own limit
        # lets short answers pass without a pause, and close() would wait forever for a client that does not read one.
        transport.set_write_buffer_limits(high=0)
        super().connection_made(transport)
        self._since = self.loop.time()
        self._make_room()
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if len(self.conn.unread) > MOST_UNREAD:
            self.drop()
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._waiting, self._unread, self._stopping):
            if timer is not None:
                timer.cancel()

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._since = self.loop.time()
        self._unread = self.loop.call_later(READ_SECONDS, self.drop)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def shutdown(self) -> None:
        """Begin to stop. The connection is dropped before uvicorn cancels what still runs, which it would log as a
        bug."""
        super().shutdown()
        self._stopping = self.loop.call_later(STOP_SECONDS, self.drop)

    def drop(self) -> None:
        """Abort the connection, even if its client does not read."""
        self.connections.discard(self)
        self.transport.abort()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _pipelines(self) -> bool:
        """Whether the client has sent more than the request that is being answered."""
        return self.conn.their_state is h11.DONE and bool(self.conn.unread)

    def _watch(self) -> None:
        """Allow HEAD_SECONDS for the whole head of a request. It starts when the connection opens, and for a later
        request with its first byte."""
        if self._answering and self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        elif not self._answering and self._waiting is None:
            self._waiting = self.loop.call_later(HEAD_SECONDS, self.drop)

    def _make_room(self) -> None:
        """If there are too many connections, drop the one that has waited longest for its client to send or to read, or
        whose client has sent the next request before the answer. If there is no such one, drop this new one."""
        if len(self.connections) > MOST_CONNECTIONS:
            others = cast(Iterable[ImpatientProtocol], self.connections - {self})
            victims = (one for one in others if one.flow.write_paused or not one._answering or one._pipelines)
            min(victims, key=attrgetter("_since"), default=self).drop()


class HttpPart:
    """One of this daemon's HTTP servers: at ``listen``, or with ``metrics_only`` at ``metrics_listen``."""

    def __init__(self, inside: DaemonPort, *, metrics_only: bool = False, retry_seconds: float = AGAIN) -> None:
        http = inside.settings.http
        self._inside, self._metrics_only, self._retry_seconds = inside, metrics_only, retry_seconds
        self._listen = http.metrics_listen if metrics_only else http.listen

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until ``stopping`` is set."""
        throttle = LogThrottle()
        while not stopping.is_set():
            try:
                await self._serve(stopping)
            except OSError as error:
                reason = (error.strerror or str(error)).partition(" (")[0].capitalize()
                if throttle.should_log(reason, asyncio.get_running_loop().time()):
                    log.error("http not served", listen=self._listen, reason=reason, next_step=advice_for(error))
                await first_set(stopping, seconds=self._retry_seconds)

    async def _serve(self, stopping: asyncio.Event) -> None:
        sockets = await listening(self._listen)
        answers = Answers(self._inside)
        try:
            addresses = [_shown(one) for one in sockets]
            local = all(is_loopback(one.rpartition(":")[0]) for one in addresses)
            if local or self._metrics_only or not self._inside.settings.http.open:
                log.info("http served", addresses=addresses)
            else:
                log.warning("http served", addresses=addresses, reason=OPEN)
            server = uvicorn.Server(_config((probes if self._metrics_only else application)(answers)))
            server.capture_signals = nullcontext  # type: ignore[assignment,method-assign] # the daemon's
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
            await answers.close()


def _config(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="off",
        http=ImpatientProtocol,
        ws="none",
        log_config=None,
        log_level="error",  # Its warnings are about single requests, which get an answer, and would fill the log.
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=AT_ONCE,
        timeout_graceful_shutdown=2 * STOP_SECONDS,
    )


async def listening(listen: str) -> list[socket.socket]:
    """Listen on ``host:port``, with a socket for each of the host's addresses. Raises OSError."""
    host, _, port = listen.rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    with ExitStack() as opened:
        sockets = [
            opened.enter_context(socket.create_server(address[:2], family=family, backlog=AT_ONCE))
            for family, _, _, _, address in dict.fromkeys(found)
        ]
        opened.pop_all()
    return sockets


def advice_for(error: OSError) -> str:
    """The next step after this error of :func:`listening`."""
    return OTHER_ADDRESS if error.errno == errno.EADDRINUSE else NO_ADDRESS


def _shown(one: socket.socket) -> str:
    host, port = one.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
