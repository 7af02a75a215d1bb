"""The occurrences that wait follow the zone data of the hosts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from zoneinfo import reset_tzpath

import asyncpg
import pytest

from delayer.core.errors import StoreLost
from delayer.core.units import DAY_MS
from delayer.schedule import zone_data
from delayer.schedule.record import ScheduleRecord
from delayer.schedule.rhythm import Cron
from delayer.schedule.schedule import ScheduleState
from delayer.schedule.wall import forget_zones
from delayer.store.admin import actions
from delayer.store.errors import ScheduleRefused
from delayer.store.postgres import PostgresStore
from delayer.store.schedules import changes, reading, zones
from delayer.store.schedules.zones import ZoneWatch
from tests.support.logged import capture_logs
from tests.support.place import eventually
from tests.support.rows import conserved
from tests.support.schedules import HOUR_MS, HOURLY, check_waiting, record, rewind, schedule
from tests.support.store import opened, owned, release_all, sql

BERLIN = Cron("0 7 * * *", "Europe/Berlin")


def copy_of(zones: Path, version: str, berlin: str) -> Path:
    """Zone data of this version, in which Berlin has the time of another zone."""
    place = zones / version
    (place / "Europe").mkdir(parents=True)
    (place / "tzdata.zi").write_text(f"# version {version}\n", encoding="ascii")
    (place / "UTC").touch()
    (place / "Europe" / "Berlin").write_bytes((files("tzdata") / "zoneinfo" / berlin).read_bytes())
    return place


@contextmanager
def zones_of(place: Path) -> Iterator[None]:
    """Let this process load its zones from this copy."""
    reset_tzpath([place])
    forget_zones()
    try:
        yield
    finally:
        reset_tzpath()
        forget_zones()


async def renew_by(place: Path, store: PostgresStore) -> None:
    """The upkeep of a daemon that has just started with these zones."""
    with zones_of(place):
        await ZoneWatch(lambda: [place]).run_upkeep(store.pool, store.locks.owner)


def hour_of(one: ScheduleRecord) -> int:
    """The hour of its next occurrence in UTC."""
    return (one.waiting_ms or 0) % DAY_MS // HOUR_MS


async def test_newer_zone_data_move_the_next_occurrences(database: str, tmp_path: Path) -> None:
    async with opened(database) as store, sql(database) as admin:
        await changes.apply(admin, [schedule("berlin", rhythm=BERLIN), schedule("hourly", rhythm=HOURLY)], who="me")
        before, hourly = await record(admin, "berlin"), await record(admin, "hourly")
        await renew_by(copy_of(tmp_path, "2099a", "Asia/Tokyo"), store)
        after = await check_waiting(admin, "berlin")
        assert hour_of(after) == 22, "07:00 in Tokyo"
        assert await check_waiting(admin, "hourly") == hourly
        assert await reading.zone_version(admin) == "2099a"
        await renew_by(copy_of(tmp_path, "2098z", "Europe/Berlin"), store)
        assert await check_waiting(admin, "berlin") == after, "older data change nothing"
        await renew_by(copy_of(tmp_path, "2099b", "Europe/Berlin"), store)
        assert (await check_waiting(admin, "berlin")).waiting_ms == before.waiting_ms
        await conserved(admin)


async def test_a_schedule_without_its_zone_goes_on_when_the_data_have_it(database: str, tmp_path: Path) -> None:
    async with opened(database) as store, sql(database) as admin:
        added = await changes.add(admin, schedule(rhythm=BERLIN), who="me")
        await admin.execute("UPDATE schedule SET zone = 'Europe/Atlantis'")
        await ZoneWatch(lambda: [copy_of(tmp_path, "2099a", "Europe/Berlin")]).run_upkeep(store.pool, store.locks.owner)
        assert (await check_waiting(admin)).state is ScheduleState.FAILED
        with pytest.raises(ScheduleRefused, match=r"^state: expected a schedule with .*: .*Atlantis"):
            await changes.resume(admin, "tick", who="me")
        assert (await check_waiting(admin)).state is ScheduleState.FAILED
        await admin.execute("UPDATE schedule SET zone = 'Europe/Berlin'")
        await ZoneWatch(lambda: [copy_of(tmp_path, "2099b", "Europe/Berlin")]).run_upkeep(store.pool, store.locks.owner)
        after = await check_waiting(admin)
        assert (after.state, after.waiting_ms) == (ScheduleState.ACTIVE, added.waiting_ms)
        await conserved(admin)


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_daemon_whose_zone_data_catch_up_computes_again(
    database: str, tmp_path: Path, is_restarted: bool
) -> None:
    """It wrote occurrences by its older data, although the store knows of newer ones."""
    async with opened(database) as store, sql(database) as admin:
        old, new = copy_of(tmp_path, "2099a", "Asia/Tokyo"), copy_of(tmp_path, "2099b", "Europe/Berlin")
        await renew_by(new, store)
        place = [old]
        watch = ZoneWatch(lambda: place)
        with zones_of(old):
            await watch.run_upkeep(store.pool, store.locks.owner)
            assert hour_of(await changes.add(admin, schedule(rhythm=BERLIN), who="me")) == 22
        place[:] = [new]
        with zones_of(new):
            await admin.execute("ALTER TABLE schedule RENAME TO missing")
            with pytest.raises(asyncpg.UndefinedTableError):
                await watch.run_upkeep(store.pool, store.locks.owner)
            await admin.execute("ALTER TABLE missing RENAME TO schedule")
            watch = ZoneWatch(lambda: place) if is_restarted else watch
            await watch.run_upkeep(store.pool, store.locks.owner)
        assert hour_of(await check_waiting(admin)) != 22
        assert await reading.zone_version(admin) == "2099b"


async def test_a_daemon_knows_which_zone_data_it_had_since_its_last_upkeep(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store does not, if another daemon did not see this one when it renewed all."""
    async with opened(database) as store, sql(database) as admin:
        old, new = copy_of(tmp_path, "2099a", "Asia/Tokyo"), copy_of(tmp_path, "2099b", "Europe/Berlin")
        place = [old]
        watch = ZoneWatch(lambda: place)
        monkeypatch.setattr(zone_data, "zone_directories", lambda: [new])
        with zones_of(old):
            await watch.run_upkeep(store.pool, store.locks.owner)
        await renew_by(new, store)
        with zones_of(old):
            assert hour_of(await changes.add(admin, schedule(rhythm=BERLIN), who="me")) == 22
        assert await reading.zone_version(admin) == "2099b"
        place[:] = [new]
        with zones_of(new):
            await watch.run_upkeep(store.pool, store.locks.owner)
        assert hour_of(await check_waiting(admin)) != 22


