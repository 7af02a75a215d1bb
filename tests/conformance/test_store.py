"""The behaviour of every store. Several stores opened at one place are several daemons. No test here uses SQL."""

from __future__ import annotations

import asyncio

import pandas  # noqa: F401 - pyarrow loads it for its first table, and no lane is kept alive meanwhile: seconds
import pytest

from delayer.core.errors import LaneLost
from delayer.core.message import WINDOW_MS, KeyGroup, Parcel, Target
from delayer.core.segment import Restored
from delayer.store import postgres
from delayer.store.admin import importing
from delayer.store.postgres import PostgresStore
from tests.support.fakes import WHY
from tests.support.place import compact_all
from tests.support.store import (
    MANY,
    ROOM,
    bodies,
    claim_when_due,
    free_lanes,
    opened,
    owned,
    parcel,
    release_all,
    release_from,
    sql,
    taken,
)


async def compacted(database: str, messages: int) -> int:
    """Pack all waiting messages into segments of up to so many. Return the number of segments."""
    async with sql(database) as connection:
        return await compact_all(connection, messages)


@pytest.mark.parametrize("key", [None, b"\x00key"])
async def test_a_message_comes_out_unchanged(database: str, key: bytes | None) -> None:
    async with opened(database) as store, owned(store) as [lane]:
        due_ms = store.now_upper_ms() - 5
        every = Parcel(
            due_ms, b"route", b"ex\x00change", bytes(range(256))[1:], Target(b"", b"queue"), b"\0\0", b"\0" * 9, key
        )
        empty = Parcel(due_ms, b"", b"", b"", Target(b"", b""), b"", b"", None)
        big = parcel(due_ms, body=bytes(range(256)) * 12_000, properties=b"\xff" * 70_000)
        await store.park(lane, [every, empty, big], [])
        rows = await lane.claimers[0].claim(MANY, ROOM)
        assert [due.parcel for due in rows] == [every, empty, big]
        assert [(due.due_ms, due.attempts, due.sound) for due in rows] == [(due_ms, 0, True)] * 3
        assert len({due.id for due in rows}) == 3
        await lane.claimers[0].settle(rows, [])
        assert await release_all(lane) == []


async def test_order_is_due_instant_then_arrival(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane]:
        now = store.now_upper_ms()
        await store.park(lane, [parcel(now - 10, b"3"), parcel(now - 30, b"1"), parcel(now - 10, b"4")], [])
        await store.park(lane, [parcel(now - 10, b"5"), parcel(now - 20, b"2")], [])
        assert bodies(await release_all(lane)) == [b"1", b"2", b"3", b"4", b"5"]


async def test_a_batch_is_bounded_by_count_and_by_bytes_but_takes_one(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane]:
        now = store.now_upper_ms()
        await store.park(lane, [parcel(now - 99 + n, b"x" * 1000) for n in range(10)], [])
        bounds = [(2, ROOM), (2, ROOM), (MANY, 1), (MANY, 1500), (MANY, 1), (2, ROOM)]
        sizes = []
        for limit, max_bytes in bounds:
            rows = await lane.claimers[0].claim(limit, max_bytes)
            await lane.claimers[0].settle(rows, [])
            sizes.append(len(rows))
            if len(rows) == limit:
                assert lane.sleep_hint() == 0.0
        assert sizes == [2, 2, 1, 2, 1, 2]
        assert await release_all(lane) == []


async def test_never_early_and_not_missed(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane]:
        await release_all(lane)
        due_ms = store.now_upper_ms() + 400
        await store.park(lane, [parcel(due_ms)], [])
        rows = await lane.claimers[0].claim(MANY, ROOM)
        if not rows:  # else this machine stood still for 300 ms
            assert lane.sleep_hint() <= 0.4
            rows = await claim_when_due(lane)
            assert lane.sleep_hint() >= 0.4
        assert store.now_upper_ms() >= due_ms - WINDOW_MS
        assert len(rows) == 1
        await lane.claimers[0].settle(rows, [])
        assert lane.sleep_hint() == 60.0


async def test_a_claim_leaves_rows_due_after_its_window(database: str) -> None:
    """The test claims without a pause: a claim that sleeps until a row is due would hide an early one."""
    async with opened(database) as store, owned(store) as [lane]:
        first_ms = store.now_upper_ms()
        await store.park(lane, [parcel(first_ms + 7 * n) for n in range(60)], [])
        claimed, early = 0, []
        while claimed < 60:
            rows = await lane.claimers[0].claim(MANY, ROOM)
            now_ms = store.now_upper_ms()  # an upper bound: the store's clock shows no more
            early += [due.due_ms - now_ms for due in rows if due.due_ms > now_ms + WINDOW_MS]
            claimed += len(rows)
            await lane.claimers[0].settle(rows, [])
        assert early == []


