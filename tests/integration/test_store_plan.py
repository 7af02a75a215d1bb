"""The daemon's statements read no more in a larger backlog, with or without the planner's statistics.

The server counts the rows and index entries read by each step, in two stores. The second has ten times as many
waiting and held rows, and a limited route with a due backlog. test_store_sessions.py checks that the plans stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest

from delayer.core.units import DAY_MS
from delayer.schedule.schedule import ScheduleState
from delayer.store.admin import census
from delayer.store.admin.stats import overview
from delayer.store.lanes.lane import PostgresLane
from delayer.store.rows import partitions
from delayer.store.rows.places import find_rows
from delayer.store.schedules import reading
from delayer.store.session import read_connection
from tests.support.fakes import WHY
from tests.support.servers import Postgres
from tests.support.store import ROOM, Store, opened, owned, parcel, sql

DAYS = 40
LANES = 4
EMPTIED = 60
"""Further lanes of ended daemons, without messages."""
LIMITED = 99
"""The lane of the limited route."""
FEW, MANY = 20_000, 200_000
SAME = 1.1
"""An index may be higher by a level, and a page of it fuller."""

_MESSAGES = """
INSERT INTO message (due_at, checksum, lane, format, route, exchange, routing_key, to_exchange, to_key,
                     properties, body, key)
SELECT date_trunc('milliseconds', {due}), 0, 1 + n % $2::int, 1, 'r', 'e', 'k', 'e', 'k', 'p',
       decode(md5(n::text), 'hex'), CASE WHEN n % 20 = 0 THEN '{name} '::bytea || n::text::bytea END
FROM generate_series(1, $1::int) AS n
"""
_FAR = "now() + interval '1 hour' + 38 * interval '1 day' * random()"
_SOON = "now() - interval '30 hours' * random()"  # so that no partition of the read is empty
_BEYOND = "now() + interval '500 days'"
_HELD = """
INSERT INTO held (id, due_at, retry_at, checksum, attempts, lane, format, route, exchange, routing_key,
                  to_exchange, to_key, properties, body, key, kind, reason, may_be_delivered, isolated)
SELECT nextval('message_id'), now(), now() + (n - 400) * interval '1 second', 0, 1, 1 + n % $2::int, 1,
       'r', 'e', 'k', 'e', 'k', 'p', decode(md5(n::text), 'hex'), 'held '::bytea || n::text::bytea,
       'nacked', 'why', false, false
FROM generate_series(1, $1::int) AS n
"""
_KEYS = "INSERT INTO message_key SELECT key, lane, due_at, id FROM {table} WHERE key IS NOT NULL"
_COUNTED = "INSERT INTO counter SELECT lane, '{kind}', count(*) FROM {table} GROUP BY lane"
_EMPTIED = "INSERT INTO counter SELECT $1::int + n, '{kind}', 1000 FROM generate_series(1, $2::int) AS n"


async def fill(url: str, waiting: int) -> None:
    """Fill a store as after some weeks: a backlog, due rows, rows beyond the partitions, held rows, and keys."""
    async with sql(url) as admin:
        today = await admin.fetchval("SELECT now()") // DAY_MS
        for day in range(today - 1, today + DAYS):
            await partitions.make(admin, day, today)
        await admin.execute(
            "INSERT INTO lane SELECT n, 0, 'gone' FROM generate_series(1, $1::int) AS n ON CONFLICT DO NOTHING",
            LANES + EMPTIED,
        )
        for kind in ("parked", "released"):
            await admin.execute(_EMPTIED.format(kind=kind), LANES, EMPTIED)
        for name, due, rows in (("far", _FAR, waiting), ("soon", _SOON, 5_000), ("beyond", _BEYOND, waiting // 10)):
            await admin.execute(_MESSAGES.format(due=due, name=name), rows, LANES)
        await admin.execute(_HELD, waiting // 10, LANES)
        for table, kind in (("message", "parked"), ("held", "held")):
            await admin.execute(_KEYS.format(table=table))
            await admin.execute(_COUNTED.format(kind=kind, table=table))
        # The held rows also count as parked.
        added = "UPDATE counter SET n = n + $2 WHERE kind = 'parked' AND lane <= $1"
        await admin.execute(added, LANES, waiting // 10 // LANES)


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    """A Postgres without autoanalyze that does not wait for the disk, because durability does not matter here."""
    with Postgres(settings={"autovacuum": "off", "fsync": "off"}) as server:
        yield server


@pytest.fixture(scope="module")
def templates(server: Postgres) -> dict[int, str]:
    """Filled databases, by their number of waiting rows."""
    names = {}
    for waiting in (FEW, MANY):
        names[waiting] = server.add_store()
        asyncio.run(fill(server.url(names[waiting]), waiting))
    limited = _MESSAGES.format(due=_SOON, name="limited").replace("1 + n % $2::int", "$2::int")
    asyncio.run(execute(server.url(names[MANY]), limited, MANY, LIMITED))
    return names


async def execute(url: str, statement: str, *values: object) -> None:
    async with sql(url) as admin:
        await admin.execute(statement, *values, timeout=120)


@pytest.fixture(scope="module", params=["just filled", "analyzed"])
def stores(server: Postgres, templates: dict[int, str], request: pytest.FixtureRequest) -> dict[int, str]:
    """The URLs of the stores. The tests share them: a copy per test would take most of the time."""
    urls = {waiting: server.url(server.add_database(template=name)) for waiting, name in templates.items()}
    for url in urls.values():
        if request.param == "analyzed":
            asyncio.run(execute(url, "ANALYZE"))
    return urls


_READ = """
SELECT ((SELECT sum(seq_tup_read) FROM pg_stat_user_tables WHERE relname ~ '^(message|held|schedule)')
      + (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE relname ~ '^(message|held|schedule)'))::bigint