async def test_two_hosts_with_different_zone_data_do_not_work_for_ever(database: str, tmp_path: Path) -> None:
    async with opened(database) as store, opened(database, owner="there:2") as other, sql(database) as admin:
        old, new = copy_of(tmp_path, "2099a", "Asia/Tokyo"), copy_of(tmp_path, "2099b", "Europe/Berlin")
        await changes.add(admin, schedule(rhythm=BERLIN), who="me")
        store.zones, other.zones = ZoneWatch(lambda: [new]), ZoneWatch(lambda: [old])
        with zones_of(new):
            await store.maintain()
            before = await check_waiting(admin)
            await other.maintain()
            await other.locks.look()
            await admin.execute("ALTER TABLE schedule RENAME TO missing")
            await store.zones.run_upkeep(store.pool, store.locks.owner)
            await admin.execute("ALTER TABLE missing RENAME TO schedule")
        assert await check_waiting(admin) == before


async def test_the_newer_daemon_computes_again_what_the_older_one_wrote(database: str, tmp_path: Path) -> None:
    """Once the older one has left."""
    async with opened(database, owner="here:1") as store, opened(database, owner="there:2") as other:
        old, new = copy_of(tmp_path, "2099a", "Asia/Tokyo"), copy_of(tmp_path, "2099b", "Europe/Berlin")
        store.zones, other.zones = ZoneWatch(lambda: [new]), ZoneWatch(lambda: [old])
        for one, place in ((store, new), (other, old)):
            with zones_of(place):
                await one.maintain()
            await one.locks.look()
        async with sql(database) as admin:
            with zones_of(old):
                assert hour_of(await changes.add(admin, schedule(rhythm=BERLIN), who="me")) == 22
            with zones_of(new):
                await store.maintain()
                assert hour_of(await check_waiting(admin)) == 22, "the other one would put its version down again"
                other.locks.leave()
                await eventually(lambda: _is_alone(admin))
                await store.maintain()
            assert hour_of(await check_waiting(admin)) != 22
            assert await reading.zone_version(admin) == "2099b"


