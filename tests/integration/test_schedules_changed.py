"""Operators change schedules: each change is one transaction, and in the audit log."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import asyncpg
import pytest

from delayer.amqp.properties import Properties
from delayer.core.units import DAY_MS
from delayer.schedule import occurrence
from delayer.schedule.record import ScheduleRecord, key_of
from delayer.schedule.rhythm import Cron, Every
from delayer.schedule.schedule import Schedule, ScheduleState
from delayer.store.admin import audit_log
from delayer.store.errors import ScheduleRefused
from delayer.store.rows import keys, partitions
from delayer.store.schedules import changes, reading, table
from tests.support.rows import conserved
from tests.support.schedules import HOUR_MS, check_waiting, named, record, rewind, schedule
from tests.support.store import blocked, opened, owned, release_all, sql

BERLIN = Cron("0 7 * * *", "Europe/Berlin")


async def logged(connection: asyncpg.Connection) -> list[tuple[str, str, int, dict[str, object]]]:
    """The audit log, from its begin: who, verb, messages and request."""
    entries = await audit_log.list_entries(connection, 100)
    return [(one.who, one.verb, one.messages, json.loads(one.asked)) for one in reversed(entries)]


async def test_each_change_is_in_the_audit_log(database: str) -> None:
    async with sql(database) as admin:
        await changes.add(admin, schedule(), who="me")
        await changes.edit(admin, "tick", lambda one: replace(one, body=b"tock"), who="you")
        await changes.pause(admin, "tick", who="me")
        await changes.resume(admin, "tick", who="me")
        await changes.run_now(admin, "tick", who="me")
        await changes.remove(admin, "tick", who="me")
        await changes.apply(admin, [schedule()], who="me")
        one: dict[str, object] = {"schedule": "tick"}
        assert await logged(admin) == [
            ("me", "schedule add", 0, one),
            ("you", "schedule edit", 1, one | {"fields": ["body"]}),
            ("me", "schedule pause", 1, one | {"fields": ["state"]}),
            ("me", "schedule resume", 0, one | {"fields": ["state"]}),
            ("me", "schedule run", 1, one),
            ("me", "schedule remove", 1, one),
            ("me", "schedule apply", 0, {"added": ["tick"], "changed": [], "removed": []}),
        ]
        await conserved(admin)


async def test_a_refused_change_changes_nothing(database: str) -> None:
    async with sql(database) as admin:
        before = await changes.add(admin, schedule(), who="me")
        for refused in (
            changes.add(admin, schedule(), who="me"),
            changes.add(admin, schedule("new", rhythm=Cron("61 * * * *")), who="me"),
            changes.edit(admin, "tick", lambda one: replace(one, catch_up=-1), who="me"),
            changes.edit(admin, "other", lambda one: one, who="me"),
            changes.pause(admin, "other", who="me"),
            changes.resume(admin, "other", who="me"),
            changes.remove(admin, "other", who="me"),
            changes.run_now(admin, "other", who="me"),
            changes.apply(admin, [schedule("twice"), schedule("twice")], who="me"),
            changes.apply(admin, [schedule("good"), schedule("bad", jitter_ms=-1)], who="me"),
        ):
            with pytest.raises(ScheduleRefused, match=r"expected .* found"):
                await refused
        assert await check_waiting(admin) == before
        assert (await reading.count(admin)).states[ScheduleState.ACTIVE] == 1
        assert len(await logged(admin)) == 1


async def test_a_paused_schedule_misses_nothing_and_goes_on_with_the_next_time(database: str) -> None:
    async with sql(database) as admin:
        before = await changes.add(admin, schedule(), who="me")
        paused = await changes.pause(admin, "tick", who="me")
        assert (paused.state, paused.waiting_id) == (ScheduleState.PAUSED, None)
        assert await changes.pause(admin, "tick", who="me") == paused, "a paused schedule stays as it is"
        assert [one.verb for one in await audit_log.list_entries(admin, 10)] == ["schedule pause", "schedule add"]
        await check_waiting(admin)
        resumed = await changes.resume(admin, "tick", who="me")
        assert (resumed.waiting_ms, resumed.missed) == (before.waiting_ms, 0)
        assert resumed.waiting_id != before.waiting_id
        assert await changes.resume(admin, "tick", who="me") == resumed, "an active schedule stays as it is"
        await check_waiting(admin)
        await conserved(admin)


async def test_a_schedule_may_begin_paused(database: str) -> None:
    async with sql(database) as admin:
        added = await changes.add(admin, schedule(), paused=True, who="me")
        assert (added.state, added.waiting_id) == (ScheduleState.PAUSED, None)
        assert (await changes.resume(admin, "tick", who="me")).waiting_id is not None


async def test_an_edit_changes_the_message_that_waits(database: str) -> None:
    async with opened(database) as store, owned(store, 8) as lanes, sql(database) as admin:
        before = await changes.add(admin, schedule(), who="me")
        same = await changes.edit(admin, "tick", lambda one: replace(one, body=b"tock"), who="me")
        assert same.waiting_ms == before.waiting_ms, "the rhythm is the same"
        await check_waiting(admin)
        due = await rewind(admin, HOUR_MS)
        edited = await changes.edit(admin, "tick", lambda one: replace(one, rhythm=Every(DAY_MS)), who="me")
        assert edited.waiting_ms == due.waiting_ms, "one whose time has come stays"
        for lane in lanes:
            await lane.scan()
        [sent] = [one for lane in lanes for one in await release_all(lane)]
        assert sent.parcel.body == b"tock"
        assert ((await check_waiting(admin)).waiting_ms or 1) % DAY_MS == 0
        await conserved(admin)


async def test_an_edit_revives_an_ended_schedule_and_leaves_a_paused_one_paused(database: str) -> None:
    async with opened(database) as store, owned(store, 8) as lanes, sql(database) as admin:
        await changes.add(admin, schedule(max_occurrences=1), who="me")
        await rewind(admin, HOUR_MS)
        for lane in lanes:
            await lane.scan()
            await release_all(lane)
        assert (await check_waiting(admin)).state is ScheduleState.ENDED
        for refused in (changes.resume(admin, "tick", who="me"), changes.pause(admin, "tick", who="me")):
            with pytest.raises(ScheduleRefused, match="it has had its 1 occurrence"):
                await refused
        edited = await changes.edit(admin, "tick", lambda one: replace(one, max_occurrences=2), who="me")
        assert (edited.state, edited.why, edited.made) == (ScheduleState.ACTIVE, "", 1)
        await changes.pause(admin, "tick", who="me")
        paused = await changes.edit(admin, "tick", lambda one: replace(one, max_occurrences=3), who="me")
        assert (paused.state, paused.schedule.max_occurrences) == (ScheduleState.PAUSED, 3)


async def test_run_now_sends_one_more_message_and_the_schedule_stays(database: str) -> None:
    async with opened(database) as store, owned(store, 8) as lanes, sql(database) as admin:
        before = await changes.add(admin, schedule(jitter_ms=HOUR_MS // 2), who="me")
        id_ = await changes.run_now(admin, "tick", who="me")
        for lane in lanes:
            await lane.scan()
        [due] = [one for lane in lanes for one in await release_all(lane)]
        assert (due.id, due.parcel.key, named(due)[0]) == (id_, None, "tick")
        message_id = Properties.parse(due.parcel.properties).short("message_id")
        assert message_id == occurrence.message_id(before.schedule.id, f"run {id_}").encode()
        assert await check_waiting(admin) == before
        await conserved(admin)


async def test_apply_makes_the_store_equal_to_a_set(database: str) -> None:
    async with sql(database) as admin:
        for name in ("same", "changed", "paused", "other"):
            await changes.add(admin, schedule(name), who="me")
        same = await record(admin, "same")
        await changes.pause(admin, "paused", who="me")
        wanted = [schedule("new"), schedule("same"), schedule("changed", body=b"x"), schedule("paused", body=b"x")]

        def names(found: list[Schedule]) -> list[str]:
            return [one.name for one in found]

        for dry_run in (True, False):
            found = await changes.apply(admin, wanted, who="me", prune=True, dry_run=dry_run)
            assert (names(found.added), names(found.removed), names(found.same)) == (["new"], ["other"], ["same"])
            assert [(before.body, after.body) for before, after in found.changed] == [(b"tick", b"x")] * 2
        assert await record(admin, "same") == same
        assert (await record(admin, "paused")).state is ScheduleState.PAUSED
        assert await reading.get(admin, "other") is None
        for name in ("new", "same", "changed", "paused"):
            await check_waiting(admin, name)
        again = await changes.apply(admin, wanted, who="me", prune=True)
        assert names(again.same) == ["new", "same", "changed", "paused"]
        assert names((await changes.apply(admin, wanted[:1], who="me")).removed) == [], "without prune others stay"
        await conserved(admin)


async def test_an_import_edits_no_schedule_that_was_added_meanwhile(database: str) -> None:
    async with sql(database) as admin, sql(database) as other, sql(database) as watch:
        wanted = [schedule(body=b"mine"), schedule("new")]
        async with other.transaction():
            await keys.lock_keys(other, [key_of("tick")])
            importing = asyncio.create_task(changes.apply(admin, wanted, who="me", only_new=True))
            await blocked(watch, "%advisory%")
            await table.put(other, [ScheduleRecord(schedule(), ScheduleState.PAUSED)])
        with pytest.raises(ScheduleRefused, match="expected a new one, found the schedule tick"):
            await importing
        assert (await record(admin)).schedule.body == b"tick"
        assert await reading.get(admin, "new") is None
        same = [schedule(), schedule("new")]
        found = await changes.apply(admin, same, who="me", only_new=True)
        assert [one.name for one in found.same] == ["tick"]


async def test_schedules_are_listed_by_name_and_counted(database: str) -> None:
    async with sql(database) as admin:
        await changes.apply(admin, [schedule(name) for name in "dbca"], who="me")
        await changes.pause(admin, "b", who="me")
        first = await reading.find(admin, 2)
        assert ([one.name for one in first.schedules], first.after) == (["a", "b"], "b")
        second = await reading.find(admin, 2, first.after or "")
        assert ([one.name for one in second.schedules], second.after) == (["c", "d"], None)
        assert [one.name for one in (await reading.find(admin, 9, state=ScheduleState.PAUSED)).schedules] == ["b"]
        counts = await reading.count(admin)
        assert counts.states == {**dict.fromkeys(ScheduleState, 0), ScheduleState.ACTIVE: 3, ScheduleState.PAUSED: 1}
        assert (counts.made, counts.missed, counts.late_ms) == (0, 0, None)


async def test_the_day_of_an_occurrence_has_a_partition(database: str) -> None:
    async with sql(database) as admin:
        added = await changes.add(admin, schedule(rhythm=Every(30 * DAY_MS)), who="me")
        assert (added.due_ms or 0) // DAY_MS in await partitions.read_days(admin)


async def test_the_upkeep_makes_the_partition_that_a_release_needed(database: str) -> None:
    async with opened(database) as store, owned(store, 8) as lanes, sql(database) as admin:
        await changes.add(admin, schedule(rhythm=Every(30 * DAY_MS)), who="me")
        await rewind(admin, 30 * DAY_MS)
        await admin.execute(f"DROP TABLE IF EXISTS {partitions.name_of((await record(admin)).due_ms // DAY_MS + 30)}")
        store.days.learn(await partitions.read_days(admin))
        for lane in lanes:
            await lane.scan()
            await release_all(lane)
        waits = await check_waiting(admin)
        day = (waits.due_ms or 0) // DAY_MS
        assert day not in await partitions.read_days(admin)
        await store.maintain()
        assert day in await partitions.read_days(admin)
        await check_waiting(admin)
