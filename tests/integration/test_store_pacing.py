"""Claims of some routes only, on a real Postgres: nothing twice, nothing left out, and nobody waits behind a flood."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from types import SimpleNamespace

import asyncpg
import pytest

from delayer.core.message import Parcel
from delayer.core.pace import Pacer, Scope
from delayer.services.counting import Counters
from delayer.services.ports import Lane
from delayer.services.release import Portion, Release
from delayer.store import claiming, outlook, session, statements, telling, upgrades
from delayer.store import lane as store_lane
from delayer.store.claiming import BEGINNING
from delayer.store.lane import PostgresLane
from delayer.store.telling import Told
from tests.conformance.store_contract import ROOM, owned, parcel
from tests.faults.place import eventually
from tests.integration.test_store_lane import opened, sql
from tests.rig.fakes import WHY, Pulse, ScriptedPublisher

SLOW = frozenset({b"slow"})
LIMITED, OTHERS = Scope(SLOW, only=True), Scope(SLOW, only=False)


def of(route: bytes, due_ms: int) -> Parcel:
    return parcel(due_ms)._replace(route=route)


async def take(lane: Lane, limit: int, scope: Scope | None) -> list[bytes]:
    rows = await lane.claim(limit, ROOM, scope)
    await lane.settle(rows, [])
    return [row.parcel.route for row in rows]


async def test_others_pass_a_flood(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claiming, "READ_AT_ONCE", 100)
    async with opened(database) as store, owned(store, 1) as [lane]:
        now = store.now_ms()
        await store.park(lane, [of(b"slow", now - 5_000) for _ in range(750)], [])  # all due in one instant
        await store.park(lane, [of(b"any", now - 4_000 + n) for n in range(30)], [])
        lane.pace((OTHERS, LIMITED))
        found: list[bytes] = []
        looks = 0
        while len(found) < 30:
            found += await take(lane, 1000, OTHERS)
            looks += 1
            assert looks < 12, "each look goes on behind the last"
        assert found == [b"any"] * 30
        assert await take(lane, 20, LIMITED) == [b"slow"] * 20
        assert lane.more
        assert await take(lane, 1000, OTHERS) == []
        assert not lane.more, "the flood is not read again"
        # A limit that is taken away again gives everything back to ordinary claims.
        lane.pace(())
        rest: list[bytes] = []
        while some := await take(lane, 300, None):
            rest += some
        assert rest == [b"slow"] * 730


async def test_a_flood_that_grows_behind_is_not_read_again_by_others(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restored service's route gets old messages for as long as its backlog comes in, and nobody waits for them."""
    monkeypatch.setattr(claiming, "READ_AT_ONCE", 100)
    async with opened(database) as store, owned(store, 1) as [lane]:
        now = store.now_ms()
        await store.park(lane, [of(b"slow", now - 5_000) for _ in range(750)], [])
        lane.pace((OTHERS, LIMITED))
        assert await take(lane, 1000, OTHERS) == []
        while lane.more:
            assert await take(lane, 1000, OTHERS) == []
        for turn in range(5):
            await store.park(lane, [of(b"slow", now - 60_000 + turn)], [])
            await store.park(lane, [of(b"any", store.now_ms() - 5)], [])
            assert await take(lane, 1000, OTHERS) == [b"any"], "the flood is not read again"
            assert await take(lane, 1, LIMITED) == [b"slow"]
        await store.park(lane, [of(b"any", now - 50_000)], [])
        assert await take(lane, 1000, OTHERS) == [b"any"], "its own is looked for where it is"
        await store.park(lane, [of(b"any", store.now_ms() - 5)], [])
        assert await take(lane, 1000, OTHERS) == [b"any"], "and then on where it was"


async def test_what_is_parked_meanwhile_is_found(database: str) -> None:
    async with opened(database) as store, owned(store, 1) as [lane]:
        now = store.now_ms()
        lane.pace((OTHERS, LIMITED))
        for scope in (OTHERS, LIMITED):
            assert await take(lane, 10, scope) == []
        await store.park(lane, [of(b"slow", now - 60_000), of(b"any", now - 90_000)], [])
        assert await lane.claim(10, ROOM, OTHERS)
        await store.park(lane, [of(b"any", now - 120_000)], [])
        await lane.give_up()
        assert await take(lane, 10, OTHERS) == [b"any", b"any"]
        assert await take(lane, 10, LIMITED) == [b"slow"]


