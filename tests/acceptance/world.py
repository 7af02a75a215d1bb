"""One daemon with everything around it, kept for all tests of one mode.

A daemon for each test would take most of the time, so messages go through one daemon together, and each test looks at
its own. The end checks all of them: nothing twice, nothing secret in the log, a clean stop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote

from tests.support.daemon import DaemonProcess
from tests.support.raw import Inbox, Raw
from tests.support.servers import Postgres, RabbitMQ

T = TypeVar("T")
Route = dict[str, Any]

STORE, NATIVE = MODES = ("store", "native")
USER = "delayer"
BROKER_SECRET = "Sesame.Broker/1"
STORE_SECRET = "Sesame.Store/2"
FORBIDDEN = "closed"
"""An exchange that the daemon's user may not write to."""


def secret_broker_url(rabbitmq: RabbitMQ, vhost: str) -> str:
    """A URL for a user with all rights but to write to FORBIDDEN, with a password to recognise."""
    rabbitmq.add_user(USER, BROKER_SECRET, vhost=vhost, configure=".*", read=".*", write=f"^(?!{FORBIDDEN}$).*")
    return rabbitmq.url(vhost, user=f"{USER}:{quote(BROKER_SECRET, safe='')}")


def secret_store_url(postgres: Postgres, database: str) -> str:
    """Postgres trusts every user here and ignores the password, so no log or report may contain it."""
    return postgres.url(database).replace("@", f":{quote(STORE_SECRET, safe='')}@", 1)


def assert_no_secret(daemon: DaemonProcess) -> None:
    lines = [json.dumps(event) for event in daemon.events] + daemon.stray_lines
    for secret in (BROKER_SECRET, STORE_SECRET):
        for spelled in (secret, quote(secret, safe=""), json.dumps(secret)[1:-1]):
            assert not [line for line in lines if spelled in line]


@dataclass
class Things:
    """Exchanges, queues and bindings of one vhost, created through the management API because it accepts every name."""

    rabbitmq: RabbitMQ
    vhost: str

    def queue(self, name: str, kind: str = "classic") -> None:
        self._call("PUT", "queues", name, body={"durable": True, "arguments": {"x-queue-type": kind}})

    def exchange(self, name: str, kind: str = "topic") -> None:
        self._call("PUT", "exchanges", name, body={"durable": True, "type": kind})

    def bind(self, exchange: str, queue: str, key: str = "#") -> None:
        self._call("POST", "bindings", "e", exchange, "q", queue, body={"routing_key": key})

    def unbind(self, exchange: str, queue: str, key: str = "%23") -> None:
        path = f"e/{quote(exchange, safe='')}/q/{quote(queue, safe='')}/{key}"
        self.rabbitmq.api("DELETE", f"/api/bindings/{quote(self.vhost, safe='')}/{path}")

    def depth(self, queue: str) -> int:
        return int(self._call("GET", "queues", queue).get("messages", 0))

    def _call(self, method: str, kind: str, *names: str, body: object = None) -> Any:
        if kind == "bindings":
            path = "/".join(["e", quote(names[1], safe=""), "q", quote(names[3], safe="")])
        else:
            path = quote(names[0], safe="")
        return self.rabbitmq.api(method, f"/api/{kind}/{quote(self.vhost, safe='')}/{path}", body)


