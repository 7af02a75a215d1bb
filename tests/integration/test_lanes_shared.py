"""Processes share the lanes of one store: evenly, each lane with one live owner, and nothing lost or early."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections import Counter

import asyncpg
import pytest

from delayer.store.admin.importing import anywhere
from delayer.store.admin.setup import raise_lanes
from delayer.store.postgres import park_plain
from tests.faults.place import eventually
from tests.integration.lanes_shared import Process, migrated, running
from tests.support.store import opened, parcel, sql, taken

BALANCED_SECONDS = 10.0
LANES = 12
CONSTANT = 6
"""Connections of a process beside its lanes: presence, and the pool of parks."""
_OWNERS = """
SELECT l.number, l.owner, EXISTS (
    SELECT FROM pg_locks AS k JOIN pg_database AS d ON d.oid = k.database AND d.datname = current_database()
    WHERE k.locktype = 'advisory' AND k.granted AND k.classid = 'lane'::regclass AND k.objid = l.number
) AS owned FROM lane AS l ORDER BY l.number
"""
_PRESENT = """
SELECT count(*) FROM pg_locks AS k JOIN pg_database AS d ON d.oid = k.database AND d.datname = current_database()
WHERE k.locktype = 'advisory' AND k.granted AND k.classid = 'lane'::regclass AND k.objid = 0
"""
_SESSIONS = """
SELECT count(*) FILTER (WHERE application_name LIKE 'delayer lane %'), count(*) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'delayer %'
"""


class Child:
    """A process of tests/integration/lanes_shared.py."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name, self.process = name, process
        self.published: list[tuple[str, int, int]] = []
        self.reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, url: str, name: str) -> Child:
        arguments = "-m", "tests.integration.lanes_shared", url, name
        pipe = asyncio.subprocess.PIPE
        errors = asyncio.subprocess.DEVNULL
        return cls(name, await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=pipe, stderr=errors))

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            words = line.decode().split()
            if len(words) == 3 and words[1].isdigit():
                self.published.append((words[0], int(words[1]), int(words[2])))

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await self.reader


async def balanced(admin: asyncpg.Connection, live: set[str]) -> float:
    """Seconds until every lane has a live owner, and shares differ by one at most."""
    began = time.monotonic()
    while True:
        rows = await admin.fetch(_OWNERS)
        shares = Counter(row["owner"] for row in rows if row["owned"])
        if (
            all(row["owned"] for row in rows)
            and shares.keys() == live
            and max(shares.values()) - min(shares.values()) <= 1
        ):
            return time.monotonic() - began
        assert time.monotonic() - began < 30.0, (shares, live)
        await asyncio.sleep(0.05)


async def present(admin: asyncpg.Connection, processes: int) -> None:
    """Until so many processes live: to start eight of them takes a busy machine half a minute."""
    async with asyncio.timeout(120.0):
        while await admin.fetchval(_PRESENT) != processes:  # noqa: ASYNC110 - the processes set no event
            await asyncio.sleep(0.05)


async def test_eight_processes_that_die_hang_and_return(database: str) -> None:
    await migrated(database)
    await raise_lanes(database, LANES)
    children = {name: await Child.start(database, name) for name in (f"p{n}" for n in range(8))}
    ended: list[Child] = []
    sent: set[str] = set()
    stopping = asyncio.Event()

    async def park() -> None:
        async with opened(database) as store, sql(database) as connection:
            while not stopping.is_set():
                now = store.now_upper_ms()
                for delay in (-1000, 500, 3000):
                    name = f"m{len(sent)}"
                    sent.add(name)
                    place = await anywhere(connection, len(sent))
                    async with connection.transaction():
                        await park_plain(connection, place, [parcel(now + delay, f"{name} {now + delay}".encode())])
                await asyncio.sleep(0.02)

    parking = asyncio.create_task(park())
    took: dict[str, float] = {}
    try:
        async with sql(database) as admin:
            await present(admin, len(children))
            await balanced(admin, set(children))
            for name in ("p0", "p1", "p2"):
                ended.append(children.pop(name))
                await ended[-1].end()
            took["killed"] = await balanced(admin, set(children))
            hanging = {"p3", "p4"}
            for name in hanging:
                children[name].signal(signal.SIGSTOP)
            took["hanging"] = await balanced(admin, set(children) - hanging)
            for name in hanging:
                children[name].signal(signal.SIGCONT)
            took["returned"] = await balanced(admin, set(children))
            for name in ("p8", "p9", "p10"):
                children[name] = await Child.start(database, name)
            await present(admin, len(children))
            took["new"] = await balanced(admin, set(children))
            _, all_of_them = await eventually(lambda: admin.fetchrow(_SESSIONS), lambda found: found[0] == 2 * LANES)
            assert all_of_them <= 2 * LANES + CONSTANT * (len(children) + 1)
            stopping.set()
            await parking

            def published() -> set[str]:
                return {name for child in [*children.values(), *ended] for name, _, _ in child.published}

            await eventually(lambda: published() == sent, timeout=20)
            # Of what is claimed once more after a fault the second copy comes soon.
            counted = "SELECT sum(n)::int FROM counter WHERE kind IN ('parked', 'released') GROUP BY kind"
            await eventually(lambda: admin.fetch(counted), lambda rows: [count for (count,) in rows] == [len(sent)] * 2)
    finally:
        stopping.set()
        for child in [*children.values(), *ended]:
            await child.end()
        await asyncio.gather(parking, return_exceptions=True)
    everything = [one for child in [*children.values(), *ended] for one in child.published]
    assert all(now_ms >= due_ms for _, due_ms, now_ms in everything), "early"
    assert len(everything) - len(sent) < len(sent) / 20, "copies of what was in flight, and no others"
    assert all(seconds <= BALANCED_SECONDS for seconds in took.values()), took