async def test_every_row_goes_out_once_whatever_the_order_of_claims(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claiming, "READ_AT_ONCE", 17)
    chance = random.Random(5)
    async with opened(database) as store, owned(store, 1) as [lane]:
        now = store.now_ms()
        routes = (b"slow", b"slower", b"any", b"other")
        scopes = (Scope(frozenset(routes[:2]), only=False), *(Scope(frozenset({one}), only=True) for one in routes[:2]))
        parked: Counter[bytes] = Counter()
        found: Counter[bytes] = Counter()
        lane.pace(scopes)
        for turn in range(120):
            if turn < 60:
                some = [of(chance.choice(routes), now - chance.randrange(0, 40)) for _ in range(chance.randrange(25))]
                await store.park(lane, some, [])
                parked.update(one.route for one in some)
            if turn in (30, 80):
                lane.pace(scopes)  # as after a reload
            for scope in scopes:
                rows = await lane.claim(chance.randrange(1, 40), ROOM, scope)
                if chance.random() < 0.2:
                    await lane.give_up()
                    continue
                assert all((row.parcel.route in scope.routes) == scope.only for row in rows)
                found.update(row.parcel.route for row in rows)
                await lane.settle(rows, [])
        assert found == parked


async def test_held_rows_are_tried_in_their_scope(database: str) -> None:
    async with opened(database) as store, owned(store, 1) as [lane]:
        now = store.now_ms()
        await store.park(lane, [of(b"slow", now - 9), of(b"any", now - 8)], [])
        rows = await lane.claim(10, ROOM)
        await lane.settle([], [(row, WHY) for row in rows])
        async with sql(database) as admin:
            await admin.execute("UPDATE held SET retry_at = now() - interval '1 second'")
        await lane.look_back()  # type: ignore[attr-defined]
        lane.pace((OTHERS, LIMITED))
        assert await take(lane, 10, LIMITED) == [b"slow"]
        assert await take(lane, 10, OTHERS) == [b"any"]


