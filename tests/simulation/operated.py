"""An operator cancels messages, and gives others a later due instant, while everything fails."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any, Final, NamedTuple

import detangle

from delayer.amqp.values import Delivery
from delayer.store.admin import actions
from delayer.store.admin.detail import ABSENT
from tests.faults.features.striking import excused
from tests.simulation.scheduled import LOST
from tests.simulation.store.server import URL
from tests.support.ledger import Ledger
from tests.support.letters import NUMBER

EACH: Final = 0.3
"""The chance that the operator acts after a publish."""
MOST: Final = 5
"""Messages of one command."""
_NEWEST: Final = "SELECT id, due_at, body FROM message ORDER BY id DESC LIMIT 200"


class Moved(NamedTuple):
    due_ms: int
    at_ms: float
    """When the command was answered."""


class Operated(Ledger):
    """``cancelled``, ``moved``: by number, what a command said that it did. ``in_doubt``: it gave no answer."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.cancelled: set[int] = set()
        self.moved: dict[int, Moved] = {}
        self.in_doubt: set[int] = set()
        self.stale: list[int] = []
        """Numbers of messages that came by an earlier due instant than the one that a command had given them."""
        self._dues: dict[int, set[int]] = {}

    def judge(self, number: int, delivery: Delivery, at_ms: float) -> bool:
        letter = self.letter(number, self.account.owed(number))
        gained = letter.gained(delivery.routing_key, delivery.properties, delivery.body)
        if gained is not None and gained.due_ms in self._dues.get(number, ()):
            self.account.move(number, gained.due_ms)
        moved = self.moved.get(number)
        if gained is not None and moved is not None and gained.due_ms < moved.due_ms and at_ms > moved.at_ms:
            self.stale.append(number)
        return super().judge(number, delivery, at_ms)

    async def cancel(self, connection: Any, numbers: dict[int, int]) -> None:
        """Cancel the rows with these ids. The values are the numbers of their letters."""
        self.in_doubt.update(numbers.values())
        found = await actions.cancel(connection, [*numbers])
        self.cancelled.update(numbers[id_] for id_, where in found.items() if where not in ABSENT)
        self.in_doubt.difference_update(numbers.values())

    async def move(self, connection: Any, numbers: dict[int, int], dues: dict[int, int]) -> None:
        """Let the rows with these ids be due later."""
        by_ms = detangle.randint(1_000, 60_000)
        for id_, number in numbers.items():
            self._dues.setdefault(number, {dues[id_]}).add(dues[id_] + by_ms)
        found = await actions.reschedule(connection, [*numbers], when=actions.NewDue(by_ms=by_ms))
        for id_, where in found.items():
            if where not in ABSENT:
                self.moved[numbers[id_]] = Moved(dues[id_] + by_ms, time.time() * 1000)


async def send(ledger: Operated, rate: int) -> None:
    """Publish, and now and then let the operator act. A command may fail with the store."""
    await ledger.publish(rate, longest_ms=detangle.choice([30_000, 120_000]))
    if not detangle.flip(EACH):
        return
    with suppress(TimeoutError, *LOST):
        async with asyncio.timeout(60), actions.change_connection(URL, "operate") as connection:
            rows = await connection.fetch(_NEWEST)
            chosen = [detangle.choice(rows) for _ in range(min(len(rows), detangle.randint(1, MOST)))]
            numbers = {row["id"]: NUMBER.unpack_from(row["body"])[0] for row in chosen}
            if detangle.flip(0.5):
                await ledger.cancel(connection, numbers)
            else:
                await ledger.move(connection, numbers, {row["id"]: row["due_at"] for row in chosen})


def judge(ledger: Operated) -> None:
    """All messages came that no command has taken, those that it took did not, and none by an earlier instant."""
    account = ledger.account
    lost = [one for one in account.missing() if one not in ledger.cancelled and one not in ledger.in_doubt]
    assert not lost, f"{len(lost)} are lost, such as {lost[:5]}"
    for what, numbers in {"were cancelled": ledger.cancelled, "were moved later": ledger.stale}.items():
        came = [number for number in sorted(numbers) if (times := account.arrivals_of(number)) and not excused(
            account, number, times[-1].at_ms)]  # fmt: skip
        assert not came, f"{len(came)} came though they {what}, such as {came[:5]}"
