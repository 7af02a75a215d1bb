"""The plans of the daemon's statements: index ranges in the few partitions that they are about, whatever the planner
knows of the rows.

The plans are those that were run, not those of an EXPLAIN beside them: the server logs the plan of everything that the
daemon's own sessions do here (auto_explain). That these plans stay is in test_store_sessions.py.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any

import asyncpg
import pytest

from delayer.core import horizon
from delayer.store import statements, upgrades
from delayer.store.admin import listing, stats
from delayer.store.admin.stats import overview
from delayer.store.rows import partitions
from delayer.store.rows.partitions import DAY_MS
from tests.conformance.store_contract import ROOM, owned, parcel
from tests.integration.test_store_lane import opened, sql
from tests.support.fakes import WHY
from tests.support.servers import Postgres

Plan = dict[str, Any]

DAYS = 40
LANES = 4
EMPTIED = 60
"""Further lanes, of daemons that have gone and left nothing."""
WAITING = 200_000
CANCEL = "DELETE FROM message WHERE"
CANCEL_HELD = "DELETE FROM held WHERE id = $1"
PROBE = "SELECT number, (SELECT due_at FROM message_"
BIG = ("message", "held")
"""What the names of tables with many rows begin with; ``lane`` and ``counter`` are read whole, and may be."""
PARTITIONS = ("message_p", "message_default")
RANGES = ("Seq Scan", "Index Scan", "Index Only Scan", "Bitmap Heap Scan")
AHEAD_MS = 900_000
"""Farther than anybody looks."""

_MESSAGES = """
INSERT INTO message (due_at, checksum, lane, format, route, exchange, routing_key, to_exchange, to_key,
                     properties, body, key)
SELECT date_trunc('milliseconds', {due}), 0, 1 + n % $2::int, 1, 'r', 'e', 'k', 'e', 'k', 'p',
       decode(md5(n::text), 'hex'), CASE WHEN n % 20 = 0 THEN '{name} '::bytea || n::text::bytea END
FROM generate_series(1, $1::int) AS n
"""
_FAR = "now() + interval '1 hour' + 38 * interval '1 day' * random()"
_SOON = "now() - interval '30 hours' * random()"  # so that no partition that is read is empty
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

FIRST_COLUMN = {"held_lane_retry_at": "lane", "held_pkey": "id", "message_key_pkey": "key"}


async def fill(url: str, waiting: int = WAITING) -> None:
    """A store as after some weeks: a backlog, rows that are due, rows beyond the partitions, held rows, and keys."""
    await upgrades.upgrade(url)
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
        for name, due, rows in (("far", _FAR, waiting), ("soon", _SOON, 5_000), ("beyond", _BEYOND, 2_000)):
            await admin.execute(_MESSAGES.format(due=due, name=name), rows, LANES)
        await admin.execute(_HELD, 20_000, LANES)
        for table, kind in (("message", "parked"), ("held", "held")):
            await admin.execute(_KEYS.format(table=table))
            await admin.execute(_COUNTED.format(kind=kind, table=table))
        # The held ones came in as well.
        await admin.execute("UPDATE counter SET n = n + 5000 WHERE kind = 'parked' AND lane <= $1", LANES)


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    """A Postgres that analyzes nothing by itself, and waits for no disk: nothing is promised here."""
    with Postgres(settings={"autovacuum": "off", "fsync": "off"}) as server:
        yield server


@pytest.fixture(scope="module")
def template(server: Postgres) -> str:
    """A filled database to copy."""
    name = server.add_database()
    asyncio.run(fill(server.url(name)))
    return name


@pytest.fixture(scope="module", params=["just filled", "analyzed"])
def filled(server: Postgres, template: str, request: pytest.FixtureRequest) -> str:
    """The name of a filled database whose sessions log the plans of what they do. The tests share it: a copy for each
    would take most of their time."""
    name = server.add_database(template=template)
    if request.param == "analyzed":
        server.execute("ANALYZE", database=name)
    for setting, value in {
        "session_preload_libraries": "auto_explain",
        "auto_explain.log_min_duration": "0",
        "auto_explain.log_format": "json",
    }.items():
        server.execute(f"ALTER DATABASE \"{name}\" SET {setting} = '{value}'")
    return name


class Plans:
    """What was run in one database since this was made, from the server's log."""

    def __init__(self, server: Postgres, database: str) -> None:
        self._server = server
        self._entry = re.compile(rf"^.* {database} LOG:  duration: .* plan:\n((?:\t.*\n)+)", re.MULTILINE)
        self._from = len(server.log())

    def take(self) -> dict[str, list[Plan]]:
        """By text of the statement, what was logged since the last time. Nobody has read a big table whole."""
        log = self._server.log()
        fresh, self._from = log[self._from :], len(log)
        found = defaultdict(list)
        for entry in map(json.loads, self._entry.findall(fresh)):
            found[entry["Query Text"]].append(entry["Plan"])
            assert all(node["Node Type"] != "Seq Scan" for node in scans(entry["Plan"])), entry
        return found


