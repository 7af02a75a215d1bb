"""Schedules in a simulation. Some are never changed, and each of their occurrences must arrive. An operator changes the
others at random."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple

import asyncpg
import detangle

from delayer.amqp.properties import Properties
from delayer.amqp.values import Delivery
from delayer.core.errors import StoreLost
from delayer.schedule.record import ScheduleRecord
from delayer.schedule.rhythm import Every
from delayer.schedule.schedule import SCHEDULE, Schedule
from delayer.store.errors import ScheduleRefused
from delayer.store.schedules import changes
from tests.simulation.store.server import URL
from tests.simulation.traffic import Traffic
from tests.support.ledger import PAUSE, Ledger
from tests.support.schedules import record, schedule
from tests.support.store import sql

STEADY: Final = [f"steady-{number}" for number in range(4)]
CHANGED: Final = [f"changed-{number}" for number in range(3)]
ALL: Final = 1_000
"""More occurrences than any fault makes overdue, so that none is skipped."""
COMMIT_MS: Final = 1_000
"""The most that a release takes from the publish to the commit, without a fault."""
CHANGES_EACH: Final = 0.2
"""The chance of a change by an operator with each publish."""
INCONSISTENT: Final = """
SELECT s.name FROM schedule AS s LEFT JOIN message AS m ON m.id = s.waiting_id
WHERE s.state = 'failed'
OR s.state = 'active' AND m.key IS DISTINCT FROM convert_to('delayer.schedule/' || s.name, 'UTF8')
UNION ALL
SELECT convert_from(m.key, 'UTF8') FROM message AS m
LEFT JOIN schedule AS s ON s.waiting_id = m.id AND m.key = convert_to('delayer.schedule/' || s.name, 'UTF8')
WHERE m.key >= 'delayer.schedule/' AND m.key < 'delayer.schedule0' AND s.name IS NULL
"""
"""Schedules without their next occurrence, or that have failed, and occurrences that are no schedule's next one."""
LOST: Final = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, StoreLost, OSError)


class Occurrence(NamedTuple):
    name: str
    due_ms: int


class Scheduling(Ledger):
    """``came``: the times at which each occurrence arrived, in epoch ms."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.came: dict[Occurrence, list[float]] = {}
        self.owed: dict[str, range] = {}
        """The times that must arrive, by steady schedule. Until :meth:`finish`, an empty range that begins with the
        first one."""

    def _arrived(self, delivery: Delivery, at_ms: float) -> bool:
        properties = Properties.parse(delivery.properties)
        if (name := properties.get(SCHEDULE)) is None:
            return super()._arrived(delivery, at_ms)
        due = properties.get(b"x-delayer-due")
        assert due is not None
        assert isinstance(due.value, int)
        self.came.setdefault(Occurrence(name.content.decode(), due.value), []).append(at_ms)
        return True

    async def finish(self) -> None:
        """Pause all schedules, and note what the steady ones owe."""
        for name in STEADY:
            over = await _until_done(changes.pause, name)
            assert isinstance(over.schedule.rhythm, Every)
            period_ms = over.schedule.rhythm.period_ms
            self.owed[name] = range(self.owed[name].start, (over.settled_ms or 0) + 1, period_ms)
            assert over.missed == 0, f"{name} missed {over.missed}"
        for name in CHANGED:
            with suppress(ScheduleRefused):  # it was removed
                await _until_done(changes.pause, name)


async def begin(ledger: Scheduling) -> None:
    """Add the steady schedules."""
    async with sql(URL) as connection:
        for name in STEADY:
            rhythm = Every(1_000 * detangle.choice([1, 5, 30, 90]), first_ms=detangle.randint(0, 90_000))
            added = await changes.add(connection, schedule(name, rhythm=rhythm, catch_up=ALL), who="test")
            assert added.waiting_ms is not None
            ledger.owed[name] = range(added.waiting_ms, added.waiting_ms)


async def send(ledger: Scheduling, traffic: Traffic) -> None:
    """Publish, and now and then let an operator change a schedule. A change may fail with the store."""
    await ledger.publish(traffic.count(), longest_ms=detangle.choice([5_000, 30_000]))
    if detangle.flip(CHANGES_EACH):
        with suppress(ScheduleRefused, TimeoutError, *LOST):
            async with asyncio.timeout(30), sql(URL) as connection:
                await _change(connection, detangle.choice(CHANGED))


async def _change(connection: asyncpg.Connection, name: str) -> None:
    rhythm = Every(1_000 * detangle.choice([1, 2, 7, 60]))

    def edited(there: Schedule) -> Schedule:
        return replace(there, rhythm=rhythm, catch_up=detangle.choice([0, 1, ALL]))

    match detangle.choice(["add", "add", "edit", "pause", "resume", "remove", "run"]):
        case "add":
            await changes.add(connection, schedule(name, rhythm=rhythm), who="test")
        case "edit":
            await changes.edit(connection, name, edited, who="test")
        case "pause":
            await changes.pause(connection, name, who="test")
        case "resume":
            await changes.resume(connection, name, who="test")
        case "remove":
            await changes.remove(connection, name, who="test")
        case "run":
            await changes.run_now(connection, name, who="test")


async def _until_done(change: Callable[..., Awaitable[ScheduleRecord]], name: str) -> ScheduleRecord:
    """Change the schedule, again after each loss of the store."""
    while True:
        try:
            async with asyncio.timeout(60), sql(URL) as connection:
                await change(connection, name, who="test")
                return await record(connection, name)
        except (TimeoutError, *LOST):
            await asyncio.sleep(PAUSE)


def judge(ledger: Scheduling) -> None:
    """Each occurrence of the steady schedules has come, and nothing came early, or twice without a fault."""
    steady = {one for one in ledger.came if one.name in STEADY}
    owed = {Occurrence(name, due_ms) for name, times in ledger.owed.items() for due_ms in times}
    assert len(owed) > len(STEADY), "the schedules did not run"
    assert not (missing := sorted(owed - steady)), f"{len(missing)} of {len(owed)} are lost: {missing[:5]}"
    # If the release cannot commit after the publish, the occurrence has arrived and still waits. The pause then takes
    # it away, so it is not owed.
    wrong = [one for one in sorted(steady - owed) if not _excused(ledger, one, max(ledger.came[one]) + COMMIT_MS)]
    assert not wrong, f"{len(wrong)} came that no schedule owed: {wrong[:5]}"
    early = [one for one, times in ledger.came.items() if min(times) < one.due_ms]
    assert not early, f"{len(early)} came early: {early[:5]}"
    again = [one for one, times in ledger.came.items() if len(times) > 1 and not _excused(ledger, one, max(times))]
    assert not again, f"{len(again)} came twice without a fault: {again[:5]}"


def _excused(ledger: Scheduling, one: Occurrence, last_ms: float) -> bool:
    windows = ledger.account.windows or ()
    return any(window.begin_ms <= last_ms and window.end_ms >= one.due_ms for window in windows)
