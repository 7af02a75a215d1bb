"""The simulated broker on real sockets, in a thread of its own: tests use it in place of a real RabbitMQ."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import re
import secrets
import threading
from collections.abc import Callable
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self, TypeVar

from tests.simulation.broker import management
from tests.simulation.broker.broker import Pace, SimulatedBroker
from tests.simulation.broker.connection import VERSION
from tests.simulation.broker.wire import Code
from tests.support import ports
from tests.support.rabbitmq import RabbitMQ

T = TypeVar("T")
_SUSPENDED = re.compile(r'<<"(?P<vhost>[^"]*)">>, queue, <<"(?P<queue>[^"]*)">>.*sys:(?P<verb>suspend|resume)')
_STOPPED = re.compile(r"ra:(?P<verb>stop|restart)_server\(\w+, \{'(?P<vhost>.+)_(?P<queue>[^_]+)', node")


class ThreadedBroker(RabbitMQ):
    """What tests use of a RabbitMQ, over the simulated broker: URLs, the management API, and some commands."""

    def __init__(self, pace: Pace | None = None) -> None:
        self.port = ports.reserve()
        self.management_port = ports.reserve()
        self._pace = pace
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._http: ThreadingHTTPServer | None = None

    def start(self) -> Self:
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self.broker.start(), self._loop).result(10)
            return self
        self._thread.start()

        async def begin() -> SimulatedBroker:
            broker = SimulatedBroker(random.Random(secrets.randbits(64)).randrange, self._pace)
            await broker.listen(ports.HOST, self.port)
            return broker

        self.broker = asyncio.run_coroutine_threadsafe(begin(), self._loop).result(10)
        self._http = ThreadingHTTPServer((ports.HOST, self.management_port), _handler_of(self))
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def kill(self) -> None:
        asyncio.run_coroutine_threadsafe(self.broker.kill(), self._loop).result(10)

    def settle(self) -> None:
        """Nothing to do: what was confirmed is safe."""

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
        asyncio.run_coroutine_threadsafe(self.broker.stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, call: Callable[[SimulatedBroker], T]) -> T:
        """Call in the broker's thread."""

        async def within() -> T:
            return call(self.broker)

        return asyncio.run_coroutine_threadsafe(within(), self._loop).result(10)

    @cached_property
    def version(self) -> tuple[int, ...]:
        return tuple(map(int, VERSION.split(".")))

    @cached_property
    def delays_messages(self) -> bool:
        return False

    def api(self, method: str, path: str, body: Any = None) -> Any:
        return self.run(lambda broker: management.answer(broker, method, path.removeprefix("/api/"), body))

    def ctl(self, *words: str) -> str:
        if words[0] == "set_vm_memory_high_watermark":
            self.run(lambda broker: broker.alarm("memory" if float(words[1]) < 0.01 else ""))
        elif words[0] == "close_all_connections":
            self.run(lambda broker: _close_all(broker, words[2], words[3]))
        elif words[0] == "eval" and (found := _SUSPENDED.search(words[1]) or _STOPPED.search(words[1])):
            self.run(lambda broker: _silence(broker, found["vhost"], found["queue"], found["verb"]))
        else:
            raise NotImplementedError(words)
        return ""


def _close_all(broker: SimulatedBroker, vhost: str, reason: str) -> None:
    for connection in list(broker.connections):
        if connection.vhost.name == vhost:
            connection.end(Code.CONNECTION_FORCED, reason)


def _silence(broker: SimulatedBroker, vhost: str, queue: str, verb: str) -> None:
    if verb in ("suspend", "stop"):
        broker.queue(queue, vhost).available = False
    else:
        broker.queue(queue, vhost).resume()


def _handler_of(broker: ThreadedBroker) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            login = base64.b64decode(self.headers.get("Authorization", "").removeprefix("Basic ")).decode()
            user = broker.broker.users.get(login.partition(":")[0])
            if user is None or user.password != login.partition(":")[2] or not user.tags:
                self.send_error(401)
                return
            try:
                found = broker.api("GET", self.path)
            except management.NotFound:
                self.send_error(404)
                return
            down = self.path.startswith("/api/health/") and found["status"] != "ok"
            self.send_response(503 if down else 200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    return Handler