@dataclass
class World:
    """The daemon publishes due messages to ``exchange``: ``out``, or the default exchange."""

    mode: str
    rabbitmq: RabbitMQ
    postgres: Postgres
    vhost: str
    things: Things
    runner: asyncio.Runner
    database: str = ""
    daemon: DaemonProcess = field(init=False)
    raw: Raw = field(init=False)
    inbox: Inbox = field(init=False)
    refused: Inbox = field(init=False)
    boxes: dict[str, Inbox] = field(default_factory=dict)

    @property
    def native(self) -> bool:
        return self.mode != STORE

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine in the loop of the connection and the daemon's log."""
        return self.runner.run(work)

    def wait(self, *bodies: bytes, box: str = "inbox", timeout: float = 60.0) -> None:
        """Wait until each has arrived. Does not fail; the test that checks a missing message does."""
        inbox = self.boxes[box]
        self.run(inbox.until(lambda: all(body in inbox.counts for body in bodies), timeout))

    def parked_beyond(self, seconds: int) -> int:
        """The number of rows that are due later than that."""
        sql = f"SELECT FROM message WHERE due_at > now() + interval '{seconds} seconds'"
        return int(self.postgres.execute(sql, database=self.database).split()[-1])

    async def open(self, environ: Mapping[str, str], queues: Sequence[str]) -> None:
        self.raw = await Raw.connect(self.rabbitmq.url(self.vhost))
        self.daemon = await DaemonProcess(environ).start()
        await self.daemon.ready()
        for queue in queues:
            self.boxes[queue] = await self.raw.inbox(queue)
        self.inbox, self.refused = self.boxes["inbox"], self.boxes["delays.refused"]

    async def close(self) -> None:
        """Stop the daemon, and check that each message came once."""
        assert await self.daemon.stop() == 0, self.daemon.tail()
        await self.raw.round_trip()
        await self.raw.connection.close()
        assert_no_secret(self.daemon)
        assert not self.daemon.stray_lines
        for inbox in self.boxes.values():
            twice = {body[:60]: count for body, count in inbox.counts.items() if count > 1}
            assert not twice, f"{inbox.queue}: {twice}"

    async def abandon(self) -> None:
        await self.daemon.__aexit__()


def routes() -> list[Route]:
    return [
        {"from": "in", "to": "out"},
        {"from": "in.timestamp", "to": "out", "delay_from": ["timestamp", "x-delay"]},
        {
            "from": "in.order",
            "to": "out",
            "delay_from": ["x-opt-delivery-delay", "x-deliver-at", "x-delay", "x-opt-delivery-time"],
        },
        {"from": "in.default", "to": "out", "default_delay": "1200ms"},
        {"from": "in.header", "to": "out", "delay_from": ["header:wait:s"], "require_delay": True},
        {"from": "in.fixed", "to": "out", "routing_key": "inbox"},
        {"from": "in.allowed", "to": "out", "allow_exchanges": ["side.*"]},
        {"from": "in.narrow", "to": "narrow"},
        {"from": "in.missing", "to": "missing"},
        {"from": "in.closed", "to": FORBIDDEN},
        {"from": "", "to": "out", "routing_key": "inbox"},
    ]


@contextmanager
def world(mode: str, rabbitmq: RabbitMQ, postgres: Postgres, template: str) -> Iterator[World]:
    vhost = rabbitmq.add_vhost()
    things = Things(rabbitmq, vhost)
    for name in ("out", "narrow", FORBIDDEN, "side.open"):
        things.exchange(name)
    things.exchange("stranger", "fanout")
    for name in ("inbox", "copies", "side"):
        things.queue(name)
    things.bind("out", "inbox")
    things.bind("out", "copies", "copies")
    things.bind(FORBIDDEN, "inbox")
    things.bind("side.open", "side")
    environ = {
        "MODE": "native" if mode != STORE else "store",
        "BROKER__URL": secret_broker_url(rabbitmq, vhost),
        "ROUTE": json.dumps(routes()),
    }
    queues = ["inbox", "copies", "side", "delays.refused"]
    with asyncio.Runner() as runner:
        this = World(mode, rabbitmq, postgres, vhost, things, runner)
        if mode == STORE:
            this.database = postgres.add_database(template=template)
            environ["STORE__URL"] = secret_store_url(postgres, this.database)
        else:
            queues.append("delayer.delay-strays")
        runner.run(this.open(environ, queues))
        try:
            yield this
            runner.run(this.close())
        finally:
            runner.run(this.abandon())
    rabbitmq.drop_vhost(vhost)
    if this.database:
        postgres.drop_database(this.database)
