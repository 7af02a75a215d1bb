"""The next occurrence of a schedule is written in the transaction that ends the one before."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import asyncpg
import pytest

from delayer.amqp.properties import encode_headers, entry, long_string
from delayer.core.filters import Filter
from delayer.core.importing import ImportBatch, ImportItem
from delayer.core.message import Due
from delayer.format.rows import COLUMNS
from delayer.schedule.missed import LATE_MS
from delayer.schedule.occurrence import message_id
from delayer.schedule.record import key_of
from delayer.schedule.rhythm import Cron, Every
from delayer.schedule.schedule import SCHEDULE, SKIP, ScheduleState
from delayer.store import pool, waiting
from delayer.store.admin import actions, draining
from delayer.store.admin.actions import NewDue
from delayer.store.admin.detail import FoundIn
from delayer.store.admin.importing import ImportStore
from delayer.store.lanes.lane import PostgresLane
from delayer.store.rows import keys
from delayer.store.rows.history import OF_HELD
from delayer.store.schedules import changes
from tests.support.fakes import WHY
from tests.support.logged import capture_logs
from tests.support.rows import compact, conserved
from tests.support.schedules import HOUR_MS, check_waiting, named, record, rewind, schedule
from tests.support.store import MANY, ROOM, blocked, opened, owned, parcel, release_all, sql

REJECT = """
CREATE FUNCTION reject() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF NEW.body = 'poison' THEN RAISE EXCEPTION 'no poison here'; END IF; RETURN NEW; END $$;
CREATE TRIGGER reject BEFORE INSERT ON message FOR EACH ROW EXECUTE FUNCTION reject();
"""


@asynccontextmanager
async def scene(database: str, lanes: int = MANY) -> AsyncIterator[tuple[list[PostgresLane], asyncpg.Connection]]:
    """All lanes of a store, at most so many, and a connection next to them. At the end the counters fit the rows."""
    async with sql(database) as admin:
        await admin.execute("DELETE FROM lane WHERE number > $1", min(lanes, 1_000))
    async with opened(database) as store, owned(store, MANY) as ours, sql(database) as admin:
        yield ours, admin
        await conserved(admin)


async def scan(lanes: Sequence[PostgresLane]) -> None:
    for lane in lanes:
        await lane.scan()


async def released(lanes: Sequence[PostgresLane]) -> list[Due]:
    """Release all that is due, in every lane."""
    return [due for lane in lanes for due in await release_all(lane)]


async def claimed(lanes: Sequence[PostgresLane]) -> tuple[PostgresLane, list[Due]]:
    """The lane in which something is due, and its claim."""
    for lane in lanes:
        if rows := await lane.claimers[0].claim(MANY, ROOM):
            return lane, rows
    raise AssertionError("nothing is due")


async def test_a_release_writes_the_next_occurrence(database: str) -> None:
    async with scene(database, lanes=1) as ([lane], admin):
        added = await changes.add(admin, schedule(), who="me")
        assert await check_waiting(admin) == added
        before = await rewind(admin, HOUR_MS)
        await lane.scan()
        [due] = await lane.claimers[0].claim(MANY, ROOM)
        await lane.claimers[0].settle([due], [])
        assert named(due) == ("tick", message_id(added.schedule.id, before.waiting_ms or 0))
        after = await check_waiting(admin)
        assert (after.settled_ms, after.waiting_ms) == (before.waiting_ms, added.waiting_ms)
        assert (after.made, after.missed) == (1, 0)
        assert 0 < (after.late_ms or 0) < HOUR_MS
        assert lane.cursor.noted == after.due_ms, "the lane knows of it"


async def test_a_stray_message_with_the_key_does_not_stop_the_schedule(database: str) -> None:
    """Such as one that a copy of the database, or SQL, brought back: the schedule waits for the other one."""
    async with opened(database) as store, owned(store, MANY) as lanes, sql(database) as admin:
        await changes.add(admin, schedule(), who="me")
        before = await rewind(admin, HOUR_MS)
        fields = ", ".join(COLUMNS)
        await admin.execute(f"INSERT INTO message ({fields}) SELECT {fields} FROM message")
        await scan(lanes)
        assert len(await released(lanes)) == 2
        after = await check_waiting(admin)
        assert (after.made, after.settled_ms) == (1, before.waiting_ms)


async def test_a_rolled_back_release_changes_nothing(database: str) -> None:
    async with scene(database) as (lanes, admin):
        await changes.add(admin, schedule(), who="me")
        before = await rewind(admin, HOUR_MS)
        await scan(lanes)
        lane, [_] = await claimed(lanes)
        await lane.claimers[0].give_up()
        assert await check_waiting(admin) == before
        assert len(await released(lanes)) == 1


async def test_missed_occurrences_are_caught_up_at_once(database: str) -> None:
    """The ones that are caught up are due already, and before the place of the lane."""
    async with scene(database) as (lanes, admin):
        await changes.add(admin, schedule(catch_up=3), who="me")
        await rewind(admin, 10 * HOUR_MS)
        await scan(lanes)
        dues = await released(lanes)
        assert len({named(due) for due in dues}) == 3
        after = await check_waiting(admin)
        assert (after.made, after.missed) == (3, 7)


async def test_a_late_occurrence_expires_where_missed_ones_are_skipped(database: str) -> None:
    async with scene(database) as (lanes, admin):
        await changes.add(admin, schedule(catch_up=SKIP), who="me")
        await rewind(admin, 2 * HOUR_MS)
        await scan(lanes)
        assert await released(lanes) == []
        after = await check_waiting(admin)
        assert (after.made, after.missed) == (0, 2)
        assert (await conserved(admin))["cancelled"] == 1


async def test_an_expired_occurrence_leaves_the_others_of_its_claim_alone(database: str) -> None:
    async with scene(database, lanes=1) as ([lane], admin):
        await changes.apply(admin, [schedule("late", catch_up=SKIP), schedule("once")], who="me")
        for name in ("late", "once"):
            await rewind(admin, 2 * HOUR_MS, name)
        await lane.scan()
        [due] = await lane.claimers[0].claim(MANY, ROOM)
        assert named(due)[0] == "once"
        await lane.claimers[0].settle([due], [])
        assert (await check_waiting(admin, "late")).missed == 2
        assert (await check_waiting(admin, "once")).made == 1
        await conserved(admin)


async def test_an_occurrence_within_a_minute_does_not_expire(database: str) -> None:
    async with scene(database) as (lanes, admin):
        await changes.add(admin, schedule(rhythm=Every(LATE_MS // 2), catch_up=SKIP), who="me")
        await rewind(admin, LATE_MS // 2)
        await scan(lanes)
        assert len(await released(lanes)) == 1


async def test_a_held_occurrence_does_not_stop_the_next(database: str) -> None:
    """It gives its key to the next, and is an ordinary held message from then on."""
    async with scene(database) as (lanes, admin):
        await changes.add(admin, schedule(), who="me")
        await rewind(admin, HOUR_MS)
        await scan(lanes)
        lane, [due] = await claimed(lanes)
        await lane.claimers[0].settle([], [(due, WHY)])
        after = await check_waiting(admin)
        assert (after.made, after.missed, after.made_ms) == (1, 0, None)
        assert await admin.fetch("SELECT key FROM held") == [(None,)]
        await admin.execute("UPDATE held SET retry_at = now()")
        await lane.scan()
        assert [again.id for again in await released(lanes)] == [due.id]
        assert await check_waiting(admin) == after


async def test_the_history_names_the_schedule(database: str) -> None:
    """Released, held, released after that, sent by `run`, and cancelled; but not of other messages."""
    async with opened(database, history_days=7) as store, owned(store) as lanes, sql(database) as admin:
        await changes.add(admin, schedule(), who="me")
        await rewind(admin, HOUR_MS)
        await scan(lanes)
        lane, [due] = await claimed(lanes)
        await lane.claimers[0].settle([], [(due, WHY)])
        await admin.execute("UPDATE held SET retry_at = now()")
        await changes.run_now(admin, "tick", who="me")
        await store.park(lanes[0], [parcel(store.now_lower_ms() - 1)], [])
        await scan(lanes)
        await released(lanes)
        await changes.pause(admin, "tick", who="me")
        rows = await admin.fetch("SELECT what, schedule, count(*) FROM history GROUP BY 1, 2 ORDER BY 1, 2")
    assert [tuple(row) for row in rows] == [
        ("cancelled", "tick", 1), ("held", "tick", 1), ("released", "tick", 2), ("released", None, 1),
    ]  # fmt: skip


async def test_the_history_names_the_schedule_of_all_that_is_cancelled(database: str) -> None:
    """The occurrence that waits, one that is held, one that was moved, and one of `run`; but not of other messages."""
    async with opened(database, history_days=7) as store, owned(store) as lanes, sql(database) as admin:
        await changes.add(admin, schedule(), who="me")
        await rewind(admin, HOUR_MS)
        await scan(lanes)
        lane, [due] = await claimed(lanes)
        await lane.claimers[0].settle([], [(due, WHY)])
        await actions.reschedule(admin, [(await record(admin)).waiting_id or 0], when=NewDue(by_ms=HOUR_MS))
        await changes.run_now(admin, "tick", who="me")
        await store.park(lane, [parcel(store.now_lower_ms() + HOUR_MS)], [])
        ids = [id_ for (id_,) in await admin.fetch("SELECT id FROM message UNION ALL SELECT id FROM held")]
        assert len(await actions.cancel(admin, ids)) == 5
        rows = await admin.fetch("SELECT schedule FROM history WHERE what = 'cancelled'")
    assert Counter(name for (name,) in rows) == {"tick": 4, None: 1}


@pytest.mark.parametrize("named", [b"", entry(SCHEDULE, long_string(b"tick"))])
async def test_what_is_cancelled_is_not_read_whole_for_the_history(database: str, named: bytes) -> None:
    """A park may replace thousands of messages that came straight to the queue, with 128 KB of headers each."""
    long = encode_headers(named + entry(b"h", long_string(b"x" * 100_000)))
    async with opened(database) as store, owned(store) as [lane, *_], sql(database) as admin:
        of_key = parcel(store.now_lower_ms() + HOUR_MS, route=b"", properties=long, key=b"k")
        await store.park(lane, [of_key], [])
        await store.hold(lane, [(of_key._replace(key=None), WHY)])
        async with pool.transaction(admin):
            [waited] = (await keys.cancel_waiting(admin, [b"k"])).rows
        [was_held] = await admin.fetch(f"DELETE FROM held RETURNING {OF_HELD}")
    for row in (waited, was_held):
        assert row["size"] > 100_000
        assert len(row["of_schedule"] or b"") < 1_000
        assert (row["of_schedule"] is None) == (not named)


async def test_a_cancelled_occurrence_does_not_stop_the_next(database: str) -> None:
    async with scene(database) as (_, admin):
        before = await changes.add(admin, schedule(), who="me")
        assert before.waiting_id is not None
        assert await actions.cancel(admin, [before.waiting_id]) == {before.waiting_id: FoundIn.WAITING}
        after = await check_waiting(admin)
        assert after.waiting_ms == (before.waiting_ms or 0) + HOUR_MS
        assert (after.settled_ms, after.made, after.missed) == (before.waiting_ms, 0, 0)


async def act_on_all(admin: asyncpg.Connection, do: actions.Do) -> int:
    log_id = await actions.audit_log.begin(admin, "me", "test", {})
    pages = actions.waiting_pages(admin, Filter())
    return actions.count_found(await actions.apply_to_matching(admin, do, pages, log_id=log_id, say=lambda _: None))


async def test_to_cancel_all_messages_cancels_one_occurrence_of_each_schedule(database: str) -> None:
    async with scene(database) as (_, admin):
        await changes.apply(admin, [schedule(f"s{n}", rhythm=Every(1_000 * n)) for n in range(1, 9)], who="me")
        assert await act_on_all(admin, actions.cancel) == 8
        for n in range(1, 9):
            await check_waiting(admin, f"s{n}")


async def test_a_rescheduled_occurrence_is_an_ordinary_message_and_the_next_one_waits(database: str) -> None:
    async with scene(database) as (lanes, admin):
        before = await changes.add(admin, schedule(), who="me")

        async def soon(connection: asyncpg.Connection, ids: Sequence[int], dues: actions.Dues, log: int) -> object:
            return await actions.reschedule(connection, ids, dues, log, when=NewDue(at_ms=1))

        assert await act_on_all(admin, soon) == 1
        after = await check_waiting(admin)
        assert after.waiting_ms == (before.waiting_ms or 0) + HOUR_MS
        assert after.made == 1
        assert await admin.fetch("SELECT id, key FROM message WHERE id = $1", before.waiting_id) == [
            (before.waiting_id, None)
        ]
        await scan(lanes)
        [due] = await released(lanes)
        assert (due.id, named(due)[0]) == (before.waiting_id, "tick")
        assert await check_waiting(admin) == after


async def test_compaction_leaves_occurrences_alone(database: str) -> None:
    async with scene(database) as (_, admin):
        await changes.add(admin, schedule(rhythm=Every(400 * HOUR_MS)), who="me")
        assert await compact(admin) == []
        await check_waiting(admin)


async def test_a_drain_leaves_occurrences_alone(database: str) -> None:
    async with scene(database) as (_, admin):
        await changes.add(admin, schedule(), who="me")
        places = [one.place async for page in waiting.pages(admin, Filter(), 10) for one in page.messages]
        for keys_too in (False, True):
            async with draining.drain_rows(admin, places, 0, 1_000, keys_too=keys_too) as rows:
                assert rows == ([], 0)
            assert (await draining.count(admin, 0, keys_too=keys_too)).keyed == 1
        await check_waiting(admin)


async def test_an_import_may_not_bring_a_schedule_s_key(database: str) -> None:
    async with sql(database) as admin:
        await changes.add(admin, schedule(), who="me")
    async with ImportStore.open(database) as store:
        run = await store.finish_staging(await store.begin("test", {}, "me"), 1)
        item = ImportItem(parcel(4_000_000_000_000, key=key_of("tick")))
        run, added = await store.commit(run, ImportBatch([item], "1"))
        assert (run.parked, run.superseded, added[0].parcel.key) == (1, 0, None)
    async with sql(database) as admin:
        await check_waiting(admin)


async def test_a_schedule_ends_after_its_last_occurrence(database: str) -> None:
    async with scene(database) as (lanes, admin):
        await changes.add(admin, schedule(max_occurrences=1), who="me")
        await rewind(admin, HOUR_MS)
        await scan(lanes)
        assert len(await released(lanes)) == 1
        after = await check_waiting(admin)
        assert (after.state, after.why) == (ScheduleState.ENDED, "it has had its 1 occurrence")


async def test_a_schedule_that_cannot_be_computed_fails_alone(database: str) -> None:
    async with scene(database, lanes=1) as ([lane], admin):
        lost = schedule("lost", rhythm=Cron("0 * * * *", "Europe/Berlin"))
        await changes.apply(admin, [lost, schedule("good"), schedule("poison", body=b"good")], who="me")
        await admin.execute("UPDATE schedule SET zone = 'Europe/Atlantis' WHERE name = 'lost'")
        await admin.execute("UPDATE schedule SET body = 'poison' WHERE name = 'poison'")
        await admin.execute(REJECT)
        for name in ("lost", "good", "poison"):
            await rewind(admin, HOUR_MS, name)
        await lane.scan()
        with capture_logs() as logged:
            assert len(await release_all(lane)) == 3
        failed = {entry["schedule"] for entry in logged if entry["event"] == "schedule failed"}
        assert failed == {"lost", "poison"}
        states = {name: await check_waiting(admin, name) for name in ("lost", "good", "poison")}
        assert states["good"].state is ScheduleState.ACTIVE
        assert states["lost"].state is states["poison"].state is ScheduleState.FAILED
        assert "Europe/Atlantis" in states["lost"].why
        assert "no poison here" in states["poison"].why
        assert [one.made for one in states.values()] == [1, 1, 1]
        assert (await conserved(admin))["held"] == 0


async def test_a_pause_waits_for_the_release_under_way_and_takes_what_follows(database: str) -> None:
    async with scene(database) as (lanes, admin), sql(database) as operator:
        await changes.add(admin, schedule(catch_up=5), who="me")
        await rewind(admin, 4 * HOUR_MS)
        await scan(lanes)
        lane, rows = await claimed(lanes)
        pausing = asyncio.create_task(changes.pause(operator, "tick", who="me"))
        await blocked(admin, "%")
        await lane.claimers[0].settle(rows, [])
        await pausing
        paused = await check_waiting(admin)
        assert (paused.state, paused.made) == (ScheduleState.PAUSED, 1)
        assert await released(lanes) == []


@pytest.mark.parametrize("change", ["edit", "pause", "remove", "cancel"])
async def test_changes_and_releases_at_once(database: str, change: str) -> None:
    """Whoever comes first, a schedule has one occurrence, and none is sent twice."""
    sent: list[tuple[str, str]] = []
    async with scene(database) as (lanes, admin), sql(database) as operator:
        names = [f"s{n}" for n in range(20)]
        await changes.apply(admin, [schedule(name, rhythm=Every(1_000), catch_up=1_000) for name in names], who="me")
        for name in names:
            await rewind(admin, 60_000, name)
        await scan(lanes)

        async def release(lane: PostgresLane) -> None:
            sent.extend(named(due) for due in await release_all(lane))

        async def operate() -> None:
            for name in names:
                if change == "edit":
                    await changes.edit(operator, name, lambda one: replace(one, body=b"edited"), who="me")
                elif change == "pause":
                    await changes.pause(operator, name, who="me")
                    await changes.resume(operator, name, who="me")
                elif change == "remove":
                    await changes.remove(operator, name, who="me")
                else:
                    waits = await record(operator, name)
                    await actions.cancel(operator, [waits.waiting_id or 0])

        await asyncio.gather(operate(), *map(release, lanes))
        if change != "remove":
            for name in names:
                await check_waiting(admin, name)
        assert len(sent) == len(set(sent)) > 0