def nodes(plan: Plan) -> Iterator[Plan]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def scans(plan: Plan) -> list[Plan]:
    """The nodes that read a big table."""
    of_relation = (node for node in nodes(plan) if node.get("Relation Name", "").startswith(BIG))
    return [node for node in of_relation if node["Node Type"] not in ("ModifyTable", "LockRows")]


def check_bounded(plan: Plan, *names: str) -> None:
    """Whatever reads these tables through the index of an order ends at a LIMIT, with nothing between them that would
    read all first."""

    def walk(node: Plan, bounded: bool) -> None:
        bounded = node["Node Type"] == "Limit" or (bounded and node["Node Type"] in ("Append", "Merge Append"))
        for child in node.get("Plans", ()):
            if child.get("Relation Name", "").startswith(names) and child["Node Type"] in RANGES:
                assert bounded or child.get("Index Name") == "held_pkey", child
            walk(child, bounded)

    walk(plan, False)


def tables(plan: Plan) -> set[str]:
    return {node["Relation Name"] for node in scans(plan)}


def of_days(first_ms: int, last_ms: int) -> set[str]:
    """The partitions of these instants."""
    return {partitions.name_of(day) for day in range(first_ms // DAY_MS, last_ms // DAY_MS + 1)}


def check_ranges(plan: Plan, places: Collection[str], *columns: str) -> None:
    """Each partition among ``places``, by its primary key from ``columns`` on, or where a scan has just found it."""
    seen = [node for node in scans(plan) if node["Relation Name"].startswith(PARTITIONS)]
    assert {node["Relation Name"] for node in seen} <= set(places)
    for node in seen:
        assert node["Node Type"] in ("Index Scan", "Index Only Scan", "Tid Scan"), node
        if node["Node Type"] != "Tid Scan":
            assert node["Index Name"] == f"{node['Relation Name']}_pkey"
            assert all(column in node["Index Cond"] for column in columns), node
    # What is left out when a plan starts was planned, and locked, all the same.
    assert not any(node.get("Subplans Removed") for node in nodes(plan)), plan


def check_messages(plan: Plan, places: Collection[str], *columns: str) -> None:
    """As :func:`check_ranges`, and nothing is sorted or joined by sorting or hashing."""
    check_ranges(plan, places, *columns)
    # The few rows of an answer may be sorted, the rows of a partition may not.
    below = (node for child in plan.get("Plans", ()) for node in nodes(child))
    for node in below:
        if node["Node Type"] in ("Sort", "Incremental Sort", "Hash Join", "Merge Join"):
            assert not any(name.startswith(PARTITIONS) for name in tables(node)), node


def check_index(plan: Plan, table: str, *indexes: str) -> None:
    """Nothing but ``table``, through these indexes, each from its first column on."""
    assert tables(plan) == {table}
    through = {node["Index Name"]: node["Index Cond"] for node in nodes(plan) if "Index Name" in node}
    assert through.keys() == set(indexes)
    assert all(re.search(rf"\b{FIRST_COLUMN[index]}\b", condition) for index, condition in through.items()), through


def one_of(found: dict[str, list[Plan]], beginning: str) -> list[Plan]:
    """The plans of the statements with this beginning; at least one was run."""
    plans = [plan for text, all_of in found.items() if text.startswith(beginning) for plan in all_of]
    assert plans, f"not run: {beginning}"
    return plans


async def test_a_release_reads_the_index_of_the_days_that_are_due(server: Postgres, filled: str) -> None:
    plans = Plans(server, filled)
    async with opened(server.url(filled)) as store, owned(store) as [lane]:
        now = store.now_upper_ms()
        rows = await lane.claim(500, ROOM)
        assert len(rows) == 500 and sum(due.attempts > 0 for due in rows) == 50
        await lane.settle(rows[1:], [(rows[0], WHY)])
        found = plans.take()  # not before: the last statement's plan is logged when the next one comes
        passed = {*of_days(now - 2 * DAY_MS, now + AHEAD_MS), "message_default"}
        for plan in one_of(found, statements.CLAIM):
            check_messages(plan, passed, "lane", "due_at")
        for plan in one_of(found, statements.CLAIM_HELD):
            check_index(plan, "held", "held_lane_retry_at", "held_pkey")
        while lane.more:
            rows = await lane.claim(500, ROOM)
            await lane.settle(rows, [])
        assert await lane.claim(500, ROOM) == []
        await lane.settle([], [])
        found = plans.take()
        assert await lane.claim(500, ROOM) == []
        await lane.settle([], [])
        assert await lane.sleep_hint() > 0.0
        now_on = plans.take()
        for plan in one_of(now_on, statements.CLAIM) + one_of(now_on, statements.NEXT_DUE):
            check_messages(plan, of_days(now, now + AHEAD_MS), "lane", "due_at")
        for plan in one_of(found, statements.NEXT_RETRY):
            check_index(plan, "held", "held_lane_retry_at")
        for plan in one_of(found, "DELETE FROM held WHERE id"):
            check_index(plan, "held", "held_pkey")
        for plan in one_of(found, "DELETE FROM message_key"):
            check_index(plan, "message_key", "message_key_pkey")


async def test_a_cancel_reads_the_index_of_its_message_s_day(server: Postgres, filled: str) -> None:
    async with opened(server.url(filled)) as store, owned(store) as [lane], sql(server.url(filled)) as admin:
        keys = [b"far 20", b"far 40", b"beyond 20", b"held 19999", b"nobody's"]
        days = {
            partitions.name_of(row[0] // DAY_MS)
            for row in await admin.fetch("SELECT due_at FROM message_key WHERE key = ANY($1)", keys[:2])
        }
        plans = Plans(server, filled)
        await store.park(lane, [parcel(store.now_upper_ms() + DAY_MS, key=b"far 60")], keys)
        found = plans.take()
        cancels = one_of(found, CANCEL)
        for plan in cancels:
            assert len(tables(plan)) == 1
            check_messages(plan, tables(plan), "lane", "due_at", "id")
        assert {*days, "message_default"} <= set().union(*map(tables, cancels))
        for plan in one_of(found, CANCEL_HELD):
            check_index(plan, "held", "held_pkey")
        for plan in one_of(found, "SELECT lane, due_at, id, key FROM message_key") + one_of(
            found, "DELETE FROM message_key"
        ):
            check_index(plan, "message_key", "message_key_pkey")
        for table in ("message_key", "message", "held"):
            assert await admin.fetchval(f"SELECT count(*) FROM {table} WHERE key = ANY($1)", keys) == 0


async def test_looking_around_reads_the_ends_of_the_indexes(server: Postgres, filled: str) -> None:
    """On connections that are not told which plans to prefer: who looks for lanes, looks back, or asks for status."""
    plans = Plans(server, filled)
    async with opened(server.url(filled)) as store, owned(store) as [lane]:
        for plan in one_of(plans.take(), statements.LOOK):
            assert not scans(plan)
        now = store.now_upper_ms()
        await lane.scan()
        found = plans.take()
        passed = {*of_days(now - 2 * DAY_MS, now + AHEAD_MS), "message_default"}
        for plan in one_of(found, statements.NEXT_DUE):
            check_messages(plan, passed, "lane", "due_at")
        for plan in one_of(found, statements.NEXT_RETRY):
            check_index(plan, "held", "held_lane_retry_at")
        whole = await overview(server.url(filled))
        assert whole.waiting > WAITING and whole.held > 19_000
        assert all(of.next_due_ms is not None for of in whole.lanes[:LANES])
        found = plans.take()
        for plan in one_of(found, statements.OVERVIEW):
            assert not scans(plan)
            of_counter = [node for node in nodes(plan) if node.get("Relation Name") == "counter"]
            assert of_counter and all(node["Node Type"] != "Seq Scan" for node in of_counter), of_counter
        probes = one_of(found, PROBE)
        near = {*of_days(now - 2 * DAY_MS, now + DAY_MS), "message_default"}
        for plan in probes:
            check_messages(plan, near, "lane")
        assert len(probes) <= len(near)


async def test_a_census_samples_pages_and_reads_the_coming_hour_by_the_index(server: Postgres, filled: str) -> None:
    """It is taken again and again beside the traffic, with however many rows waiting."""
    plans = Plans(server, filled)
    async with listing.looking(server.url(filled), "count") as connection:
        now = await connection.fetchval("SELECT now()")
        counted = await stats.take_census(connection)
        assert sum(counted.counts.values()) > WAITING
    found = plans.take()
    near = {*of_days(now - 2 * DAY_MS, now + horizon.HOUR), "message_default"}
    for plan in one_of(found, stats.NEAR_ROWS):
        check_ranges(plan, near, "lane", "due_at")
        check_bounded(plan, *PARTITIONS)  # what is left of them may be sorted to be grouped
    samples = one_of(found, "SELECT route, width_bucket(due_at, $1::timestamptz[]), count(*) FROM message_")
    assert len(samples) > DAYS
    for plan in samples:
        assert [node["Node Type"] for node in scans(plan)] == ["Sample Scan"]


BACKLOG = 1_000_000
DUE = 1_000


async def test_a_claim_reads_no_more_beside_the_backlog_of_a_limited_route(server: Postgres) -> None:
    """A million rows are due in the lane of the route; a claim of another lane reads at most twice as many pages."""
    url = server.url(server.add_database())
    await upgrades.upgrade(url)
    async with sql(url) as admin:
        today = await admin.fetchval("SELECT now()") // DAY_MS
        for day in range(today - 2, today + 2):
            await partitions.make(admin, day, today)
        await admin.execute(_MESSAGES.format(due=_SOON, name="plain"), DUE, 1)
        alone = await pages_of_a_claim(admin)
        of_the_route = _MESSAGES.format(due=_SOON, name="limited").replace("1 + n % $2::int", "$2::int")
        await admin.execute(of_the_route, BACKLOG, 5)
        await admin.execute("ANALYZE")
        beside = await pages_of_a_claim(admin)
    # A claimed row costs a page more for each further level of the index.
    assert beside <= 2 * alone, (alone, beside)


async def pages_of_a_claim(admin: asyncpg.Connection) -> int:
    """Pages that a claim of lane 1 touches, in the buffers or on disk. The rows stay."""
    asked = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statements.CLAIM}"
    transaction = admin.transaction()
    await transaction.start()
    now_ms = await admin.fetchval("SELECT now()")
    [plan] = json.loads(await admin.fetchval(asked, 1, now_ms - 3 * DAY_MS, now_ms + 60_000, 500, ROOM))
    await transaction.rollback()
    return int(plan["Plan"]["Shared Hit Blocks"]) + int(plan["Plan"]["Shared Read Blocks"])
