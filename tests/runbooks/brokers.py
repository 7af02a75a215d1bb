"""The broker: an upgrade in place, and moving to another one."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from tests.faults.place import eventually
from tests.rig.flow import flowing
from tests.rig.rabbitmq import ROOT_VARIABLE
from tests.rig.servers import Postgres, RabbitMQ
from tests.runbooks.desk import NOT_OK, Desk

NEWER = Path(__file__).parents[2] / "build" / "brokers" / "forky"
"""What .ci/brokers unpacks; without it the other broker is of the same version."""


async def broker_upgrade(desk: Desk) -> None:
    """The broker is stopped for its upgrade and started again, under 300 messages a second."""
    broker, postgres = RabbitMQ(), Postgres()
    ledger = await desk.installed(broker, postgres)
    async with flowing(ledger, 300, longest_ms=3_000):
        await ledger.until(lambda: ledger.total() > 1_000, timeout=120)
        desk.notes.step(f"300 messages a second flow; RabbitMQ {dotted(broker)} is stopped")
        desk.mark()
        await asyncio.to_thread(broker.stop)
        await desk.event("broker connection lost")
        await desk.event("broker unreachable")
        await desk.delayer("status", expect=3, show="out of reach")
        desk.notes.step("the broker is started again")
        at = ledger.total()
        desk.mark()
        await asyncio.to_thread(broker.start)
        await desk.event("consuming")
        await ledger.until(lambda: ledger.total() > at + 1_000, timeout=120)
        desk.notes.step("messages come out again")
        await desk.delayer("check", show=NOT_OK)
    await ledger.all_back(timeout=120)
    await desk.end()
    desk.balance(ledger, repeats=True)


async def broker_disk_full(desk: Desk) -> None:
    """The free disk space of the broker's machine falls below its limit, under 300 messages a second."""
    broker, postgres = RabbitMQ(), Postgres()
    ledger = await desk.installed(broker, postgres)
    async with flowing(ledger, 300, longest_ms=8_000):
        await ledger.until(lambda: ledger.total() > 1_000, timeout=120)
        desk.notes.step("300 messages a second flow; free disk space falls below disk_free_limit")
        desk.mark()
        await asyncio.to_thread(broker.ctl, "set_disk_free_limit", str(10**14))
        await desk.event("broker blocked")
        await eventually(lambda: overdue_seconds(desk), lambda late: late > 5, timeout=120)
        await desk.delayer("status", show="parked|over the last|1 min|BLOCKED")
        await asyncio.to_thread(broker.ctl, "set_disk_free_limit", str(10**7))
        desk.notes.step("there is room again")
        at = ledger.total()
        await desk.event("broker unblocked")
        await ledger.until(lambda: ledger.total() > at + 1_000, timeout=120)
        desk.notes.step("messages come out again")
    await ledger.all_back(timeout=120)
    await desk.end()
    desk.balance(ledger, repeats=True)


async def overdue_seconds(desk: Desk) -> float:
    """Of the first message that waits in the store."""
    store = json.loads(await desk.quietly("status", "--json"))["store"]
    return 0.0 if store["next_due_ms"] is None else (store["store_now_ms"] - store["next_due_ms"]) / 1000


async def another_broker(desk: Desk) -> None:
    """From one broker to another one, of another version where there is one: from native mode, by way of the store."""
    old, postgres = RabbitMQ(), Postgres()
    new = newer()
    await desk.server(old)
    await desk.server(new)
    await desk.server(postgres)
    desk.configure(old.url(), postgres.url(), mode="native")
    await desk.quietly("db", "upgrade")
    ledger = await desk.ledger(old.url())
    await desk.begin()
    await ledger.publish(1_500, delay_ms=150_000)
    await ledger.publish(500, longest_ms=3_000)
    desk.notes.step(f"RabbitMQ {dotted(old)}, native mode: 1,500 wait in the cascade; the new one is {dotted(new)}")
    desk.configure(old.url(), postgres.url())
    desk.reload()
    await desk.event("mode switched")
    await eventually(lambda: levels(desk), lambda depth: depth >= 1_500, timeout=120)
    await desk.delayer("drain", "--to", "store", "--yes")
    await ledger.until(lambda: ledger.total() == 500, timeout=120)
    await eventually(lambda: levels(desk), lambda depth: depth == 0, timeout=120)
    await desk.delayer("status", show="parked")
    desk.notes.step("publishers go to the new broker; `delays` of the old one is empty; the daemon is stopped")
    await desk.end()
    desk.configure(new.url(), postgres.url())
    await desk.delayer("topology", "apply", show="$^")
    await ledger.move_to(new.url())
    desk.notes.step("broker.url names the new one; queues, bindings and users of the destinations are declared there")
    await desk.delayer("check", show=NOT_OK)
    await desk.begin()
    async with flowing(ledger, 100, longest_ms=2_000):
        await ledger.until(lambda: ledger.total() >= 800, timeout=120)
    await ledger.all_back(timeout=200)
    await desk.end()
    desk.balance(ledger)


async def levels(desk: Desk) -> int:
    """Messages in the cascade."""
    seen = json.loads(await desk.quietly("status", "--json"))["broker"]
    return sum(level["depth"] or 0 for level in seen["cascade"])


def newer() -> RabbitMQ:
    if not (NEWER / ".ready").exists():
        return RabbitMQ()
    os.environ[ROOT_VARIABLE] = str(NEWER)
    try:
        return RabbitMQ()
    finally:
        del os.environ[ROOT_VARIABLE]


def dotted(broker: RabbitMQ) -> str:
    return ".".join(map(str, broker.version))