async def test_wait_ends_when_something_nearer_is_parked(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane]:
        await release_all(lane)
        sleeper = asyncio.create_task(lane.wait(50.0))
        await asyncio.sleep(0)
        await store.park(lane, [parcel(store.now_upper_ms() + 20)], [])
        await sleeper
        assert len(await claim_when_due(lane)) == 1
        await lane.claimers[0].give_up()


async def test_settling_less_than_was_claimed_settles_nothing(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane]:
        await store.park(lane, [parcel(store.now_upper_ms()) for _ in range(3)], [])
        rows = await lane.claimers[0].claim(MANY, ROOM)
        with pytest.raises(ValueError, match="claimed 3"):
            await lane.claimers[0].settle(rows[:1], [])
        assert len(await release_all(lane)) == 3


async def test_parked_before_the_watermark_between_claims(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane]:
        await release_all(lane)
        day = 86_400_000
        for back in (0, 10, 60_000, 3 * day, 30 * day):
            await store.park(lane, [parcel(store.now_upper_ms() - back)], [])
            assert lane.sleep_hint() == 0.0
            assert len(await release_all(lane)) == 1


async def test_two_daemons_never_share_a_lane(database: str) -> None:
    async with opened(database) as one, opened(database) as two, owned(one, 2) as ones, owned(two, 2) as twos:
        assert len({lane.number for lane in [*ones, *twos]}) == 4
        assert await one.take(twos[0].number) is None
        await one.park(ones[0], [parcel(one.now_upper_ms() - 1)], [])
        assert await release_all(twos[0]) == await release_all(ones[1]) == []
        assert len(await release_all(ones[0])) == 1


async def test_a_lane_is_taken_when_its_owner_is_gone(database: str) -> None:
    async with opened(database) as one, opened(database) as two, owned(one, 2) as [with_rows, _]:
        await one.park(with_rows, [parcel(one.now_upper_ms() - 1, b"orphan")], [])
        assert await two.take(with_rows.number) is None
        await with_rows.claimers[0].claim(MANY, ROOM)
        await with_rows.close()
        await with_rows.close()
        assert not with_rows.owned
        assert bodies(await release_from(two, with_rows.number)) == [b"orphan"]


async def test_a_look_shows_the_live_processes_and_the_owned_lanes(database: str) -> None:
    async with opened(database) as one, opened(database) as two:
        assert (await one.look()).live == 1
        async with owned(two, 2) as lanes:
            looks = [await one.look(), await two.look()]
            assert [look.live for look in looks] == [2, 2]
            assert sorted(look.rank for look in looks) == [0, 1]
            assert {lane.number for lane in looks[0].lanes if lane.owned} == {lane.number for lane in lanes}
        two.leave()
        while (await one.look()).live == 2:
            pass
        assert (await two.look()).live == 2


async def test_messages_of_a_route_with_a_lane_go_there(database: str) -> None:
    """Any process may own the lane, and its owner is notified of them."""
    async with opened(database) as one, opened(database) as two:
        await one.add_routes([b"limited"])
        await two.add_routes([b"limited"])
        number = (await one.look()).routes[b"limited"]
        theirs = await taken(two, number)
        assert theirs.route == b"limited"
        async with owned(one) as [lane]:
            assert await release_all(theirs) == []
            sleeper = asyncio.create_task(theirs.wait(50.0))
            now = one.now_upper_ms()
            mixed = [parcel(now, b"%d" % n, route=b"limited" if n % 2 else b"free") for n in range(6)]
            await one.park(lane, mixed, [])
            await sleeper
            assert bodies(await claim_when_due(theirs)) == [b"1", b"3", b"5"]
            await theirs.claimers[0].give_up()
            assert bodies(await claim_when_due(lane)) == [b"0", b"2", b"4"]
            await lane.claimers[0].give_up()
            await one.park(lane, [parcel(now + 60_000, b"6", route=b"limited", key=b"k")], [])
            taken_out = await one.park(lane, [], [b"k"])
            assert taken_out == {b"k"}
            await one.hold(lane, [(parcel(now, b"7", route=b"limited"), WHY)])
            await release_all(theirs)
            assert 1.0 < theirs.sleep_hint() <= 10.0
        await theirs.close()


async def test_messages_without_a_lane_of_ours_are_announced(database: str) -> None:
    async with opened(database) as store, owned(store, 4) as lanes, sql(database) as other:
        for lane in lanes:
            assert await release_all(lane) == []
        sleepers = [asyncio.create_task(lane.wait(50.0)) for lane in lanes]
        for turn, _ in enumerate(lanes):
            place = await importing.anywhere(other, turn)
            async with other.transaction():
                await postgres.park_plain(other, place, [parcel(store.now_upper_ms())])
        await asyncio.gather(*sleepers)
        assert [len(await release_all(lane)) for lane in lanes] == [1] * 4


