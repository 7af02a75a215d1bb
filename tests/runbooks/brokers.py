"""The broker: an upgrade in place, and moving to another one."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from tests.faults.place import eventually
from tests.runbooks.desk import NOT_OK, Desk
from tests.support.flow import flowing
from tests.support.rabbitmq import ROOT_VARIABLE
from tests.support.servers import Postgres, RabbitMQ

OLDER, NEWER = (Path(__file__).parents[2] / "build" / "brokers" / suite for suite in ("trixie", "forky"))
"""What .ci/brokers unpacks: RabbitMQ 4.0 and 4.3. Without them other brokers are of the machine's own version."""
FLAGS = (("all",), ("--opt-in", "khepri_db"))
"""What 4.3 has to find: it has no other place for its metadata any more."""


async def broker_upgrade(desk: Desk) -> None:
    """The broker is upgraded in place under 300 messages a second, with others in its cascade and among the refused;
    where there is one version only, it is stopped and started again."""
    broker, postgres = of(OLDER), Postgres()
    ledger = await desk.installed(broker, postgres, mode="native")
    await ledger.publish(500, delay_ms=150_000, doomed_ones=2)
    await eventually(lambda: levels(desk), lambda depth: depth == 500, timeout=120)
    desk.configure(broker.url(), postgres.url())
    desk.reload()
    await desk.event("mode switched")
    desk.notes.step(f"RabbitMQ {dotted(broker)}: 500 messages wait in its cascade, and 2 are refused")
    async with flowing(ledger, 300, longest_ms=3_000):
        await ledger.until(lambda: ledger.total() > 1_000, timeout=120)
        desk.notes.step("300 messages a second flow through the store")
        if both_there():
            for words in FLAGS:
                await asyncio.to_thread(broker.ctl, "enable_feature_flag", *words)
                desk.notes.step(f"$ rabbitmqctl enable_feature_flag {' '.join(words)}")
        desk.mark()
        await asyncio.to_thread(broker.stop)
        desk.notes.step("the broker is stopped")
        await desk.event("broker connection lost")
        await desk.event("broker unreachable")
        await desk.delayer("status", expect=3, show="out of reach")
        if both_there():
            broker.become(NEWER)
        at = ledger.total()
        desk.mark()
        await asyncio.to_thread(broker.start)
        upgraded = "its packages are upgraded, and it is started on its data"
        desk.notes.step(upgraded if both_there() else "it is started again on its data")
        await desk.event("consuming")
        await ledger.until(lambda: ledger.total() > at + 1_000, timeout=120)
        desk.notes.step(f"messages come out again; it is RabbitMQ {dotted(broker)} now")
        await desk.delayer("check", show=NOT_OK)
        await desk.delayer("topology", "verify")
        await desk.delayer("refused", "list", "--limit", "1", show="^id |doomed|stand")
    await ledger.all_back(timeout=240)
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
    new = of(NEWER)
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


def both_there() -> bool:
    return all((root / ".ready").exists() for root in (OLDER, NEWER))


def of(root: Path) -> RabbitMQ:
    if not both_there():
        return RabbitMQ()
    os.environ[ROOT_VARIABLE] = str(root)
    try:
        return RabbitMQ()
    finally:
        del os.environ[ROOT_VARIABLE]


def dotted(broker: RabbitMQ) -> str:
    return ".".join(map(str, broker.version))
