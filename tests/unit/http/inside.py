"""A stand-in for the daemon behind the HTTP server, in native mode without a store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from delayer.amqp.errors import BrokerLost
from delayer.amqp.values import CONFIRMED, Delivery, Outgoing
from delayer.config.model import Settings
from delayer.core.hold import Outcome
from delayer.core.plan import Plan
from delayer.daemon.live_settings import policy_of
from delayer.format.refusal import RetryEdits
from delayer.http.server import HttpPart
from delayer.http.view import DaemonState, Depths
from delayer.intake.handle import classify
from delayer.set_aside.messages import Result, SetAsideMessage
from delayer.store.admin.changes import ChangeResult
from tests.support.fakes import until
from tests.support.logged import capture_logs
from tests.support.web import Web, tokens_file
from tests.unit.http.states import LINE, state

TOKEN = "open-sesame-open-sesame"
NOW_MS = 1_800_000_000_000
"""Far from the clock of any host."""
EVIL = "<script>alert(1)</script>"
REFUSED = SetAsideMessage(
    "id-1 $(reboot)", EVIL, b"", f"queue {EVIL}", f"x-delay: {EVIL}", b"\0\0", EVIL.encode(), 10, {"exchange": ""}
)
STRAY = SetAsideMessage(
    "s-1", EVIL, b"", "queue q", EVIL, b"\0\0", EVIL.encode(), len(EVIL), {"due_ms": 0, "attempts": 10}
)


class Inside:
    """A daemon in native mode without a store."""

    def __init__(self, listen: str = "127.0.0.1:0", *, is_open: bool = False, **more: Any) -> None:
        http = {
            "listen": listen,
            "metrics_listen": "127.0.0.2:0",
            "tokens_file": tokens_file(TOKEN),
            "open": is_open,
            "label": "PROD",
        }
        self.settings = Settings.model_validate({"mode": "native", "http": http, **more})
        self.lost = False
        self.blocked = False
        self.aside = REFUSED
        self.restart_needed: list[str] = []
        self.done: list[tuple[str, frozenset[str], str]] = []
        self.mends: list[RetryEdits] = []
        self.looks = 0
        self.sent: list[Outgoing] = []
        self.publish_seconds = 8.5
        self.now_ms = NOW_MS
        self.outcomes: dict[bytes, Outcome] = {}

    def now_upper_ms(self) -> int:
        return self.now_ms

    def plan(self, message: Outgoing) -> Plan:
        exchange, key, properties, body, *_ = message
        delivery = Delivery(0, False, exchange, key, properties, body)
        policy = policy_of(self.settings, has_store=self.settings.store_url is not None)
        return classify(delivery, policy, self.now_ms, 100_000)[2]

    async def publish(self, batch: Sequence[Outgoing]) -> list[Outcome]:
        if self.lost:
            raise BrokerLost("no connection")
        self.sent += batch
        return [self.outcomes.get(message.body, CONFIRMED) for message in batch]

    def state(self) -> DaemonState:
        lines = {"publish": LINE._replace(blocked=self.blocked)}
        return state(mode="native", store=False, connections=lines, restart_needed=self.restart_needed)

    async def depths(self) -> Depths:
        self.looks += 1
        if self.lost:
            raise BrokerLost("no connection")
        return Depths({"delays": 3, "delays.due": 0, "delays.refused": 1}, {27: 5, 0: None})

    async def look_aside(self, name: str, limit: int) -> Result:
        return Result(1, found=[self.aside if name == "refused" else STRAY][:limit])

    async def change_aside(
        self, name: str, verb: str, ids: frozenset[str], who: str, mend: RetryEdits
    ) -> tuple[Result, int]:
        self.done.append((f"{name} {verb}", ids, who))
        self.mends.append(mend)
        return ChangeResult("Dropped", 1, len(ids), ["one stays"])


@asynccontextmanager
async def served(inside: Inside, *, metrics_only: bool = False) -> AsyncIterator[Web]:
    """Serve until the end of the block, on a port chosen by the system."""
    stopping = asyncio.Event()
    with capture_logs() as logs:
        part = asyncio.create_task(HttpPart(inside, metrics_only=metrics_only, retry_seconds=0.05).run(stopping))
        await until(lambda: bool(logs))
        told = (*logs[0].get("addresses", ()), logs[0].get("reason", ""))
        try:
            yield Web(" ".join(told).strip())
        finally:
            stopping.set()
            async with asyncio.timeout(20):
                await part


async def opened(web: Web, said: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that sends these bytes and then stays silent."""
    host, _, port = web.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(said)
    await writer.drain()
    return reader, writer
