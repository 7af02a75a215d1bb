"""Keys and the law of conservation, with several daemons at work."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any

import pytest

from delayer.core.errors import StoreLost
from delayer.core.hold import Hold, HoldKind
from delayer.core.message import REPLACE, KeyMode
from delayer.store.admin import actions
from delayer.store.admin.detail import FoundIn
from delayer.store.admin.setup import raise_lanes
from delayer.store.admin.stats import overview
from delayer.store.errors import WORTH_REPEATING
from tests.support.fakes import NO_CONFIRM, WHY
from tests.support.rows import conserved
from tests.support.store import MANY, ROOM, Store, blocked, bodies, opened, owned, parcel, release_all, sql

MODES = [REPLACE, KeyMode(keep=True), KeyMode(ceiling_ms=0)]
# In order: two sessions that lock the same rows in different orders would deadlock.
HURRY = "UPDATE held SET retry_at = now() WHERE id IN (SELECT id FROM held ORDER BY id FOR UPDATE)"


@pytest.mark.parametrize("hold", [WHY, NO_CONFIRM, Hold(HoldKind.LATE, "late", may_be_delivered=True)])
async def test_a_held_message_is_cancelled_by_key_and_by_id(database: str, hold: Hold) -> None:
    """The lane does not retry it."""
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        await store.park(lane, [parcel(store.now_upper_ms(), key=key) for key in (b"k", b"l")], [])
        rows = await lane.claimers[0].claim(MANY, ROOM)
        await lane.claimers[0].settle([], [(row, hold) for row in rows])
        of_l = next(row.id for row in rows if row.parcel.key == b"l")
        assert await store.park(lane, [], [b"k"]) == {b"k"}
        assert await actions.cancel(admin, [of_l]) == {of_l: FoundIn.HELD}
        for table in ("message", "held", "message_key"):
            assert await admin.fetchval(f"SELECT count(*) FROM {table}") == 0
        [of] = [one for one in (await overview(database)).lanes if one.number == lane.number]
        assert (of.counters["parked"], of.counters["cancelled"], of.held, of.waiting) == (2, 2, 0, 0)


async def test_a_key_that_was_overtaken_while_it_was_released_stays_with_the_new_one(database: str) -> None:
    async with opened(database) as store, owned(store, 2) as [lane, other], sql(database) as admin:
        await store.park(lane, [parcel(store.now_upper_ms(), b"old", key=b"k")], [])
        rows = await lane.claimers[0].claim(MANY, ROOM)
        replacing = asyncio.create_task(store.park(other, [parcel(store.now_upper_ms(), b"new", key=b"k")], []))
        await blocked(admin, "%")
        await lane.claimers[0].settle(rows, [])
        await replacing
        assert await admin.fetchval("SELECT lane FROM message_key") == other.number
        assert len(await release_all(other)) == 1
        assert await admin.fetchval("SELECT count(*) FROM message_key") == 0


async def test_a_message_that_became_held_while_its_cancel_waited_is_cancelled(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        await store.park(lane, [parcel(store.now_upper_ms(), key=b"k")], [])
        rows = await lane.claimers[0].claim(MANY, ROOM)
        cancelling = asyncio.create_task(store.park(lane, [], [b"k"]))
        await blocked(admin, "%")
        await lane.claimers[0].settle([], [(rows[0], WHY)])
        await cancelling
        assert await admin.fetchval("SELECT count(*) FROM held") == 0


async def move_some(database: str, by_ms: int) -> None:
    """Move some messages by command; a command that loses to another transaction gives up."""
    async with sql(database) as hand:
        ids = [number for (number,) in await hand.fetch("SELECT id FROM message ORDER BY random() LIMIT 20")]
        with suppress(*WORTH_REPEATING):
            await actions.reschedule(hand, ids, when=actions.NewDue(by_ms=by_ms))


async def test_conservation_under_everything_at_once(database: str) -> None:
    """Two daemons with two loops each do every kind of work; the counters match the rows at every check."""
    chance = random.Random(20_261_120)
    keys = [b"key %d" % n for n in range(6)]
    async with opened(database) as one, opened(database) as two, sql(database) as admin:

        async def work(store: Store, turns: int, lanes: list[Any]) -> int:
            released = 0
            for _ in range(turns):
                lane = chance.choice(lanes)
                match chance.randrange(8):
                    case 0 | 1:
                        dues = [
                            store.now_upper_ms() + chance.randrange(-50, 50) for _ in range(chance.randrange(1, 30))
                        ]
                        await store.park(lane, [parcel(due, b"%d" % due) for due in dues], [])
                    case 2 | 3:
                        some = [
                            parcel(store.now_upper_ms(), key=chance.choice(keys), mode=chance.choice(MODES))
                            for _ in range(chance.randrange(5))
                        ]
                        await store.park(lane, some, chance.sample(keys, chance.randrange(3)))
                    case 4:
                        await store.hold(lane, [(parcel(store.now_upper_ms()), WHY)] * 2)
                    case 5:
                        await move_some(database, chance.randrange(-1_000, 1_000))
                    case 6:
                        await lane.claimers[0].claim(chance.randrange(1, 40), ROOM)
                        await lane.claimers[0].give_up()
                    case _:
                        rows = await lane.claimers[0].claim(chance.randrange(1, 40), ROOM)
                        split = chance.randrange(len(rows) + 1)
                        released += split
                        await lane.claimers[0].settle(rows[:split], [(due, WHY) for due in rows[split:]])
                if chance.random() < 0.1:
                    async with sql(database) as hand:
                        await hand.execute(HURRY)
                    await lane.scan()
                    lane.sleep_hint()
            return released

        looking = asyncio.Event()

        async def look() -> None:
            async with sql(database) as reader:
                while not looking.is_set():
                    async with reader.transaction(isolation="repeatable_read", readonly=True):
                        await conserved(reader)

        watcher = asyncio.create_task(look())
        await raise_lanes(database, 8)
        async with owned(one, 4) as ours, owned(two, 4) as theirs:
            parts = (one, ours[:2]), (one, ours[2:]), (two, theirs[:2]), (two, theirs[2:])
            released = sum(await asyncio.gather(*(work(store, 80, lanes) for store, lanes in parts)))
        looking.set()
        await watcher
        await conserved(admin)
        whole = await overview(database)
        assert whole.counters["released"] == released > 0
        assert whole.counters["cancelled"] > 0 < whole.held
        dangling = (
            "SELECT key FROM message_key k WHERE id NOT IN (SELECT id FROM message UNION ALL SELECT id FROM held)"
        )
        assert await admin.fetch(dangling) == []
        twice = "SELECT key FROM (SELECT key FROM message UNION ALL SELECT key FROM held) m WHERE key IS NOT NULL"
        assert await admin.fetch(f"{twice} GROUP BY key HAVING count(*) > 1") == []


async def test_a_claim_that_loses_a_deadlock_takes_nothing_and_the_next_one_goes_on(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as other, sql(database) as admin:
        await store.park(lane, [parcel(store.now_upper_ms() - 9 + n, b"%d" % n) for n in range(3)], [])
        await other.execute("SET deadlock_timeout = '1min'")  # so that the claim detects the deadlock, and loses
        await other.execute("BEGIN")
        await other.execute("DELETE FROM message WHERE body = '1'")
        claiming = asyncio.create_task(lane.claimers[0].claim(MANY, ROOM))
        await blocked(admin, "%")
        await other.execute("DELETE FROM message WHERE body = '0'")  # the claim has it, and waits for the row above
        await other.execute("COMMIT")
        assert await claiming == []
        assert lane.cursor.more, "the next claim begins at once"
        rows = await lane.claimers[0].claim(MANY, ROOM)
        assert bodies(rows) == [b"2"]
        await lane.claimers[0].settle(rows, [])


async def test_a_settlement_that_loses_a_deadlock_keeps_its_lane(database: str) -> None:
    """What the broker has confirmed is known to this process only: another owner would publish it again."""
    async with opened(database) as store, owned(store) as [lane], sql(database) as other, sql(database) as admin:
        await store.park(lane, [parcel(store.now_upper_ms() - 9 + n, b"%d" % n) for n in range(2)], [])
        await release_all(lane)
        for kind in ("held", "released"):
            await admin.execute("INSERT INTO counter VALUES ($1, $2, 0) ON CONFLICT DO NOTHING", lane.number, kind)
        await store.park(lane, [parcel(store.now_upper_ms() - 9 + n, b"%d" % n) for n in range(2)], [])
        rows = await lane.claimers[0].claim(MANY, ROOM)
        touch = "UPDATE counter SET n = n WHERE lane = $1 AND kind = $2"
        await other.execute("SET deadlock_timeout = '1min'")
        await other.execute("BEGIN")
        await other.execute(touch, lane.number, "released")
        hold = (rows[0], WHY)
        settling = asyncio.create_task(lane.claimers[0].settle(rows[1:], [hold]))
        await blocked(admin, "%")
        await other.execute(touch, lane.number, "held")
        await other.execute("COMMIT")
        with pytest.raises(StoreLost, match="deadlock") as lost:
            await settling
        assert lost.value.conflict and not lost.value.advice and lane.owned
        again = await lane.claimers[0].claim(MANY, ROOM)
        await lane.claimers[0].settle(again, [])
        assert bodies(again) == [b"0", b"1"]
