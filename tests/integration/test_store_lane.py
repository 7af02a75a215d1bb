"""Lanes over Postgres when the connection that holds the lock of a lane is cut, its process hangs, or the whole
database goes away and comes back.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from urllib.parse import urlsplit

import asyncpg
import pytest
from structlog.testing import capture_logs

from delayer.core.errors import LaneLost, StoreLost
from delayer.store.lanes import lane as module
from delayer.store.lanes.lane import HORIZON_MS, LONGEST_SLEEP, PostgresLane
from delayer.store.lanes.locks import application_of
from tests.support.fakes import WHY
from tests.support.place import eventually
from tests.support.proxy import Proxy
from tests.support.rows import conserved
from tests.support.servers import Postgres
from tests.support.store import (
    MANY,
    ROOM,
    blocked,
    bodies,
    claim_when_due,
    cut,
    free_lanes,
    opened,
    owned,
    parcel,
    release_all,
    release_from,
    sql,
    taken,
)


async def test_a_settle_after_a_rollback_loses_its_claim(database: str) -> None:
    """Without its transaction it would commit each statement separately."""
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        await store.park(lane, [parcel(store.now_upper_ms(), b"one")], [])
        claimer = lane.claimers[0]
        rows = await claimer.claim(MANY, ROOM)
        with pytest.raises(StoreLost):
            async with claimer.locked_connection("test") as connection:
                settling = asyncio.create_task(claimer.settle(rows, []))
                await asyncio.sleep(0)
                await connection.execute("SELECT 1 / 0")
        with pytest.raises(LaneLost):
            await settling
        assert await admin.fetchval("SELECT count(*) FROM message") == 1
        assert not await admin.fetchval("SELECT count(*) FROM counter WHERE kind = 'released'")


async def test_a_cut_lane_loses_its_claim_and_nothing_else(database: str) -> None:
    async with opened(database) as one, opened(database) as two, owned(one) as [lane]:
        now = one.now_upper_ms()
        await one.park(lane, [parcel(now - n, b"%d" % n) for n in range(3)], [])
        rows = await lane.claimers[0].claim(2, ROOM)
        sleeping = asyncio.create_task(lane.wait(50.0))
        await cut(database, application_of(lane.number))
        await sleeping
        assert not lane.owned
        with pytest.raises(LaneLost):
            await lane.claimers[0].settle(rows, [])
        await lane.claimers[0].give_up()
        with pytest.raises(LaneLost):
            await lane.claimers[0].claim(2, ROOM)
        with pytest.raises(LaneLost):
            await one.park(lane, [parcel(one.now_upper_ms())], [])
        assert bodies(await release_from(two, lane.number)) == [b"2", b"1", b"0"]


async def test_a_lane_that_settles_nothing_says_so_once(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STUCK_SECONDS", 1.5)
    async with opened(database) as store, owned(store) as [lane]:
        with capture_logs() as logs:
            await store.park(lane, [parcel(store.now_upper_ms(), b"%d" % n) for n in range(2)], [])
            assert lane.sleep_hint() == 0
            await eventually(lambda: [one for one in logs if one["event"] == "lane stuck"])
            assert lane.stuck
            await asyncio.sleep(2.5)  # for two more looks
            assert [one["lane"] for one in logs if one["event"] == "lane stuck"] == [lane.number]
            rows = await lane.claimers[0].claim(1, ROOM)
            await lane.claimers[0].settle(rows, [])
            assert lane.sleep_hint() == 0
            assert not lane.stuck, "it is busy, and advances"
            await eventually(lambda: lane.stuck)
            await release_all(lane)
            assert lane.sleep_hint() > 0
            assert not lane.stuck


async def test_an_open_release_is_kept_alive_but_not_forever(database: str) -> None:
    async with opened(database, idle_timeout=2.0, transaction_timeout=4.0) as store, owned(store) as [lane]:
        await store.park(lane, [parcel(store.now_upper_ms())], [])
        rows = await lane.claimers[0].claim(MANY, ROOM)
        await lane.wait(3.5)
        assert lane.owned, "its broker is slow, and the process lives"
        await lane.wait(30.0)
        with pytest.raises(LaneLost):
            await lane.claimers[0].settle(rows, [])
        assert len(await release_from(store, lane.number)) == 1


async def test_rows_that_took_too_long_to_arrive_are_not_returned(database: str) -> None:
    """All rows may have arrived, but the server has rolled back by then, so a publish would repeat them."""
    address = urlsplit(database)
    async with Proxy(address.port or 0) as proxy, opened(database) as other:
        slow = address._replace(netloc=address.netloc.replace(f":{address.port}", f":{proxy.port}")).geturl()
        async with opened(slow, idle_timeout=2.0) as store, owned(store) as [lane]:
            await store.park(lane, [parcel(store.now_upper_ms(), bytes(1_000_000))], [])
            proxy.slow(delay=0.3)  # for each of some sixteen pieces
            with pytest.raises(LaneLost):
                await lane.claimers[0].claim(MANY, ROOM)
            proxy.resume()
        assert len(await release_from(other, lane.number)) == 1


async def test_a_lane_that_is_kept_alive_outlives_its_idle_timeout(database: str) -> None:
    async with opened(database, idle_timeout=2.0) as store, owned(store) as [lane]:
        await release_all(lane)
        await lane.wait(4.0)
        assert await release_all(lane) == []


async def test_parks_of_an_older_epoch_commit_nothing(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        await admin.execute("UPDATE lane SET epoch = epoch + 1 WHERE number = $1", lane.number)
        for doing in (
            store.park(lane, [parcel(store.now_upper_ms())], []),
            store.park(lane, [parcel(store.now_upper_ms(), key=b"k")], []),
            store.park(lane, [], [b"k"]),
            store.hold(lane, [(parcel(store.now_upper_ms()), WHY)]),
        ):
            with pytest.raises(LaneLost, match="owner"):
                await doing
        for table in ("message", "held", "message_key", "counter"):
            assert await admin.fetchval(f"SELECT count(*) FROM {table}") == 0


async def test_an_adopter_waits_for_parks_in_flight(database: str) -> None:
    async with opened(database) as one, opened(database) as two, sql(database) as slow:
        [lane] = await free_lanes(one, 1)
        assert isinstance(lane, PostgresLane)
        await one.park(lane, [parcel(one.now_upper_ms())], [])
        transaction = slow.transaction()
        await transaction.start()
        fence = "SELECT FROM lane WHERE number = $1 AND epoch = $2 FOR SHARE"
        assert await slow.fetch(fence, lane.number, lane.epoch)
        await lane.close()
        adopting = asyncio.create_task(two.locks.take(lane.number))
        async with sql(database) as admin:
            waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'UPDATE lane%'"
            while not await admin.fetchval(waits):
                assert not adopting.done()
        await transaction.commit()
        adopted = await adopting
        assert adopted is not None
        assert adopted.epoch == lane.epoch + 1
        await adopted.close()


async def test_a_stepped_clock_moves_the_watermark_to_the_beginning(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        await store.park(lane, [parcel(store.now_upper_ms() + 3_600_000, b"hidden")], [])
        await release_all(lane)
        await admin.execute("UPDATE message SET due_at = now() - interval '1 minute'")
        lane.clock.observe(lane.clock.monotonic(), store.now_upper_ms() - 5_000_000.0, lane.clock.monotonic())
        assert bodies(await claim_when_due(lane)) == [b"hidden"]
        await lane.claimers[0].give_up()


async def test_damaged_rows_are_not_sound(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        now = store.now_upper_ms()
        await store.park(lane, [parcel(now, b"%d" % n) for n in range(7)], [])
        for n, damage in enumerate(
            [
                "body = body || '\\x00'",
                "routing_key = routing_key || exchange, exchange = ''",
                "properties = ''",
                "checksum = checksum + 1",
                "format = 2",
                "exchange = set_byte(exchange, 0, 0)",
            ]
        ):
            await admin.execute(f"UPDATE message SET {damage} WHERE body = '{n}'")
        rows = await lane.claimers[0].claim(MANY, ROOM)
        assert [due.sound for due in rows] == [False] * 6 + [True]
        await lane.claimers[0].settle(rows[6:], [(due, WHY) for due in rows[:6]])
        await admin.execute("UPDATE held SET retry_at = now()")
        await lane.scan()
        rows = await claim_when_due(lane)
        assert [due.sound for due in rows] == [False] * 6, "moving a row must not heal its checksum"
        await lane.claimers[0].give_up()


async def test_a_cancelled_claim_leaves_the_rows(database: str) -> None:
    async with opened(database) as one, opened(database) as two, owned(one) as [lane], sql(database) as blocker:
        await one.park(lane, [parcel(one.now_upper_ms())], [])
        async with blocker.transaction():
            await blocker.execute("SELECT FROM message FOR UPDATE")
            claiming = asyncio.create_task(lane.claimers[0].claim(MANY, ROOM))
            async with sql(database) as admin:
                while not await admin.fetchval("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
                    pass
            claiming.cancel()
            assert isinstance((await asyncio.gather(claiming, return_exceptions=True))[0], asyncio.CancelledError)
            assert not lane.owned
        assert len(await release_from(two, lane.number)) == 1


async def test_a_refused_statement_is_not_the_end_of_the_lane(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        await store.park(lane, [parcel(store.now_upper_ms())], [])
        await admin.execute("ALTER TABLE counter RENAME TO elsewhere")
        rows = await lane.claimers[0].claim(MANY, ROOM)
        with pytest.raises(StoreLost) as caught:
            await lane.claimers[0].settle(rows, [])
        assert not isinstance(caught.value, LaneLost)
        assert isinstance(caught.value.__cause__, asyncpg.UndefinedTableError)
        await lane.claimers[0].give_up()
        with pytest.raises(StoreLost):
            await store.park(lane, [parcel(store.now_upper_ms())], [])
        await admin.execute("ALTER TABLE elsewhere RENAME TO counter")
        assert len(await release_all(lane)) == 1


async def test_the_next_owner_starts_at_the_last_watermark(database: str) -> None:
    async with opened(database) as store, sql(database) as admin:
        async with owned(store) as [lane]:
            before = store.now_upper_ms() - 1000
            await store.park(lane, [parcel(before - 60_000), parcel(before + 3_600_000, b"hidden")], [])
            await release_all(lane)
        assert await admin.fetchval("SELECT watermark FROM lane WHERE number = $1", lane.number) > before
        await admin.execute("UPDATE message SET due_at = now() - interval '1 minute'")
        async with owned(store) as [lane]:
            assert await release_all(lane) == [], "written without a note, and before the watermark"
            assert bodies(await claim_when_due(lane)) == [b"hidden"], "found by the first look back"
            await lane.claimers[0].give_up()


async def test_the_scan_finds_unannounced_rows(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        await store.park(lane, [parcel(store.now_upper_ms() + 3_600_000, b"moved")], [])
        assert await release_all(lane) == []
        await admin.execute("UPDATE message SET due_at = now() - interval '1 hour'")
        sleeper = asyncio.create_task(lane.wait(3600.0))
        await asyncio.sleep(0)
        await lane.scan()
        await asyncio.wait_for(sleeper, 60)
        assert bodies(await release_all(lane)) == [b"moved"]


@pytest.mark.long
@pytest.mark.deadline(120)
async def test_a_lane_scans_once_a_minute(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        for body in (b"first scan", b"second scan"):
            await store.park(lane, [parcel(store.now_upper_ms() + 3_600_000, body)], [])
            assert await release_all(lane) == []
            await admin.execute("UPDATE message SET due_at = now() - interval '1 hour'")
            await asyncio.wait_for(lane.wait(3600.0), LONGEST_SLEEP + 10)
            assert bodies(await release_all(lane)) == [body]


async def test_a_bug_in_a_claim_leaves_no_transaction_open(database: str) -> None:
    """The next claim would commit what the failed one had deleted."""
    async with opened(database) as one, opened(database) as two, owned(one) as [lane], sql(database) as admin:
        await one.park(lane, [parcel(one.now_upper_ms())], [])
        await admin.execute("ALTER TABLE message ALTER exchange DROP NOT NULL; UPDATE message SET exchange = NULL")
        with pytest.raises(TypeError):
            await lane.claimers[0].claim(MANY, ROOM)
        assert not lane.owned
        await admin.execute("UPDATE message SET exchange = ''")
        assert len(await release_from(two, lane.number)) == 1


async def test_a_killed_database_loses_nothing_that_was_committed() -> None:
    with Postgres() as server:
        async with opened(server.url(server.add_database())) as store:
            lanes = await free_lanes(store, 2)
            for lane in lanes:
                await store.park(lane, [parcel(store.now_upper_ms(), b"%d" % n) for n in range(3)], [])
            rows = await lanes[0].claimers[0].claim(2, ROOM)
            server.kill()
            for lane in lanes:
                await lane.wait(30.0)
                assert not lane.owned
                with pytest.raises(LaneLost):
                    await lane.claimers[0].settle(rows, [])
                with pytest.raises(LaneLost):
                    await store.park(lane, [parcel(store.now_upper_ms())], [])
                await lane.claimers[0].give_up()
                await lane.close()
            for doing in (store.locks.look(), store.locks.take(1), store.maintain()):
                with pytest.raises(StoreLost):
                    await doing
            assert store.now_upper_ms() > 0
            server.start()
            again = [await taken(store, lane.number) for lane in lanes]
            assert {lane.number for lane in again} == {lane.number for lane in lanes}
            for lane in again:
                assert bodies(await release_all(lane)) == [b"0", b"1", b"2"]
                rows = await lane.claimers[0].claim(MANY, ROOM)
                assert rows == []
                await lane.close()


async def test_a_cancelled_call_does_not_wait_for_a_database_that_hangs() -> None:
    """A daemon that stops cancels its calls. The driver alone would wait for the server's answer to its request to
    cancel the statement."""
    with Postgres() as server:
        async with opened(server.url(server.add_database())) as store:
            calls = {"look": store.locks.look, "take": lambda: store.locks.take(4), "maintain": store.maintain}
            for lane in await free_lanes(store, 1):
                calls["park"] = partial(store.park, lane, [parcel(store.now_upper_ms() + 60_000)], [])
            server.pause()
            try:
                tasks = {asyncio.create_task(call(), name=name) for name, call in calls.items()}
                _, waiting = await asyncio.wait(tasks, timeout=0.2)
                assert {task.get_name() for task in waiting} == set(calls)
                for task in tasks:
                    task.cancel()
                _, waiting = await asyncio.wait(tasks, timeout=2.0)
                assert not waiting
            finally:
                server.resume()


# Two claims of a lane are open at once.


async def test_the_next_claim_begins_after_the_rows_of_an_open_one_and_neither_waits(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane]:
        first, second = lane.claimers
        now = store.now_upper_ms()
        await store.park(lane, [parcel(now - 5, b"%d" % n) for n in range(5)], [])
        a = await first.claim(3, ROOM)
        b = await second.claim(MANY, ROOM)
        assert (bodies(a), bodies(b)) == ([b"0", b"1", b"2"], [b"3", b"4"])
        await second.settle(b, [])
        await first.settle(a, [])
        assert await release_all(lane) == []
        async with sql(database) as admin:
            assert (await conserved(admin))["released"] == 5


async def test_a_lane_with_a_row_beyond_the_horizon_claims_again_at_the_horizon(database: str) -> None:
    """The lane has no other work: it claims again at the horizon, whether a row was parked or not."""
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        assert isinstance(lane, PostgresLane)
        now_ms = store.now_upper_ms()
        await store.park(lane, [parcel(now_ms - 1), parcel(now_ms + 2 * HORIZON_MS, b"far")], [])
        assert len(await release_all(lane)) == 1, "now the lane has forgotten that a row was parked"
        assert now_ms < lane.cursor.wake_ms() < store.now_upper_ms() + HORIZON_MS
        await admin.execute("UPDATE message SET due_at = now()")
        assert bodies(await release_all(lane)) == [b"far"]


@pytest.mark.parametrize("back_ms", [0, 5, 60_000])
async def test_a_row_parked_among_those_of_an_open_claim_is_claimed_while_that_is_open(
    database: str, back_ms: int
) -> None:
    async with opened(database) as store, owned(store) as [lane]:
        first, second = lane.claimers
        now = store.now_upper_ms()
        await store.park(lane, [parcel(now - n, b"%d" % n) for n in range(9, 0, -1)], [])
        a = await first.claim(MANY, ROOM)
        assert len(a) == 9
        await store.park(lane, [parcel(now - back_ms, b"between")], [])
        assert lane.sleep_hint() == 0.0
        async with asyncio.timeout(30.0):
            b = await second.claim(MANY, ROOM)
        assert bodies(b) == [b"between"]
        await first.settle(a, [])
        await second.settle(b, [])
        assert await release_all(lane) == []


@pytest.mark.parametrize("first_settles", [True, False])
async def test_rows_of_a_claim_that_is_given_up_are_claimed_again_after_the_next_claim(
    database: str, first_settles: bool
) -> None:
    """Also in the other order: the next claim is given up, and the first one settles."""
    async with opened(database) as store, owned(store) as [lane]:
        now = store.now_upper_ms()
        await store.park(lane, [parcel(now - 9 + n, b"%d" % n) for n in range(6)], [])
        rows = [await lane.claimers[0].claim(3, ROOM), await lane.claimers[1].claim(MANY, ROOM)]
        settling, giving = (0, 1) if first_settles else (1, 0)
        await lane.claimers[settling].settle(rows[settling], [])
        assert lane.watermark <= rows[giving][0].due_ms
        await lane.claimers[giving].give_up()
        assert lane.sleep_hint() == 0.0
        assert await release_all(lane) == rows[giving]


async def test_the_rows_of_open_claims_stay_behind_the_written_watermark(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane]:
        now = store.now_upper_ms()
        await store.park(lane, [parcel(now - 60_000 + n, b"%d" % n) for n in range(6)], [])
        a, b = await lane.claimers[0].claim(3, ROOM), await lane.claimers[1].claim(MANY, ROOM)
        await lane.claimers[1].settle(b, [])
        assert lane.watermark <= a[0].due_ms
        await lane.claimers[0].settle(a, [])
        assert lane.watermark == b[-1].due_ms


@pytest.mark.parametrize("cut_first", [True, False])
async def test_the_loss_of_either_connection_ends_the_lane_and_an_open_claim_settles_on_the_other(
    database: str, cut_first: bool
) -> None:
    async with opened(database) as one, opened(database) as two, owned(one) as [lane], sql(database) as admin:
        now = one.now_upper_ms()
        await one.park(lane, [parcel(now - 9 + n, b"%d" % n) for n in range(6)], [])
        claimers = lane.claimers if cut_first else lane.claimers[::-1]
        rows = [await claimers[0].claim(3, ROOM), await claimers[1].claim(MANY, ROOM)]
        sleeping = asyncio.create_task(lane.wait(50.0))
        pid = claimers[0].session.connection.get_server_pid()
        assert await admin.fetchval("SELECT pg_terminate_backend($1, 5000)", pid)
        await sleeping
        assert not lane.owned
        with pytest.raises(LaneLost):
            lane.sleep_hint()
        with pytest.raises(LaneLost):
            await claimers[0].settle(rows[0], [])
        if cut_first:
            adopted = await taken(two, lane.number)
            claiming = asyncio.create_task(adopted.claimers[0].claim(MANY, ROOM))
            await blocked(admin, "%DELETE FROM message AS m%USING (%")
            await claimers[1].settle(rows[1], [])
            assert await claiming == rows[0]
            await adopted.claimers[0].settle(rows[0], [])
            await adopted.close()
        else:
            await claimers[1].settle(rows[1], [])
            await lane.close()
            assert await release_from(two, lane.number) == rows[0]
        assert (await conserved(admin))["released"] == 6


async def test_a_claim_waits_for_a_rolled_back_cancel_and_takes_its_row_next_to_an_open_claim(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin, sql(database) as other:
        now = store.now_upper_ms()
        await store.park(lane, [parcel(now - 9 + n, b"%d" % n) for n in range(6)], [])
        a = await lane.claimers[0].claim(3, ROOM)
        with suppress(ZeroDivisionError):
            async with other.transaction():
                await other.execute("DELETE FROM message WHERE body = '4'")
                claiming = asyncio.create_task(lane.claimers[1].claim(MANY, ROOM))
                await blocked(admin, "%DELETE FROM message AS m%USING (%")
                await lane.claimers[0].settle(a, [])
                raise ZeroDivisionError
        b = await claiming
        assert bodies(b) == [b"3", b"4", b"5"]
        await lane.claimers[1].settle(b, [])


async def test_held_rows_are_in_only_one_open_claim_and_are_not_skipped(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        await store.hold(lane, [(parcel(store.now_upper_ms(), b"%d" % n), WHY) for n in range(20)])
        await admin.execute("UPDATE held SET retry_at = now()")
        await lane.scan()
        first, second = lane.claimers
        a = await first.claim(100, ROOM)
        assert len(a) == 10
        assert await second.claim(100, ROOM) == []
        assert lane.sleep_hint() > 1.0
        await first.settle(a, [])
        assert lane.sleep_hint() == 0.0
        assert len(await release_all(lane)) == 10


async def test_a_look_survives_that_another_one_ends_the_presence(database: str) -> None:
    """A reload looks at the lanes beside the look of each second. If that one fails, or the daemon leaves because it
    has no broker, the presence is gone while the other waits for its turn, or for an answer."""
    async with opened(database) as store, sql(database) as admin:
        locks = store.locks
        await locks.look()
        async with admin.transaction():
            await admin.execute("LOCK TABLE lane IN ACCESS EXCLUSIVE MODE")
            async with sql(database) as other:
                first, second = asyncio.create_task(locks.look()), asyncio.create_task(locks.look())
                await blocked(other, "%lane%")
                locks.leave()
                with pytest.raises(StoreLost):
                    await first
                await blocked(other, "%lane%")
        assert (await second).lanes
