"""A stuck destination, and a flood."""

from __future__ import annotations

import json

import aio_pika

from tests.faults.place import eventually
from tests.runbooks.desk import NOT_OK, Desk
from tests.support.flow import flowing
from tests.support.servers import Postgres, RabbitMQ


async def stuck_destination(desk: Desk) -> None:
    """Somebody removes the binding that led due messages to their queue, and puts it back a while later."""
    broker, postgres = RabbitMQ(), Postgres()
    ledger = await desk.installed(broker, postgres)

    async def held() -> int:
        status = await desk.quietly("status", "--json")
        return int(json.loads(status)["store"]["held"])

    async with flowing(ledger, 200, longest_ms=2_000):
        await ledger.until(lambda: ledger.total() > 500, timeout=120)
        desk.notes.step("200 messages a second flow; the binding of delayer.out to its only queue is removed")
        desk.mark()
        await bind(broker.url(), bound=False)
        await desk.event("message held")
        await eventually(held, lambda count: count > 500, timeout=120)
        await desk.delayer("check", show=NOT_OK)
        await desk.delayer("held", "list", "--limit", "2", lines=6)
        desk.notes.step("the binding is there again; new messages go out at once")
        at = ledger.total()
        await bind(broker.url(), bound=True)
        await ledger.until(lambda: ledger.total() > at + 200, timeout=120)
        await desk.delayer("held", "retry", "--to", "delayer.out", "--dry-run")
        await desk.delayer("held", "retry", "--to", "delayer.out", "--yes")
    await ledger.all_back(timeout=120)
    await desk.delayer("audit-log", "--limit", "1", lines=4)
    await desk.end()
    desk.balance(ledger)


async def bind(url: str, *, bound: bool) -> None:
    async with await aio_pika.connect(url) as connection:
        queue = await (await connection.channel()).get_queue("ledger")
        await (queue.bind("delayer.out", "#") if bound else queue.unbind("delayer.out", "#"))


async def flood(desk: Desk) -> None:
    """40,000 messages fall due within seconds, for a consumer that must not get more than 1,000 a second."""
    broker, postgres = RabbitMQ(), Postgres()
    ledger = await desk.installed(broker, postgres, route={"max_rate": 1_000})
    desk.notes.step("max_rate = 1000 stands in the route; 40,000 messages come in, and are due in the same 15 s")
    await ledger.publish(40_000, delay_ms=15_000)
    desk.notes.step("all of them are confirmed into `delays`")
    await ledger.until(lambda: ledger.total() > 4_000, timeout=120)
    await desk.delayer("status", lines=14)
    at, began = ledger.total(), desk.notes.now()
    await ledger.until(lambda: ledger.total() > at + 5_000, timeout=120)
    rate = (ledger.total() - at) / (desk.notes.now() - began)
    desk.notes.step(f"the destination gets {rate:,.0f} messages a second")
    assert rate < 1_200, rate
    desk.configure(broker.url(), postgres.url())
    desk.reload()
    desk.notes.step("the consumers are found to bear more: max_rate is taken out, systemctl reload delayer")
    await desk.event("reloaded")
    at, began = ledger.total(), desk.notes.now()
    await ledger.all_back(timeout=120)
    desk.notes.step(f"the remaining {ledger.total() - at:,} are out {desk.notes.now() - began:.1f} s later")
    await desk.end()
    desk.balance(ledger)
