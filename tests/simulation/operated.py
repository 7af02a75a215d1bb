"""An operator cancels messages, gives others a later due instant, and tries held ones again, while everything fails.
Some of the messages are in segments."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Final, NamedTuple

import detangle

from delayer.amqp.values import Delivery
from delayer.core.filters import Filter, Token
from delayer.store.admin import actions
from delayer.store.admin.changes import StoredChange
from delayer.store.admin.detail import ABSENT, FoundIn
from tests.faults.features.striking import excused
from tests.simulation.scheduled import LOST
from tests.simulation.store.server import URL
from tests.simulation.traffic import Traffic
from tests.support.ledger import Ledger
from tests.support.letters import NUMBER

EACH: Final = 0.3
"""The chance that the operator acts after a publish."""
MOST: Final = 5
"""Messages of one command."""
REMEMBERED: Final = 1_000
_NEWEST: Final = "SELECT id, due_at, body FROM message ORDER BY id DESC LIMIT 200"
_HELD: Final = "SELECT id, due_at, body FROM held"
VERBS: Final = ("cancel", "cancel", "reschedule", "reschedule", "retry", "drop", "retry all")


class Moved(NamedTuple):
    due_ms: int
    at_ms: float
    """When the command was answered."""


class Operated(Ledger):
    """``cancelled``, ``moved``: by number, what a command said that it did. ``in_doubt``: it gave no answer."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.numbers: dict[int, int] = {}
        """The letters of the newest rows that the operator has seen, by id. They may be in segments by now, or gone."""
        self.cancelled: set[int] = set()
        self.moved: dict[int, Moved] = {}
        self.in_doubt: set[int] = set()
        self.stale: list[int] = []
        """Numbers of messages that came by an earlier due instant than the one that a command had given them."""
        self._due: dict[int, set[int]] = {}
        """The due instants that a row may have, by id."""
        self._dues: dict[int, set[int]] = {}
        """Those that a letter may arrive with."""

    def judge(self, number: int, delivery: Delivery, at_ms: float) -> bool:
        letter = self.letter(number, self.account.owed(number))
        gained = letter.gained(delivery.routing_key, delivery.properties, delivery.body)
        if gained is not None and gained.due_ms in self._dues.get(number, ()):
            self.account.move(number, gained.due_ms)
        moved = self.moved.get(number)
        if gained is not None and moved is not None and gained.due_ms < moved.due_ms and at_ms > moved.at_ms:
            self.stale.append(number)
        return super().judge(number, delivery, at_ms)

    async def look(self) -> None:
        """Note the rows that wait or are held."""
        async with actions.change_connection(URL, "operate") as connection:
            for row in [*await connection.fetch(_NEWEST), *await connection.fetch(_HELD)]:
                self.numbers[row["id"]] = NUMBER.unpack_from(row["body"])[0]
                self._due.setdefault(row["id"], {row["due_at"]})
        for id_ in sorted(self.numbers)[:-REMEMBERED]:
            del self.numbers[id_], self._due[id_]

    async def cancel(self, verb: str, ids: Collection[int]) -> None:
        """Cancel these rows, or those of them that are held."""
        numbers = {self.numbers[id_] for id_ in ids}
        self.in_doubt |= numbers
        found = await self._change(verb, ids)
        self.cancelled.update(self.numbers[id_] for id_, where in found.items() if where not in ABSENT)
        self.in_doubt -= numbers

    async def move(self, ids: Collection[int]) -> None:
        """Let these rows be due later."""
        by_ms = detangle.randint(1_000, 60_000)
        later = {id_: {due_ms + by_ms for due_ms in self._due[id_]} for id_ in ids}
        for id_, dues in later.items():
            self._dues.setdefault(self.numbers[id_], set()).update(self._due[id_] | dues)
        try:
            found = await self._change("reschedule", ids, actions.NewDue(by_ms=by_ms))
        except (TimeoutError, *LOST):
            for id_, dues in later.items():
                self._due[id_] |= dues
            raise
        for id_, where in found.items():
            if where not in ABSENT:
                self._due[id_] = later[id_]
                self.moved[self.numbers[id_]] = Moved(min(later[id_]), time.time() * 1000)

    async def retry(self, ids: Collection[int]) -> None:
        """Try these rows again now, if they are held. Without ids, all that are held."""
        if ids:
            await self._change("retry", ids)
        else:
            await StoredChange(URL, "retry", Filter()).carry_out("test")

    async def _change(self, verb: str, ids: Collection[int], when: actions.NewDue | None = None) -> dict[int, FoundIn]:
        """Returns where each row was. An operator may know its due instant."""
        dues = {id_: next(iter(self._due[id_])) if detangle.flip(0.5) else None for id_ in sorted(ids)}
        names = {str(id_): Token(id_, due_ms) for id_, due_ms in dues.items()}
        result = await StoredChange(URL, verb, Filter(), names, when).carry_out("test")
        return {int(name): FoundIn(where) for name, where in result.found.items()}


async def send(ledger: Operated, traffic: Traffic) -> None:
    """Publish, and now and then let the operator act. A command may fail with the store."""
    await ledger.publish(traffic.count(), longest_ms=detangle.choice([30_000, 120_000, traffic.longest_ms]))
    if not detangle.flip(EACH):
        return
    with suppress(TimeoutError, *LOST):
        async with asyncio.timeout(60):
            await ledger.look()
            known = sorted(ledger.numbers)
            ids = {detangle.choice(known) for _ in range(detangle.randint(1, MOST))} if known else set()
            match detangle.choice(VERBS):
                case "retry all":
                    await ledger.retry(())
                case _ if not ids:
                    pass
                case "reschedule":
                    await ledger.move(ids)
                case "retry":
                    await ledger.retry(ids)
                case verb:
                    await ledger.cancel(verb, ids)


def judge(ledger: Operated) -> None:
    """All messages came that no command has taken, those that it took did not, and none by an earlier instant."""
    account = ledger.account
    lost = [one for one in account.missing() if one not in ledger.cancelled and one not in ledger.in_doubt]
    assert not lost, f"{len(lost)} are lost, such as {lost[:5]}"
    for what, numbers in {"were cancelled": ledger.cancelled, "were moved later": ledger.stale}.items():
        came = [number for number in sorted(numbers) if (times := account.arrivals_of(number)) and not excused(
            account, number, times[-1].at_ms)]  # fmt: skip
        assert not came, f"{len(came)} came though they {what}, such as {came[:5]}"
