"""What the database rejects, or what cannot be computed, stops one schedule, and nobody is told that all is well."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from delayer.core.errors import Rejected
from delayer.core.message import Due
from delayer.core.units import DAY_MS
from delayer.schedule.record import ScheduleRecord, begin
from delayer.schedule.rhythm import Cron, Every
from delayer.schedule.schedule import ScheduleState
from delayer.schedule.wall import forget_zones
from delayer.store.admin import actions
from delayer.store.errors import ScheduleRefused
from delayer.store.rows import partitions
from delayer.store.schedules import changes, occurrences, reading, table
from tests.integration.test_schedules import REJECT, claimed, released, scan, scene
from tests.support.logged import capture_logs
from tests.support.rows import conserved
from tests.support.schedules import HOUR_MS, check_waiting, named, record, rewind, schedule
from tests.support.store import blocked, sql

HOURLY_IN_BERLIN = Cron("0 * * * *", "Europe/Berlin")
REJECT_PROGRESS = """
CREATE FUNCTION reject() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF NEW.name = 'stuck' AND (NEW.state = 'active' OR TG_ARGV[0] = 'all') THEN
        RAISE EXCEPTION 'no progress'; END IF; RETURN NEW; END $$;
CREATE TRIGGER reject BEFORE UPDATE ON schedule FOR EACH ROW EXECUTE FUNCTION reject({});
"""


@contextmanager
def no_file_can_be_opened() -> Iterator[None]:
    """This process has as many open files as it may have, and must read the zones again."""
    forget_zones()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_a_partition_attached_meanwhile_fails_no_schedule(database: str) -> None:
    async with sql(database) as admin, sql(database) as other, sql(database) as watch:
        planned = begin(ScheduleRecord(schedule(rhythm=Every(DAY_MS))), 50_000 * DAY_MS)
        name, [low, high] = partitions.name_of(50_001), (f"{day}-01-01" for day in (2106, 2107))
        await other.execute(f"CREATE TABLE {name} (LIKE message INCLUDING ALL)")
        async with other.transaction():
            await other.execute(f"ALTER TABLE message ATTACH PARTITION {name} FOR VALUES FROM ('{low}') TO ('{high}')")

            async def write() -> list[ScheduleRecord]:
                async with admin.transaction():
                    return (await occurrences.write(admin, [(planned, 1)], table.put))[0]

            writing = asyncio.create_task(write())
            await blocked(watch, "COPY%")
        [written] = await writing
        assert written.state is ScheduleState.ACTIVE
        assert await other.fetchval(f"SELECT count(*) FROM {name}") == 1
        await check_waiting(admin)


async def test_progress_that_is_rejected_fails_its_schedule_alone(database: str) -> None:
    async with scene(database, lanes=1) as ([lane], admin):
        await changes.apply(admin, [schedule("stuck"), schedule("good")], who="me")
        await rewind(admin, HOUR_MS, "stuck", "good")
        await admin.execute(REJECT_PROGRESS.format("''"))
        await lane.scan()
        assert len(await released([lane])) == 2
        stuck = await check_waiting(admin, "stuck")
        assert (stuck.state, stuck.made) == (ScheduleState.FAILED, 1)
        assert "no progress" in stuck.why
        assert (await check_waiting(admin, "good")).made == 1


async def test_an_occurrence_whose_schedule_cannot_be_written_comes_again(database: str) -> None:
    async with scene(database, lanes=1) as ([lane], admin):
        await changes.add(admin, schedule("stuck"), who="me")
        before = await rewind(admin, HOUR_MS, "stuck")
        await admin.execute(REJECT_PROGRESS.format("'all'"))
        await lane.scan()
        with capture_logs() as logged:
            assert len(await released([lane])) == 1
        assert "row skipped" in {entry["event"] for entry in logged}
        assert await check_waiting(admin, "stuck") == before
        await conserved(admin)


async def test_an_occurrence_that_cannot_be_computed_comes_again(database: str) -> None:
    """Nothing is wrong with the schedule, so it does not fail, and the others go on."""
    async with scene(database, lanes=1) as ([lane], admin):
        await changes.apply(admin, [schedule("berlin", rhythm=HOURLY_IN_BERLIN), schedule("good")], who="me")
        before = await rewind(admin, HOUR_MS, "berlin", "good")
        await lane.scan()
        with capture_logs() as logged, no_file_can_be_opened():
            assert len(await released([lane])) == 2
        assert {entry["schedule"] for entry in logged if entry["event"] == "schedule not computed"} == {"berlin"}
        assert await check_waiting(admin, "berlin") == before
        assert (await check_waiting(admin, "good")).made == 1
        again: list[Due] = []
        while not again:
            again = await released([lane])
        assert [named(due)[0] for due in again] == ["berlin"]
        assert (await check_waiting(admin, "berlin")).made == 1


async def test_a_cancel_that_cannot_compute_what_follows_changes_nothing(database: str) -> None:
    async with scene(database) as (_, admin):
        before = await changes.add(admin, schedule(rhythm=HOURLY_IN_BERLIN), who="me")
        await actions.cancel(admin, [47])  # This reads the statements.
        with no_file_can_be_opened(), pytest.raises(Rejected, match="schedule tick: Too many open files"):
            await actions.cancel(admin, [before.waiting_id or 0])
        assert await check_waiting(admin) == before


@pytest.mark.parametrize("change", ["add", "apply", "edit", "resume"])
async def test_a_change_whose_occurrence_is_rejected_is_refused(database: str, change: str) -> None:
    async with sql(database) as admin:
        await changes.apply(admin, [schedule(), schedule("other")], who="me")
        if change == "resume":
            await changes.pause(admin, "tick", who="me")
            await admin.execute("UPDATE schedule SET body = 'poison' WHERE name = 'tick'")
        await admin.execute(REJECT)
        before = [await check_waiting(admin, name) for name in ("other", "tick")]
        poison = schedule("new", body=b"poison")
        refused = {
            "add": lambda: changes.add(admin, poison, who="me"),
            "apply": lambda: changes.apply(admin, [poison, schedule("other", body=b"good")], who="me"),
            "edit": lambda: changes.edit(admin, "tick", lambda one: replace(one, body=b"poison"), who="me"),
            "resume": lambda: changes.resume(admin, "tick", who="me"),
        }[change]
        name = "new: " if change == "apply" else ""
        what = "state: expected a schedule with a next occurrence, found none: .*no poison"
        with pytest.raises(ScheduleRefused, match=f"^{name}{what}"):
            await refused()
        assert [await check_waiting(admin, name) for name in ("other", "tick")] == before
        assert await reading.get(admin, "new") is None
        await conserved(admin)


@pytest.mark.parametrize(("count", "days"), [(1_000, 30), (64, 400)])
async def test_many_schedules_catch_up_after_a_long_outage(database: str, count: int, days: int) -> None:
    """Each has a time per second. The clocks change in a year, and the server ends what is idle for four seconds."""
    async with scene(database, lanes=1) as ([lane], admin):
        every_second = Cron("* * * * * *", "Europe/Berlin")
        wanted = [schedule(f"s{n}", rhythm=every_second, catch_up=10) for n in range(count)]
        await changes.apply(admin, wanted, who="me")
        await rewind(admin, days * DAY_MS, *(one.name for one in wanted))
        await scan([lane])
        _, rows = await claimed([lane])
        assert len(rows) == count
        await lane.claimers[0].settle(rows, [])
        for name in ("s0", "s9"):
            after = await record(admin, name)
            assert after.made == 1
            assert after.missed > (days - 1) * 86_400
