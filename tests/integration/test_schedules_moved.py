"""An export carries schedules with how far they have come, and an import lets them go on in another store."""

from __future__ import annotations

import json
from pathlib import Path

from delayer.core.importing import ImportBatch, ImportItem
from delayer.core.message import Target
from delayer.core.readable import instant
from delayer.format.lines import format_schedule_line
from delayer.schedule.occurrence import occurrence
from delayer.schedule.record import ScheduleRecord, stop
from delayer.schedule.rhythm import Cron
from delayer.schedule.schedule import ScheduleState
from delayer.store.admin.importing import ImportStore
from delayer.store.schedules import changes, reading, table
from tests.integration.cli import Run
from tests.integration.test_import_jsonl import other_store
from tests.support.fakes import WHY
from tests.support.rows import conserved
from tests.support.schedules import HOUR_MS, check_waiting, record, rewind, schedule
from tests.support.servers import Postgres
from tests.support.store import opened, owned, parcel, release_all, sql

NAMES = ("tick", "paused", "berlin")


def kept(one: ScheduleRecord) -> ScheduleRecord:
    """What an export keeps."""
    return one._replace(waiting_id=None, added_ms=0, changed_ms=0)


async def test_schedules_move_with_the_backlog(delayer: Run, database: str, postgres: Postgres, tmp_path: Path) -> None:
    file = tmp_path / "backlog.jsonl"
    async with opened(database) as store, owned(store, 8) as lanes, sql(database) as admin:
        wanted = [
            schedule(catch_up=5, last_ms=1 << 42, body=b"\xff", target=Target(b"delayer.out", b"\xfe")),
            schedule("paused", max_occurrences=7, jitter_ms=5),
            schedule("berlin", rhythm=Cron("0 7 * * *", "Europe/Berlin", 1_000)),
        ]
        await changes.apply(admin, wanted, who="test")
        await changes.pause(admin, "paused", who="test")
        await rewind(admin, HOUR_MS)
        for lane in lanes:
            await lane.scan()
            await release_all(lane)
        await store.park(lanes[0], [parcel(store.now_upper_ms() + HOUR_MS)], [])
        before = [await record(admin, name) for name in NAMES]
        assert before[0].made == 1
    assert "Written: 1 message and 3 schedules." in delayer("export", str(file)).stderr
    assert [json.loads(line).get("schedule") for line in file.read_bytes().splitlines()][:3] == sorted(NAMES)
    async with other_store(postgres) as other, sql(other) as admin:
        delayer("import", "jsonl", "run", str(file), "--unverified", "--yes", DELAYER_STORE__URL=other)
        assert [kept(await check_waiting(admin, name)) for name in NAMES] == [kept(one) for one in before]
        assert await admin.fetchval("SELECT count(*) FROM message") == 3
        assert (await conserved(admin))["parked"] == 3
        again = [await record(admin, name) for name in NAMES]
        delayer(
            "import", "jsonl", "run", str(file), "--unverified", "--yes", "--again", expect=1, DELAYER_STORE__URL=other
        )
        assert [await check_waiting(admin, name) for name in NAMES] == again, "a schedule that is there stays"
        assert await admin.fetchval("SELECT count(*) FROM message") == 4
        await conserved(admin)


async def test_a_limit_and_a_cutoff_leave_no_schedule_behind(
    delayer: Run, database: str, postgres: Postgres, tmp_path: Path
) -> None:
    file = tmp_path / "backlog.jsonl"
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        await changes.apply(admin, [schedule(), schedule("paused")], who="test")
        await changes.pause(admin, "paused", who="test")
        tick = await record(admin)
        assert tick.waiting_ms is not None
        cutoff_ms = tick.waiting_ms + 5 * HOUR_MS - 1
        await store.park(lane, [parcel(cutoff_ms + n) for n in range(-2, 3)], [])
    delayer("export", str(file))
    words = (str(file), "--unverified", "--limit", "2", "--cutoff", instant(cutoff_ms, exact=True))
    seen = json.loads(delayer("import", "jsonl", "preview", *words, "--json").stdout)
    left = {"due before the cutoff": 2, "beyond the limit": 1}
    assert (seen["messages"], seen["schedules"], seen["left"]) == (2, 2, left)
    assert "Chosen: 2 messages and 2 schedules." in delayer("import", "jsonl", "preview", *words).stdout
    async with other_store(postgres) as other, sql(other) as admin:
        delayer("import", "jsonl", "run", *words, "--yes", DELAYER_STORE__URL=other)
        assert (await check_waiting(admin)).waiting_ms == cutoff_ms + 1, "the first time from the cutoff on"
        assert (await check_waiting(admin, "paused")).state is ScheduleState.PAUSED
        dues = [due for (due,) in await admin.fetch("SELECT due_at FROM message WHERE key IS NULL ORDER BY 1")]
        assert dues == [cutoff_ms, cutoff_ms + 1]
        await conserved(admin)


async def test_a_schedule_that_failed_moves_with_its_reason(
    delayer: Run, database: str, postgres: Postgres, tmp_path: Path
) -> None:
    file = tmp_path / "backlog.jsonl"
    async with sql(database) as admin:
        await changes.add(admin, schedule(), who="test")
        lost = ScheduleRecord(schedule("lost", rhythm=Cron("0 7 * * *", "Mars/Olympus")))
        await table.put(admin, [stop(lost, ScheduleState.FAILED, "no zone")])
        before = await record(admin, "lost")
    delayer("export", str(file))
    async with other_store(postgres) as other, sql(other) as admin:
        delayer("import", "jsonl", "run", str(file), "--unverified", "--yes", DELAYER_STORE__URL=other)
        assert kept(await check_waiting(admin, "lost")) == kept(before)
        assert (await check_waiting(admin)).state is ScheduleState.ACTIVE