"""
_OTHERS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"


async def counted(url: str) -> int:
    """Rows and index entries read so far by closed sessions; the server counts a session when it closes."""
    async with sql(url) as admin:
        while await admin.fetchval(_OTHERS):  # noqa: ASYNC110 - the server sets no event
            await asyncio.sleep(0.01)
        read: int = await admin.fetchval(_READ)
        return read


Step = Callable[[Store, PostgresLane], Awaitable[object]]


async def releasing(_: Store, lane: PostgresLane) -> None:
    """A claim of held rows, and a full one of waiting rows; one of each is held."""
    for size in (50, 500):
        rows = await lane.claimers[0].claim(500, ROOM)
        assert len(rows) == size and all((due.attempts > 0) == (size == 50) for due in rows)
        await lane.claimers[0].settle(rows[1:], [(rows[0], WHY)])


async def released(_: Store, lane: PostgresLane) -> None:
    """Release everything due, to the last empty claim, and ask for the next sleep."""
    while rows := await lane.claimers[0].claim(500, ROOM):
        await lane.claimers[0].settle(rows, [])
    assert lane.sleep_hint() > 0.0


async def cancelling(store: Store, lane: PostgresLane) -> None:
    """Cancel keys of messages that wait, wait beyond the partitions, are held, or do not exist; and replace one."""
    keys = [b"far 20", b"far 40", b"beyond 20", b"held 1980", b"nobody's"]
    await store.park(lane, [parcel(store.now_upper_ms() + DAY_MS, key=b"far 60")], keys)


async def scanning(_: Store, lane: PostgresLane) -> None:
    await lane.scan()


@pytest.mark.parametrize("step", [cancelling, scanning, releasing, released])
async def test_a_lane_reads_no_more_rows_with_a_larger_backlog(stores: dict[int, str], step: Step) -> None:
    read = {}
    for waiting, url in stores.items():
        async with opened(url) as store, owned(store):
            pass
        before = await counted(url)  # without the reads that take a lane
        async with opened(url) as store, owned(store):
            pass
        idle = await counted(url) - before
        async with opened(url) as store, owned(store) as [lane]:
            await step(store, lane)
        read[waiting] = await counted(url) - before - 2 * idle
    assert 0 < read[MANY] <= SAME * read[FEW] + 50, read


async def looked(url: str) -> None:
    seen = await overview(url)
    assert seen.waiting >= FEW and seen.held >= FEW // 10 - 200
    assert all(of.next_due_ms is not None for of in seen.lanes[:LANES])


async def sampled(url: str) -> None:
    async with read_connection(url, "count") as connection:
        assert sum((await census.take_census(connection, most_pages=50)).counts.values()) > FEW


@pytest.mark.parametrize("look", [looked, sampled])
async def test_status_queries_read_little(stores: dict[int, str], look: Callable[[str], Awaitable[None]]) -> None:
    """`delayer status`, and the repeated census of a daemon, with the sample of a larger store than fits here."""
    before = await counted(stores[MANY])
    await look(stores[MANY])
    read = await counted(stores[MANY]) - before
    assert read < MANY / 4, read


_BLOCKS = "SELECT sum(idx_blks_hit + idx_blks_read)::bigint FROM pg_statio_user_indexes WHERE relname ~ '^message_'"


async def blocks(url: str) -> int:
    """Blocks of the indexes of messages that ended sessions have read so far."""
    await counted(url)  # Waits until they have ended.
    async with sql(url) as admin:
        return int(await admin.fetchval(_BLOCKS))


async def test_an_id_without_its_instant_costs_a_few_blocks_of_each_partition(stores: dict[int, str]) -> None:
    """The query of `delayer show 48213`. Without the index of ids it would read every primary key from first to
    last."""
    url = stores[MANY]
    async with sql(url) as admin:
        [far] = await admin.fetchrow(
            "SELECT id FROM message WHERE body = decode(md5('777'), 'hex') AND key IS NULL LIMIT 1"
        )
    before = await blocks(url)
    async with read_connection(url, "show") as connection:
        found = await find_rows(connection, [far], {})
    assert list(found.ids) == [far]
    read = await blocks(url) - before
    assert 0 < read < 6 * (DAYS + 2), read


_SCHEDULES = """
INSERT INTO schedule (name, id, state, why, period_ms, first_at, catch_up, jitter_ms, to_exchange, to_key, properties,
                      body, made, missed, waiting_at, waiting_id)
SELECT 's' || to_char(n, 'FM00000'), gen_random_uuid(), 'active', '', 86400000, now(), 1, 0, 'e', 'k', 'p', '', 0, 0,
       now(), n
FROM generate_series(1, $1::int) AS n
"""


@pytest.mark.parametrize("state", [None, *ScheduleState])
async def test_a_page_of_schedules_reads_no_more_than_it_shows(server: Postgres, state: ScheduleState | None) -> None:
    url, after = server.url(server.add_store()), "s05000"
    await execute(url, _SCHEDULES, FEW)
    await execute(
        url, "UPDATE schedule SET state = 'paused', waiting_at = NULL, waiting_id = NULL WHERE name = 's09999'"
    )
    before = await counted(url)
    async with read_connection(url, "list") as connection:
        page = await reading.find(connection, 50, after, state)
    names = [record.name for record in page.schedules]
    first = [f"s{n:05}" for n in range(5_001, 5_051)]
    assert names == {None: first, ScheduleState.ACTIVE: first, ScheduleState.PAUSED: ["s09999"]}.get(state, [])
    assert await counted(url) - before < 200