@pytest.mark.parametrize("at_once", [20_000, 40], ids=["one look", "look after look"])
async def test_rows_put_there_without_a_note_are_found_behind_a_flood(
    database: str, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(outlook, "SEARCH_ROWS", at_once)
    second = Scope(frozenset({b"slower"}), only=True)
    both = Scope(SLOW | second.routes, only=False)
    async with opened(database) as store, owned(store, 1) as [lane], sql(database) as admin:
        assert isinstance(lane, PostgresLane)
        now = store.now_ms()
        await store.park(lane, [of(b"slow", now - 60_000 + n) for n in range(1000)], [])
        await store.park(lane, [of(b"any", now + 3_600_000), of(b"slower", now + 3_600_000)], [])
        lane.pace((both, LIMITED, second))
        for scope in (both, LIMITED, second):
            while await take(lane, 10, scope) and scope is not LIMITED:
                pass
        moved = "UPDATE message SET due_at = now() - interval '59500 milliseconds' WHERE route <> 'slow'"
        assert await admin.execute(moved) == "UPDATE 2"
        assert await take(lane, 10, both) == await take(lane, 10, second) == []
        for _ in range(1 if at_once > 1000 else 4):
            await lane.look_back()
        assert await lane.sleep_hint() == 0.0
        assert await take(lane, 10, both) == [b"any"]
        assert await take(lane, 10, second) == [b"slower"]
        # What is only claimed at the moment was not put there without a note: nobody reads the flood again for it.
        places = [lane._known.marks.claims(scope) for scope in (both, second)]
        rows = await lane.claim(10, ROOM, LIMITED)
        await lane.look_back()
        await lane.settle(rows, [])
        assert [lane._known.marks.claims(scope) for scope in (both, second)] == places


async def held_at_once(lane: PostgresLane, database: str, *routes: bytes) -> None:
    """Held rows of these routes, each of them to be tried now."""
    store_now = lane._clock.now_ms()
    async with sql(database) as admin:
        await admin.execute("UPDATE held SET retry_at = now() - interval '1 second'")
        assert sorted(row["route"] for row in await admin.fetch("SELECT route FROM held")) == sorted(routes)
    lane.note_held(store_now - 1)


@pytest.mark.parametrize("limited", [(b"slow",), (b"slow", b"slower")], ids=["one limit", "two limits"])
async def test_held_rows_of_limited_routes_are_tried_by_a_release(database: str, limited: tuple[bytes, ...]) -> None:
    """Whose turn comes first does not matter: a claim of others finds none of theirs, and that is no reason to wait."""
    async with opened(database) as store, owned(store, 1) as [lane]:
        assert isinstance(lane, PostgresLane)
        routes = (*limited, b"any")
        await store.hold(lane, [(of(route, store.now_ms()), "returned: 312 NO_ROUTE") for route in routes])
        await held_at_once(lane, database, *routes)
        pacer = Pacer()
        pacer.set(dict.fromkeys(limited, 100.0), time.monotonic())
        publisher = ScriptedPublisher()
        release = Release(lane, publisher, portion=Portion(), pulse=Pulse(), counters=Counters(), pacer=pacer)
        await release.tick()
        assert len(publisher.published) == len(routes)


async def test_held_rows_of_others_pass_a_flood_that_is_held(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claiming, "READ_AT_ONCE", 100)
    async with opened(database) as store, owned(store, 1) as [lane], sql(database) as admin:
        assert isinstance(lane, PostgresLane)
        now = store.now_ms()
        await store.hold(lane, [(of(b"slow", now), "returned: 312 NO_ROUTE") for _ in range(350)])
        await store.hold(lane, [(of(b"any", now), "returned: 312 NO_ROUTE") for _ in range(5)])
        again = "UPDATE held SET retry_at = now() - CASE route WHEN 'slow' THEN 9 ELSE 5 END * interval '1 second'"
        await admin.execute(again)
        await lane.look_back()
        lane.pace((OTHERS, LIMITED))
        looks = 1
        async with admin.transaction():
            await admin.execute("SELECT FROM held WHERE route = 'any' ORDER BY id DESC LIMIT 1 FOR UPDATE")
            while not (found := await take(lane, 1000, OTHERS)):
                assert lane.more
                assert await take(lane, 1, LIMITED) == [b"slow"]
                looks += 1
                assert looks < 8, "each look goes on behind the last"
            assert found == [b"any"] * 4
        assert lane._known.retries.soonest_ms < now, "the flood is due all the while"
        assert await take(lane, 1000, OTHERS) == [b"any"], "somebody else had it for a moment"
        assert await take(lane, 1000, OTHERS) == []
        assert not lane.more, "the flood is not read again"
        # Nor for what falls due later, nor for what is hurried.
        await store.hold(lane, [(of(b"any", now), "returned: 312 NO_ROUTE") for _ in range(2)])
        await admin.execute("UPDATE held SET retry_at = statement_timestamp() WHERE route = 'any'")
        lane.hear(Told(telling.HELD, store.now_ms() - 1_000))
        assert await take(lane, 1000, OTHERS) == [b"any"] * 2
        # By hand, and nobody said so: found by the look of each minute.
        await store.hold(lane, [(of(b"any", now), "returned: 312 NO_ROUTE")])
        await admin.execute(again)
        await lane.look_back()
        looks = 0
        while not await take(lane, 1000, OTHERS):
            looks += 1
            assert looks < 8
        assert len(await take(lane, 5, LIMITED)) == 1


@pytest.mark.parametrize("rate", [2.0, 5.0, 9.0])
async def test_held_rows_of_a_slow_route_go_at_its_rate(
    database: str, monkeypatch: pytest.MonkeyPatch, rate: float
) -> None:
    """One token at a time: it is for a row that is held wherever none waits."""
    now = 1000.0
    clock = SimpleNamespace(monotonic=lambda: now, perf_counter=time.perf_counter)
    monkeypatch.setattr("delayer.services.release.time", clock)
    async with opened(database) as store, owned(store, 1) as [lane]:
        assert isinstance(lane, PostgresLane)
        await store.hold(lane, [(of(b"slow", store.now_ms()), "returned: 312 NO_ROUTE") for _ in range(40)])
        await held_at_once(lane, database, *40 * (b"slow",))
        pacer = Pacer()
        pacer.set({b"slow": rate}, now)
        publisher = ScriptedPublisher()
        release = Release(lane, publisher, portion=Portion(), pulse=Pulse(), counters=Counters(), pacer=pacer)
        while now < 1004.0:
            now += await release.tick() + 0.001
        assert 4 * rate * 0.9 <= len(publisher.published) <= 4 * rate + 2


@pytest.mark.parametrize("scope", [None, LIMITED], ids=["all", "limited"])
async def test_held_rows_have_their_share_beside_a_backlog(database: str, scope: Scope | None) -> None:
    async with opened(database) as store, owned(store, 1) as [lane]:
        assert isinstance(lane, PostgresLane)
        now = store.now_ms()
        await store.park(lane, [of(b"slow", now - 60_000 + n) for n in range(200)], [])
        await store.hold(lane, [(of(b"slow", now), "returned: 312 NO_ROUTE") for _ in range(3)])
        await held_at_once(lane, database, *3 * (b"slow",))
        if scope is not None:
            lane.pace((OTHERS, LIMITED))
        tried = []
        for limit in (20, 1, 1, 1, 1):
            rows = await lane.claim(limit, ROOM, *(() if scope is None else (scope,)))
            tried.append((len(rows), sum(row.attempts > 0 for row in rows)))
            await lane.settle(rows, [])
        # A tenth; and of one row, turns.
        assert tried[0] == (20, 2)
        assert sorted(tried[1:3]) == [(1, 0), (1, 1)]
        assert tried[3:] == [(1, 0), (1, 0)]


async def test_slow_routes_take_turns_each_by_itself(database: str) -> None:
    """Held and waiting ones of both: with one turn for all, one route would only try what is held, the other never."""
    slower = Scope(frozenset({b"slower"}), only=True)
    async with opened(database) as store, owned(store, 1) as [lane]:
        assert isinstance(lane, PostgresLane)
        now = store.now_ms()
        for route in (b"slow", b"slower"):
            await store.park(lane, [of(route, now - 60_000 + n) for n in range(9)], [])
            await store.hold(lane, [(of(route, now), "returned: 312 NO_ROUTE") for _ in range(9)])
        await held_at_once(lane, database, *9 * (b"slow",), *9 * (b"slower",))
        lane.pace((Scope(SLOW | slower.routes, only=False), LIMITED, slower))
        held = {LIMITED: 0, slower: 0}
        for _ in range(6):
            for scope in held:
                [row] = await lane.claim(1, ROOM, scope)
                held[scope] += row.attempts > 0
                await lane.settle([row], [])
        assert held == {LIMITED: 3, slower: 3}


SLOWLY = statements.ROUTES_BEHIND.replace(
    "WITH seen", "WITH slow AS MATERIALIZED (SELECT pg_sleep(CASE WHEN $6::bigint > 100 THEN 20 ELSE 0 END)), seen"
).replace("FROM seen\nGROUP", "FROM seen, slow\nGROUP")


async def test_a_search_that_fails_or_is_slow_takes_nothing_from_the_look(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlook, "SEARCH_ROWS", 400)
    monkeypatch.setattr(store_lane, "FIRST_LOOK_SECONDS", 3600.0)
    async with opened(database) as store, owned(store, 1) as [lane], sql(database) as admin:
        assert isinstance(lane, PostgresLane)
        now = store.now_ms()
        await store.park(lane, [of(b"slow", now - 60_000 + n) for n in range(300)], [])
        await store.park(lane, [of(b"any", now + 3_600_000)], [])
        lane.pace((OTHERS, LIMITED))
        assert await take(lane, 10, LIMITED)
        assert await take(lane, 10, OTHERS) == []
        last = "SELECT max(id) FROM message WHERE route = 'slow'"
        await admin.execute(f"UPDATE message SET due_at = now() - interval '1 hour' WHERE id = ({last})")
        with monkeypatch.context() as broken:
            broken.setattr(statements, "ROUTES_BEHIND", "SELECT no_such_column")
            with pytest.raises(asyncpg.UndefinedColumnError):
                await lane.look_back()
        assert lane._known.watermark < now - 3_000_000
        while await take(lane, 10, OTHERS):
            pass
        await admin.execute("UPDATE message SET due_at = now() - interval '59800 milliseconds' WHERE route = 'any'")
        assert await take(lane, 10, OTHERS) == []
        monkeypatch.setattr(statements, "ROUTES_BEHIND", SLOWLY)
        with monkeypatch.context() as hasty:
            hasty.setattr(outlook, "SEARCH_SECONDS", 0.2)
            for halvings in (1, 2):
                await lane.look_back()
                assert lane._known.search is not None
                assert lane._known.search.halvings == halvings
                assert await take(lane, 10, OTHERS) == []
        await lane.look_back()
        assert await take(lane, 10, OTHERS) == [b"any"]
        assert lane._known.search.halvings == 1, "and more at once again"


async def test_searches_take_no_more_than_one_connection_from_parks(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlook, "SEARCH_SECONDS", 30.0)
    await upgrades.upgrade(database)
    pool = await session.open_pool(database, "looks", 4, {})
    waits = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'looks' AND wait_event_type = 'Lock'"
    looks = outlook.PooledLooks(pool)
    try:
        async with sql(database) as admin, sql(database) as locking:
            async with locking.transaction():
                await locking.execute("LOCK TABLE message IN ACCESS EXCLUSIVE MODE")
                searches = [asyncio.create_task(looks.behind(n, outlook.Search(BEGINNING, 0))) for n in range(3)]
                await eventually(lambda: admin.fetchval(waits), bool)
                assert {await admin.fetchval(waits) for _ in range(50)} == {1}
                assert pool.get_size() - pool.get_idle_size() == 1
            assert await asyncio.gather(*searches) == [outlook.Behind({}, None, slow=False)] * 3
    finally:
        pool.terminate()
