"""Late messages are held: every message has arrived or is held. A message published too late is delivered only after an
operator retries it. The daemon holds it in the store, or among the strays while the store is down.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from tests.faults.features.striking import commanded, excused, stopped
from tests.faults.fleet import Fleet
from tests.support.account import AFTERMATH_MS, Account
from tests.support.ledger import Ledger
from tests.support.letters import NUMBER
from tests.support.place import eventually

LIMIT_MS: Final = 3_000
"""More than the usual lateness of native mode."""
OVERDUE_MS: Final = 10_000
"""A message published so long after its due instant is always held."""
AWAY_MS: Final = 10_000
"""Long enough to stop the daemons before the messages are due."""
FOUND: Final = 120.0
"""Seconds within which every message is found. Between two levels of the cascade, a message is in no queue."""
ENVIRON: Final = {
    "ROUTE": json.dumps(
        [{"from": "delayer.in", "to": "delayer.out", "late_limit": f"{LIMIT_MS // 1000}s", "late_action": "hold"}]
    )
}
_HELD: Final = "SELECT substring(body FOR 8) FROM held"


class Held(NamedTuple):
    """Held numbers in the store and among the strays; the strays may have a number twice."""

    store: Sequence[int]
    strays: Sequence[int]

    @property
    def all(self) -> set[int]:
        return {*self.store, *self.strays}


@dataclass(frozen=True)
class Judgement:
    """``lost``: neither came nor held. ``overdue``: came though published too late. ``untold``: came long after the
    limit without a fault. ``both``: came and are held, without a fault; ``excused``: with one."""

    lost: Sequence[int]
    overdue: Sequence[int]
    untold: Sequence[int]
    both: Sequence[int]
    excused: Sequence[int]

    def assert_kept(self) -> None:
        assert not self.lost, f"{len(self.lost)} neither came nor are held, such as {self.lost[:5]}"
        assert not self.overdue, f"{len(self.overdue)} came though they were too late, such as {self.overdue[:5]}"
        assert not self.untold, f"{len(self.untold)} came after the limit without a fault, such as {self.untold[:5]}"
        assert not self.both, f"{len(self.both)} came and are held without a fault, such as {self.both[:5]}"


def judged(account: Account, held: Collection[int]) -> Judgement:
    """The judgement before the held messages are retried."""
    lost, overdue, untold, both, by_fault = [], [], [], [], []
    for number in range(account.sent):
        owed, arrivals = account.owed(number), account.arrivals_of(number)
        if not arrivals:
            if number not in held:
                lost.append(number)
            continue
        came_ms, due_ms = arrivals[0].at_ms, arrivals[0].due_ms  # a delay is measured from its read, even if late
        if owed.delay_ms < -LIMIT_MS:
            overdue.append(number)
        elif came_ms > due_ms + LIMIT_MS + AFTERMATH_MS and not excused(account, number, came_ms):
            untold.append(number)
        if number in held:
            (by_fault if excused(account, number, float("inf")) else both).append(number)
    return Judgement(lost, overdue, untold, both, by_fault)


def unmarked(account: Account) -> list[int]:
    """Messages that arrived under more ids than they were read from the intake queue. A held message keeps its id, so
    another read from the end of the cascade, or from the strays, does not excuse another id."""
    readings = account.readings
    assert readings is not None, "this account records no readings"
    return [
        number
        for number in range(account.sent)
        if len({one.id for one in account.arrivals_of(number)}) > readings.read(number)
    ]


async def publish_overdue(ledger: Ledger, count: int) -> None:
    await ledger.publish(count, delay_ms=-OVERDUE_MS, absolute=True)


async def late_in_peace(fleet: Fleet, count: int) -> Judgement:
    """All messages fall due while no daemon runs, and are too late when one starts."""
    ledger = fleet.ledger
    await ledger.publish(count, delay_ms=AWAY_MS)
    await eventually(lambda: ledger.depths("delays"), lambda found: found == {"delays": 0})
    async with stopped(fleet):
        last_ms = max(ledger.account.owed(number).due_ms for number in range(ledger.account.sent))
        await asyncio.sleep((last_ms + LIMIT_MS + AFTERMATH_MS) / 1000 - time.time())
    await publish_overdue(ledger, count)
    return judged(ledger.account, (await everywhere(fleet)).all)


async def everywhere(fleet: Fleet) -> Held:
    """The held messages, as soon as every message has arrived or is held, or after FOUND seconds."""
    account = fleet.ledger.account

    def found(held: Held) -> bool:
        return all(account.arrivals_of(number) for number in set(range(account.sent)) - held.all)

    with suppress(AssertionError):
        return await eventually(lambda: looked(fleet), found, timeout=FOUND)
    return await looked(fleet)


async def looked(fleet: Fleet) -> Held:
    """The messages that are held now."""
    async with fleet.connected() as connection:
        rows = await connection.fetch(_HELD)
    strays = await fleet.place.bodies(fleet.strays)
    return Held([NUMBER.unpack(number)[0] for (number,) in rows], [NUMBER.unpack_from(body)[0] for body in strays])


async def let_go(fleet: Fleet) -> None:
    """Retry all held messages, and wait until they have arrived, including copies of those that had already arrived."""
    for where in ("held", "strays"):
        assert (await commanded(fleet, where, "retry", "--all", "--yes"))[0] == 0
    await fleet.ledger.all_back()
    await eventually(lambda: looked(fleet), lambda found: not found.all, timeout=FOUND)
