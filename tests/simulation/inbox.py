"""Messages with keys that an application sends and cancels by SQL. `delayer_cancel` gives no answer."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import asyncpg
import detangle

from delayer.amqp.values import Outgoing
from tests.faults.features.striking import excused
from tests.simulation.traffic import Traffic
from tests.support.ledger import PAUSE
from tests.support.sql_ledger import LOST, SqlLedger

SOON_MS: Final = 10_000
"""Without a fault, a cancel is applied so soon after its commit."""
RECENT: Final = 20
"""Each cancel is of one of so many last messages."""


class SqlCancelling(SqlLedger):
    """``asked``: when a cancel of each number was committed."""

    statement = SqlLedger.statement.replace("app_id => $10", "app_id => $10, key => $11")

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.asked: dict[int, float] = {}

    def _arguments(self, message: Outgoing) -> tuple[Any, ...]:
        return (*super()._arguments(message), _key(int(message.token)))

    async def cancel(self, number: int) -> None:
        """Cancel until it is committed. Again does no harm."""
        self.asked.setdefault(number, float("inf"))
        while True:
            try:
                connection = await asyncpg.connect(self.store, timeout=10)
                try:
                    await connection.execute("SELECT delayer_cancel($1)", _key(number), timeout=60)
                finally:
                    connection.terminate()
            except LOST:
                await asyncio.sleep(PAUSE)
            else:
                self.asked[number] = min(self.asked[number], time.time() * 1000)
                return


def _key(number: int) -> str:
    return f"c-{number}"


async def send(ledger: SqlCancelling, traffic: Traffic) -> None:
    await ledger.publish(traffic.count(), longest_ms=detangle.choice([5_000, 60_000, traffic.longest_ms]))
    if (sent := ledger.account.sent) and detangle.flip(0.5):
        await ledger.cancel(detangle.randint(max(0, sent - RECENT), sent - 1))


def judge(ledger: SqlCancelling) -> None:
    """All came that nobody cancelled, and none that was cancelled long before it was due, unless it met a fault."""
    account = ledger.account
    lost = [number for number in account.missing() if number not in ledger.asked]
    assert not lost, f"{len(lost)} are lost, such as {lost[:5]}"
    came = [
        number
        for number, asked_ms in ledger.asked.items()
        if account.owed(number).due_ms > asked_ms + SOON_MS
        and (arrivals := account.arrivals_of(number))
        and not excused(account, number, arrivals[-1].at_ms)
    ]
    assert not came, f"{len(came)} came though they were cancelled, such as {came[:5]}"