async def test_what_an_older_daemon_wrote_before_it_died_is_computed_again(database: str, tmp_path: Path) -> None:
    """It wrote it after the renewal, and died before its next upkeep."""
    old, new = copy_of(tmp_path, "2099a", "Asia/Tokyo"), copy_of(tmp_path, "2099b", "Europe/Berlin")
    async with opened(database, owner="here:1") as store, opened(database, owner="there:2") as other:
        store.zones, other.zones = ZoneWatch(lambda: [new]), ZoneWatch(lambda: [old])
        async with sql(database) as admin, owned(other) as lanes:
            await admin.execute("DELETE FROM lane WHERE number <> $1", lanes[0].number)
            with zones_of(old):
                await other.maintain()
                await other.locks.look()
                await changes.add(admin, schedule(rhythm=BERLIN), who="me")
            with zones_of(new):
                await store.maintain()
                await store.locks.look()
            await rewind(admin, DAY_MS)
            with zones_of(old):
                await lanes[0].scan()
                assert len(await release_all(lanes[0])) == 1
                assert hour_of(await check_waiting(admin)) == 22
            other.locks.leave()
            await eventually(lambda: _is_alone(admin))
            with zones_of(new):
                await store.maintain()
            assert hour_of(await check_waiting(admin)) != 22
            assert await reading.zone_version(admin) == "2099b"


async def _is_alone(admin: asyncpg.Connection) -> bool:
    return list(await reading.zone_versions(admin)) == ["2099b"]


