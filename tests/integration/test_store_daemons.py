"""The interface of PostgresStore below the ports: polls, lanes taken by number, announced rows, restores."""

from __future__ import annotations

import asyncio

import pandas  # noqa: F401 - else pyarrow imports it for its first table, which stops lane heartbeats for seconds
import pytest

from delayer.core.errors import LaneLost
from delayer.core.segment import Restored
from delayer.store import postgres
from delayer.store.admin import importing
from delayer.store.postgres import PostgresStore
from tests.support.fakes import WHY
from tests.support.place import compact_all
from tests.support.store import MANY, ROOM, bodies, claim_when_due, free_lanes, opened, owned, parcel, release_all, sql


async def compacted(database: str, messages: int) -> int:
    """Pack all waiting messages into segments of up to so many. Return the number of segments."""
    async with sql(database) as connection:
        return await compact_all(connection, messages)


async def test_two_daemons_never_share_a_lane(database: str) -> None:
    async with opened(database) as one, opened(database) as two, owned(one, 2) as ones, owned(two, 2) as twos:
        assert len({lane.number for lane in [*ones, *twos]}) == 4
        assert await one.locks.take(twos[0].number) is None
        await one.park(ones[0], [parcel(one.now_upper_ms() - 1)], [])
        assert await release_all(twos[0]) == await release_all(ones[1]) == []
        assert len(await release_all(ones[0])) == 1


async def test_a_look_shows_the_live_processes_and_the_owned_lanes(database: str) -> None:
    async with opened(database) as one, opened(database) as two:
        assert (await one.locks.look()).live == 1
        async with owned(two, 2) as lanes:
            looks = [await one.locks.look(), await two.locks.look()]
            assert [look.live for look in looks] == [2, 2]
            assert sorted(look.rank for look in looks) == [0, 1]
            assert {lane.number for lane in looks[0].lanes if lane.owned} == {lane.number for lane in lanes}
        two.locks.leave()
        while (await one.locks.look()).live == 2:
            pass
        assert (await two.locks.look()).live == 2


async def test_messages_without_a_lane_of_ours_are_announced(database: str) -> None:
    async with opened(database) as store, owned(store, 4) as lanes, sql(database) as other:
        for lane in lanes:
            assert await release_all(lane) == []
        sleepers = [asyncio.create_task(lane.wait(50.0)) for lane in lanes]
        for turn, _ in enumerate(lanes):
            place = await importing.choose_placement(other, turn)
            async with other.transaction():
                await postgres.park_plain(other, place, [parcel(store.now_upper_ms())])
        await asyncio.gather(*sleepers)
        assert [len(await release_all(lane)) for lane in lanes] == [1] * 4


async def test_a_lost_lane_claims_nothing(database: str) -> None:
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


@pytest.mark.parametrize("limit", [1, 2])
async def test_a_claim_shortened_by_a_cancel_does_not_hide_later_rows(database: str, limit: int) -> None:
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
