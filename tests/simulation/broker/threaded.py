"""The simulated broker on real sockets, in a thread of its own: tests use it in place of a real RabbitMQ."""

from __future__ import annotations

import asyncio
import random
import re
import secrets
import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any, Self, TypeVar
from urllib.parse import unquote

from tests.simulation.broker.access import Permissions, User
from tests.simulation.broker.broker import Pace, SimulatedBroker
from tests.simulation.broker.connection import VERSION
from tests.simulation.broker.declared import plain
from tests.simulation.broker.vhost import VirtualHost
from tests.support import ports
from tests.support.rabbitmq import RabbitMQ

T = TypeVar("T")


class ThreadedBroker(RabbitMQ):
    """What tests use of a RabbitMQ, over the simulated broker. It has no management API on a port, and knows the
    requests and commands that tests/conformance sends."""

    def __init__(self, pace: Pace | None = None) -> None:
        self.port = ports.reserve()
        self._pace = pace
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> Self:
        self._thread.start()

        async def begin() -> SimulatedBroker:
            broker = SimulatedBroker(random.Random(secrets.randbits(64)).randrange, self._pace)
            await broker.listen(ports.HOST, self.port)
            return broker

        self.broker = asyncio.run_coroutine_threadsafe(begin(), self._loop).result(10)
        return self

    def close(self) -> None:
        if not self._thread.is_alive():
            return
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
        parts = [unquote(part) for part in path.removeprefix("/api/").split("/")]
        return self.run(lambda broker: _REQUESTS[method, parts[0]](broker, parts[1:], body))

    def ctl(self, *words: str) -> str:
        if words[0] == "set_vm_memory_high_watermark":
            self.run(lambda broker: broker.alarm("memory" if float(words[1]) < 0.01 else ""))
            return ""
        found = re.search(r'<<"(?P<vhost>[^"]*)">>, queue, <<"(?P<queue>[^"]*)">>.*sys:(?P<verb>\w+)', words[1])
        found = found or re.search(r"ra:(?P<verb>\w+)_server\(\w+, \{'(?P<vhost>.+?)_(?P<queue>\w+)', node", words[1])
        if words[0] != "eval" or found is None:
            raise NotImplementedError(words)

        def change(broker: SimulatedBroker) -> None:
            queue = broker.queue(found["queue"], found["vhost"])
            if found["verb"] in ("suspend", "stop"):
                queue.available = False
            else:
                queue.resume()

        self.run(change)
        return ""


def _put_user(broker: SimulatedBroker, parts: list[str], body: Any) -> None:
    tags = frozenset(filter(None, body["tags"].split(",")))
    broker.users[parts[0]] = User(parts[0], body["password"], tags)


def _put_permissions(broker: SimulatedBroker, parts: list[str], body: Any) -> None:
    broker.users[parts[1]].permissions[parts[0]] = Permissions(**body)


def _put_topics(broker: SimulatedBroker, parts: list[str], body: Any) -> None:
    rule = Permissions("", body["write"], body["read"])
    broker.users[parts[1]].topics[parts[0], body["exchange"]] = rule


def _put_limit(broker: SimulatedBroker, parts: list[str], body: Any) -> None:
    broker.vhosts[parts[0]].most_connections = body["value"]


def _arguments(found: Any) -> dict[str, Any]:
    return {name: plain(value) for name, value in found.arguments.items()}


def _exchanges(vhost: VirtualHost) -> list[dict[str, Any]]:
    return [{"name": one.name, "type": one.kind, "arguments": _arguments(one)} for one in vhost.exchanges.values()]


def _queues(vhost: VirtualHost) -> list[dict[str, Any]]:
    return [{"name": one.name, "arguments": _arguments(one)} for one in vhost.queues.values()]


def _bindings(vhost: VirtualHost) -> list[dict[str, Any]]:
    return [
        {
            "source": exchange.name,
            "destination": binding.destination,
            "destination_type": binding.kind,
            "routing_key": binding.key.decode(),
        }
        for exchange in vhost.exchanges.values()
        for binding in exchange.bindings
    ]


_REQUESTS: dict[tuple[str, str], Callable[[SimulatedBroker, list[str], Any], Any]] = {
    ("PUT", "vhosts"): lambda broker, parts, _: broker.add_vhost(parts[0]) and None,
    ("DELETE", "vhosts"): lambda broker, parts, _: broker.drop_vhost(parts[0]),
    ("PUT", "users"): _put_user,
    ("PUT", "permissions"): _put_permissions,
    ("PUT", "topic-permissions"): _put_topics,
    ("PUT", "vhost-limits"): _put_limit,
    ("GET", "exchanges"): lambda broker, parts, _: _exchanges(broker.vhosts[parts[0]]),
    ("GET", "queues"): lambda broker, parts, _: _queues(broker.vhosts[parts[0]]),
    ("GET", "bindings"): lambda broker, parts, _: _bindings(broker.vhosts[parts[0]]),
}