async def test_what_an_older_host_writes_during_a_renewal_is_computed_again(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, old = copy_of(tmp_path, "2099b", "Europe/Berlin"), copy_of(tmp_path, "2099a", "Asia/Tokyo")
    async with opened(database) as store, sql(database) as admin:
        await admin.execute("UPDATE store SET zone_version = ''")
        renew = zones._renew

        async def meanwhile(connection: asyncpg.Connection) -> int:
            done = await renew(connection)
            monkeypatch.setattr(zone_data, "zone_directories", lambda: [old])
            with zones_of(old):
                assert hour_of(await changes.add(admin, schedule(rhythm=BERLIN), who="me")) == 22
            return done

        monkeypatch.setattr(zones, "_renew", meanwhile)
        store.zones = ZoneWatch(lambda: [new])
        with zones_of(new):
            await store.maintain()
            assert await reading.zone_version(admin) < "2099b"
        monkeypatch.setattr(zones, "_renew", renew)
        with zones_of(new):
            await store.maintain()
        assert hour_of(await check_waiting(admin)) != 22
        assert await reading.zone_version(admin) == "2099b"


@pytest.mark.parametrize("other", ["2099b", "2099c"])
async def test_a_renewal_that_is_cut_off_is_repeated_whatever_other_hosts_do(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """During the renewal a command on another host wrote an occurrence, by the same data or newer ones."""
    old, new = copy_of(tmp_path, "2099a", "Asia/Tokyo"), copy_of(tmp_path, "2099b", "Europe/Berlin")
    there = new if other == "2099b" else copy_of(tmp_path, other, "Europe/Berlin")
    async with opened(database) as store, sql(database) as admin:
        await changes.apply(admin, [schedule(name, rhythm=BERLIN) for name in "ab"], who="me")
        await renew_by(old, store)
        assert hour_of(await check_waiting(admin, "a")) == 22

        async def cut_off(_connection: asyncpg.Connection) -> int:
            monkeypatch.setattr(zone_data, "zone_directories", lambda: [there])
            await changes.edit(admin, "b", lambda one: replace(one, body=b"new"), who="me")
            raise asyncpg.ConnectionDoesNotExistError

        with monkeypatch.context() as patched, pytest.raises(asyncpg.ConnectionDoesNotExistError):
            patched.setattr(zones, "_renew", cut_off)
            await renew_by(new, store)
        assert await reading.zone_version(admin) == "2099a", "some are still by these"
        await renew_by(new, store)
        assert hour_of(await check_waiting(admin, "a")) != 22
        assert await reading.zone_version(admin) == "2099b"


@pytest.mark.parametrize("version", ["2098z", "2099b"])
async def test_a_command_on_a_host_with_older_zone_data_puts_them_down(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    async with opened(database) as store, sql(database) as admin:
        new = copy_of(tmp_path, "2099a", "Europe/Berlin")
        store.zones = ZoneWatch(lambda: [new])
        with zones_of(new):
            await store.maintain()
        here = copy_of(tmp_path, version, "Asia/Tokyo")
        monkeypatch.setattr(zone_data, "zone_directories", lambda: [here])
        with zones_of(here):
            assert hour_of(await changes.add(admin, schedule(rhythm=BERLIN), who="me")) == 22
        assert await reading.zone_version(admin) == min(version, "2099a")
        with zones_of(new):
            await store.maintain()
        assert (hour_of(await check_waiting(admin)) == 22) == (version > "2099a")
        assert await reading.zone_version(admin) == "2099a"


async def test_a_cancel_on_a_host_with_older_zone_data_puts_them_down(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes the next occurrence, like a release."""
    async with opened(database) as store, sql(database) as admin:
        new, old = copy_of(tmp_path, "2099b", "Europe/Berlin"), copy_of(tmp_path, "2099a", "Asia/Tokyo")
        store.zones = ZoneWatch(lambda: [new])
        with zones_of(new):
            added = await changes.add(admin, schedule(rhythm=BERLIN), who="me")
            await store.maintain()
        monkeypatch.setattr(zone_data, "zone_directories", lambda: [old])
        assert added.waiting_id is not None
        with zones_of(old):
            await actions.cancel(admin, [added.waiting_id])
        assert hour_of(await check_waiting(admin)) == 22
        with zones_of(new):
            await store.maintain()
        assert hour_of(await check_waiting(admin)) != 22


@pytest.mark.parametrize(("table", "is_renewed"), [("request", True), ("schedule", False)])
async def test_upkeep_of_tables_and_of_schedules_does_not_wait_for_the_other_to_succeed(
    database: str, tmp_path: Path, table: str, is_renewed: bool
) -> None:
    async with opened(database) as store, sql(database) as admin:
        await changes.add(admin, schedule(rhythm=BERLIN), who="me")
        place = copy_of(tmp_path, "2099a", "Asia/Tokyo")
        store.zones = ZoneWatch(lambda: [place])
        await admin.execute(f"ALTER TABLE {table} RENAME TO missing")
        with zones_of(place), pytest.raises(StoreLost, match=table):
            await store.maintain()
        await admin.execute(f"ALTER TABLE missing RENAME TO {table}")
        assert (await reading.zone_version(admin) == "2099a") is is_renewed
        assert store.locks.zone_version == "2099a"


async def test_a_schedule_that_cannot_be_computed_does_not_keep_the_others(database: str, tmp_path: Path) -> None:
    async with opened(database) as store, sql(database) as admin:
        await changes.apply(admin, [schedule(name, rhythm=BERLIN) for name in "abc"], who="me")
        await admin.execute("UPDATE schedule SET zone = 'Broken/Zone' WHERE name = 'b'")
        place = copy_of(tmp_path, "2099a", "Asia/Tokyo")
        (place / "Broken").mkdir()
        (place / "Broken" / "Zone").symlink_to("/proc/self/mem")  # No read of its begin succeeds.
        before = await record(admin, "b")
        with capture_logs() as logged, pytest.raises(StoreLost, match="1 could not be computed"):
            await renew_by(place, store)
        assert [one["schedule"] for one in logged if one["event"] == "schedule not computed"] == ["b"]
        assert [hour_of(await check_waiting(admin, name)) for name in "ac"] == [22, 22]
        assert await check_waiting(admin, "b") == before
        assert await reading.zone_version(admin) == "", "it tries again"


async def test_many_schedules_are_renewed_in_many_transactions(database: str, tmp_path: Path) -> None:
    async with opened(database) as store, sql(database) as admin:
        await changes.apply(admin, [schedule(f"s{n}", rhythm=BERLIN) for n in range(200)], who="me")
        await renew_by(copy_of(tmp_path, "2099a", "Asia/Tokyo"), store)
        assert await admin.fetchval("SELECT count(DISTINCT xmin::text) FROM schedule") == 4
        assert {hour_of(one) async for page in reading.pages(admin) for one in page} == {22}