async def test_an_occurrence_from_elsewhere_is_computed_again(
    delayer: Run, database: str, postgres: Postgres, tmp_path: Path
) -> None:
    """The other host may have had other zone data."""
    file = tmp_path / "backlog.jsonl"
    async with sql(database) as admin:
        await changes.add(admin, schedule(rhythm=Cron("0 7 * * *", "Europe/Berlin")), who="test")
        right = await record(admin)
    delayer("export", str(file))
    line, end = file.read_bytes().splitlines()
    late = json.loads(line) | {"waiting_ms": (right.waiting_ms or 0) + HOUR_MS}
    file.write_bytes(json.dumps(late).encode() + b"\n" + end + b"\n")
    async with other_store(postgres) as other, opened(other) as store, sql(other) as admin:
        await store.maintain()
        delayer("import", "jsonl", "run", str(file), "--unverified", "--yes", DELAYER_STORE__URL=other)
        assert (await check_waiting(admin)).waiting_ms == late["waiting_ms"]
        await store.maintain()
        assert (await check_waiting(admin)).waiting_ms == right.waiting_ms


async def test_a_schedule_with_the_id_of_another_is_left_out(delayer: Run, database: str, tmp_path: Path) -> None:
    file = tmp_path / "backlog.jsonl"
    run = ("import", "jsonl", "run", str(file), "--unverified", "--yes")
    async with sql(database) as admin:
        await changes.apply(admin, [schedule("tack"), schedule("tick")], who="test")
        delayer("export", str(file))
        one, two, end = file.read_bytes().splitlines()
        id_ = json.loads(one)["id"]
        lines = [
            json.dumps(json.loads(line) | {"schedule": name, "id": id_}) for line, name in ((one, "a"), (two, "b"))
        ]
        file.write_bytes("\n".join([*lines, end.decode()]).encode() + b"\n")
        assert "Not imported: 2, because" in delayer(*run, expect=1).output
        assert {one.name async for page in reading.pages(admin) for one in page} == {"tack", "tick"}
        await changes.remove(admin, "tack", who="test")
        delayer(*run, "--again", expect=1)
        assert len([one async for page in reading.pages(admin) for one in page]) == 2
        await conserved(admin)


async def test_an_occurrence_without_its_schedule_is_an_ordinary_message(
    delayer: Run, database: str, postgres: Postgres, tmp_path: Path
) -> None:
    """An export with a filter has no schedules."""
    file = tmp_path / "backlog.jsonl"
    async with sql(database) as admin:
        await changes.add(admin, schedule(), who="test")
    delayer("export", "--exchange", "delayer.out", str(file))
    async with other_store(postgres) as other, sql(other) as admin:
        delayer("import", "jsonl", "run", str(file), "--unverified", "--yes", DELAYER_STORE__URL=other)
        assert await admin.fetch("SELECT key FROM message UNION ALL SELECT key FROM held") == [(None,)]
        assert (await reading.count(admin)).states[ScheduleState.ACTIVE] == 0


async def test_a_line_that_is_no_schedule_is_left_out_and_named(delayer: Run, database: str, tmp_path: Path) -> None:
    file = tmp_path / "backlog.jsonl"
    async with sql(database) as admin:
        await changes.add(admin, schedule(), who="test")
        delayer("export", str(file))
        await changes.remove(admin, "tick", who="test")
        line, end = file.read_bytes().splitlines()
        good = json.loads(line)
        for wrong, says in (
            ({"period_ms": 5}, "every: expected 1s to 36500d, found 5 ms"),
            ({"state": "paused"}, "waiting_ms: expected with an active schedule"),
            ({"max": 1 << 63}, "max: expected 1 to 9223372036854775807 occurrences, found 9223372036854775808"),
            ({"made": 1 << 63}, "made: expected at most 253402300799999, found 9223372036854775808"),
            ({"waiting_ms": -(1 << 63)}, "waiting_ms: expected at most"),
            ({"state": "failed", "waiting_ms": None, "last_ms": 1 << 60}, "last: expected an instant"),
            ({"state": "asleep"}, "expected the id and the state of a schedule"),
            ({"perod_ms": 5}, "did you mean period_ms?"),
        ):
            file.write_bytes(json.dumps(good | wrong).encode() + b"\n" + end + b"\n")
            assert says in delayer("import", "jsonl", "preview", str(file), expect=1).output


async def test_an_import_counts_once_in_each_transaction(database: str) -> None:
    """Counters come last, so that no transaction locks them in two orders."""
    tick = ScheduleRecord(schedule(), waiting_ms=4_000_000_000_000)
    items = [
        ImportItem(parcel(4_000_000_000_000)),
        ImportItem(parcel(4_000_000_000_000, key=b"held"), WHY),
        ImportItem(occurrence(tick.schedule, 4_000_000_000_000), schedule=format_schedule_line(tick)),
    ]
    async with sql(database) as admin:
        await admin.execute(
            "CREATE TABLE counted (at timestamptz DEFAULT now());"
            "CREATE FUNCTION counting() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN INSERT INTO counted DEFAULT VALUES; RETURN NULL; END $$;"
            "CREATE TRIGGER counting AFTER INSERT ON counter FOR EACH STATEMENT EXECUTE FUNCTION counting()"
        )
        async with ImportStore.open(database) as store:
            run = await store.finish_staging(await store.begin("test", {}, "me"), 3)
            run, _ = await store.commit(run, ImportBatch(items, "1"))
        assert (run.parked, run.held) == (2, 1)
        assert await admin.fetchval("SELECT count(*) FROM counted") == 1
        await check_waiting(admin)
        await conserved(admin)