async def test_more_processes_than_lanes(database: str) -> None:
    """One waits, and takes over from the first that ends; more lanes are taken without a restart."""
    await migrated(database)
    async with sql(database) as admin:
        await admin.execute("DELETE FROM lane WHERE number > 1")
    async with running(database, "one") as one:
        spare = Process(database, "spare", {})
        stopping = asyncio.Event()
        task = asyncio.create_task(spare.lanes.run(stopping))
        try:
            await eventually(lambda: len(one.lanes.numbers) + len(spare.lanes.numbers) == 1)
            await eventually(lambda: one.lanes.spare.is_set() or spare.lanes.spare.is_set())
            assert await raise_lanes(database, 2) == 2
            await eventually(lambda: len(one.lanes.numbers) == len(spare.lanes.numbers) == 1)
            assert not spare.lanes.spare.is_set()
        finally:
            stopping.set()
            await task
    assert await raise_lanes(database, 1) == 2, "the number never shrinks"


async def test_without_its_broker_a_process_leaves_its_lanes_to_others(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayer.release.lane_manager.AWAY_SECONDS", 0.5)
    await migrated(database)
    async with running(database, "one") as one, running(database, "two") as two:
        await eventually(lambda: len(one.lanes.numbers) == len(two.lanes.numbers) == 2)
        one.connection.current = None
        await eventually(lambda: len(two.lanes.numbers) == 4)
        assert not one.lanes.usable
        one.connection.current = True
        await eventually(lambda: len(one.lanes.numbers) == len(two.lanes.numbers) == 2)


async def test_a_route_whose_limit_is_taken_away_keeps_its_lane(database: str) -> None:
    await migrated(database)
    async with running(database, "one", {b"slow": 1.0}) as one, sql(database) as admin:
        await eventually(lambda: len(one.lanes.numbers) == 5)
        now = one.now_upper_ms()
        await one.lanes.park([parcel(now, b"%d" % n, route=b"slow") for n in range(50)], [])
        assert await admin.fetchval("SELECT route FROM lane WHERE number = 5") == b"slow"
        assert await admin.fetchval("SELECT count(DISTINCT lane) FROM counter") == 1
        one.live.rates = {}
        await eventually(lambda: len(one.publisher.published) == 50)


async def test_rows_that_nobody_announced_are_found_by_the_scan(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayer.store.lanes.lane.FIRST_SCAN_SECONDS", 0.2)
    monkeypatch.setattr("delayer.store.lanes.lane.LONGEST_SLEEP", 0.5)
    await migrated(database)
    async with running(database) as one, opened(database) as other, sql(database) as admin:
        await eventually(lambda: len(one.lanes.numbers) == 4)
        await one.lanes.park([parcel(one.now_upper_ms() + 3_600_000, b"moved")], [])
        await asyncio.sleep(0.3)
        await admin.execute("UPDATE message SET due_at = now() - interval '1 hour'")
        await eventually(lambda: len(one.publisher.published) == 1)
        assert await other.take(one.lanes.numbers[0]) is None
    lane = await taken(other, 1)
    await lane.close()


DUE_MS = 1_000


async def test_a_claim_that_waits_for_somebodys_lock_holds_up_only_what_was_parked_before(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayer.release.loop.BEHIND_SECONDS", 0.3)
    await migrated(database)
    async with running(database) as daemon, sql(database) as somebody:
        await daemon.lanes.park([parcel(daemon.now_upper_ms() + DUE_MS, b"locked")], [])
        async with somebody.transaction():
            assert len(await somebody.fetch("SELECT id FROM message FOR UPDATE")) == 1
            await eventually(lambda: any(release.behind for _, release in daemon.lanes._releases.values()))
            for body in (b"one", b"two", b"three"):
                await daemon.lanes.park([parcel(daemon.now_upper_ms(), body)], [])
            await eventually(lambda: len(daemon.publisher.published) == 3, timeout=10)
            assert {one.body for _, one in daemon.publisher.published} == {b"one", b"two", b"three"}
        await eventually(lambda: len(daemon.publisher.published) == 4)