async def test_a_lost_lane_takes_nothing(database: str) -> None:
    async with opened(database) as one, opened(database) as two:
        [lane] = await free_lanes(one, 1)
        await lane.close()
        async with owned(two) as [theirs]:
            assert theirs.number == lane.number
            with pytest.raises(LaneLost):
                await one.park(lane, [parcel(one.now_upper_ms())], [])
            with pytest.raises(LaneLost):
                await one.hold(lane, [(parcel(one.now_upper_ms()), WHY)])
            with pytest.raises(LaneLost):
                lane.sleep_hint()
            for doing in (lane.claimers[0].claim(1, 1), lane.claimers[0].settle([], [])):
                with pytest.raises(LaneLost):
                    await doing
            await lane.claimers[0].give_up()
            await lane.wait(10.0)
            assert await release_all(theirs) == []


async def test_a_key_is_free_again_after_the_release(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane]:
        for _ in range(2):
            await store.park(lane, [parcel(store.now_upper_ms(), key=b"k")], [])
            assert len(await release_all(lane)) == 1
            await store.park(lane, [], [b"k"])


async def test_a_cancel_of_a_group_removes_the_messages_of_its_keys(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane]:
        now = store.now_upper_ms()
        keys = [b"g:1", b"g:2", b"g:", b"g", b"g;", b"h:1", b"\xff\xff", b"\xff\x01"]
        await store.park(lane, [parcel(now, key, key=key) for key in keys], [])
        await store.park(lane, [parcel(now, b"new", key=b"g:1")], [KeyGroup(b"g:"), KeyGroup(b"none")])
        await store.park(lane, [], [KeyGroup(b"\xff"), b"h:1"])
        assert sorted(bodies(await release_all(lane))) == [b"g", b"g;", b"new"]


@pytest.mark.parametrize("limit", [1, 2])
async def test_a_claim_shortened_by_a_cancel_hides_nothing(database: str, limit: int) -> None:
    """The claim waits for a row that the cancel removes, so it may take fewer rows than are due, perhaps none."""
    async with opened(database) as store, owned(store, 2) as lanes:
        lane, other = sorted(lanes, key=lambda each: each.number)
        now = store.now_upper_ms()
        await store.park(lane, [parcel(now - 9 + n, b"%d" % n, key=None if n else b"k") for n in range(8)], [])
        await store.park(other, [parcel(now, key=b"l")], [])
        in_flight = await other.claimers[0].claim(MANY, ROOM)
        cancelling = asyncio.create_task(store.park(other, [], [b"k", b"l"]))
        await asyncio.wait([cancelling], timeout=0.2)
        claiming = asyncio.create_task(lane.claimers[0].claim(limit, ROOM))
        done, _ = await asyncio.wait([claiming], timeout=0.2)
        assert not done
        await other.claimers[0].settle(in_flight, [])
        rows = await claiming
        assert b"0" not in bodies(rows)
        await cancelling
        await lane.claimers[0].settle(rows, [])
        while len(rows) < 7:
            assert lane.sleep_hint() == 0.0
            rows += (more := await lane.claimers[0].claim(limit, ROOM))
            await lane.claimers[0].settle(more, [])
        assert bodies(rows) == [b"%d" % n for n in range(1, 8)]


async def test_a_cancel_waits_for_the_release_in_flight(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane]:
        await store.park(lane, [parcel(store.now_upper_ms(), b"old", key=b"k")], [])
        for gives_up in (True, False):
            rows = await lane.claimers[0].claim(MANY, ROOM)
            assert bodies(rows) == [b"old"]
            replacing = asyncio.create_task(store.park(lane, [parcel(store.now_upper_ms(), b"old", key=b"k")], []))
            done, _ = await asyncio.wait([replacing], timeout=0.2)
            assert not done
            await (lane.claimers[0].give_up() if gives_up else lane.claimers[0].settle(rows, []))
            await replacing
        assert bodies(await release_all(lane)) == [b"old"]


async def test_a_restore_wakes_the_sleeping_lane(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane]:
        await store.park(lane, [parcel(store.now_upper_ms() - 60_000, b"late")], [])
        assert await compacted(database, MANY) == 1
        assert await release_all(lane) == []
        sleeper = asyncio.create_task(lane.wait(50.0))
        await asyncio.sleep(0)
        await store.restore(store.now_upper_ms())
        await sleeper
        assert bodies(await claim_when_due(lane)) == [b"late"]
        await lane.claimers[0].give_up()


async def test_two_daemons_restore_each_segment_once(database: str) -> None:
    async with opened(database) as one, opened(database) as two, owned(one) as [first], owned(two) as [second]:
        await one.park(first, [parcel(one.now_upper_ms() - 1000 + n, b"%d" % n) for n in range(12)], [])
        assert await compacted(database, 1) == 12

        async def all_of_them(store: PostgresStore) -> int:
            count = 0
            while (found := await store.restore(store.now_upper_ms())) is not None:
                count += isinstance(found, Restored)
            return count

        assert sum(await asyncio.gather(all_of_them(one), all_of_them(two))) == 12
        released = await release_all(first) + await release_all(second)
        assert sorted(bodies(released), key=int) == [b"%d" % n for n in range(12)]
