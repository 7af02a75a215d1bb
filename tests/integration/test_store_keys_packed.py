"""Keys of messages in segments: replaced, cancelled and restored while compactions and restores run."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import asyncpg
import pytest

from delayer.core.errors import Rejected
from delayer.core.filters import Filter
from delayer.core.message import KeyGroup
from delayer.core.operations import Cancel, fold
from delayer.core.units import DAY_MS
from delayer.store import waiting as read_model
from delayer.store.admin import actions, draining, importing
from delayer.store.admin.detail import FoundIn, find_message
from delayer.store.errors import WORTH_REPEATING
from delayer.store.lanes.lane import PostgresLane
from delayer.store.rows import keys
from delayer.store.rows.places import Place
from delayer.store.segments import catalog, restore
from tests.integration.segments_store import restore_all
from tests.support.fakes import WHY
from tests.support.rows import compact, conserved, everything, packed, waiting
from tests.support.store import Store, blocked, opened, owned, parcel, sql

LATER_MS = 60 * DAY_MS


async def park(store: Store, lane: PostgresLane, *keys: bytes, body: bytes = b"body") -> None:
    due_ms = store.now_upper_ms() + LATER_MS
    await store.park(lane, [parcel(due_ms + n, body, key=key) for n, key in enumerate(keys)], [])


async def bodies(admin: asyncpg.Connection) -> dict[bytes | None, bytes]:
    """All messages by key, after checking that each key points to its message and every count matches its rows."""
    async with admin.transaction(isolation="repeatable_read", readonly=True):
        await conserved(admin)
        as_rows, in_segments = await waiting(admin), await packed(admin)
        assert not as_rows.keys() & in_segments.keys()
        found = as_rows | in_segments
        pointers = await admin.fetch("SELECT * FROM message_key")
        assert {row["key"]: row["id"] for row in pointers} == {
            one.key: one.id for one in found.values() if one.key is not None
        }
        for row in pointers:
            there = found[row["id"]]
            assert (row["lane"], row["due_at"]) == (there.lane, there.due_us // 1000)
            assert (row["segment"] is not None) == (there.id in in_segments)
            told = (row["route"], row["to_exchange"], row["to_key"], row["size"])
            size = len(there.body) + len(there.properties)
            in_segment = (there.route, there.to_exchange, there.to_key, size)
            assert told == (in_segment if row["segment"] is not None else (None,) * 4)
        raw = sum(len(one.body) + len(one.properties) for one in in_segments.values())
        assert await admin.fetchval("SELECT coalesce(sum(raw_bytes), 0) FROM segment") == raw
        assert await admin.fetchval("SELECT count(*) FROM segment WHERE messages < 1") == 0
    return {one.key: one.body for one in found.values()}


async def test_a_cancel_leaves_the_segment_packed(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no pyarrow, and writes the same history as that of a row."""
    async with opened(database, history_days=7) as store, owned(store) as [lane], sql(database) as admin:
        await park(store, lane, *(b"%d" % n for n in range(20)))
        await compact(admin)
        ids = {one.key: one.id for one in (await packed(admin)).values()}
        with monkeypatch.context() as without:
            without.setitem(sys.modules, "pyarrow", None)
            assert await store.park(lane, [], [b"3", b"17", b"other"]) == {b"3", b"17"}
            assert await store.park(lane, [], [b"3"]) == set()
        assert (await bodies(admin)).keys() == {b"%d" % n for n in range(20)} - {b"3", b"17"}
        [segment] = await catalog.list_segments(admin)
        assert segment.messages == 18
        counters = await conserved(admin)
        assert (counters["cancelled"], counters["restored"]) == (2, 2)
        first, second = await admin.fetch("SELECT * FROM history ORDER BY id")
        assert (first["what"], first["id"], second["id"]) == ("cancelled", ids[b"3"], ids[b"17"])
        assert (first["route"], first["to_exchange"], first["to_key"]) == (b"delayer.in", b"delayer.out", b"orders.eu")
        assert (first["size"], second["due_at"] - first["due_at"]) == (4 + 3, 14)
        assert first["late_ms"] == pytest.approx(-LATER_MS, abs=60_000)
        assert first["delay_ms"] == pytest.approx(LATER_MS, abs=60_000)
        assert await find_message(admin, Place(0, ids[b"3"], 1).token) is FoundIn.NOWHERE


async def test_a_replacement_takes_the_place_of_a_packed_message(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        await park(store, lane, b"a", b"b", b"c", body=b"old")
        await compact(admin)
        await park(store, lane, b"b", body=b"new")
        assert await bodies(admin) == {b"a": b"old", b"b": b"new", b"c": b"old"}
        assert [one.messages for one in await restore_all(admin)] == [2], "the replaced message does not come back"
        assert await bodies(admin) == {b"a": b"old", b"b": b"new", b"c": b"old"}
        assert await admin.fetchval("SELECT count(segment) + count(size) FROM message_key") == 0
        await park(store, lane, b"a", body=b"new")
        assert await bodies(admin) == {b"a": b"new", b"b": b"new", b"c": b"old"}


async def test_a_segment_without_messages_is_deleted(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        await park(store, lane, b"a", b"b")
        await compact(admin)
        await store.park(lane, [], [b"a", b"b"])
        assert await catalog.list_segments(admin) == []
        assert await bodies(admin) == {}


async def test_a_group_cancel_finds_waiting_held_and_packed_messages(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        await park(store, lane, b"saga:1:a", b"saga:1:b", b"saga:2:a")
        await compact(admin)
        await park(store, lane, b"saga:1:c", b"saga:2:b")
        await store.hold(lane, [(parcel(store.now_upper_ms(), key=b"saga:1:d"), WHY)])
        await store.apply(lane, fold([Cancel(KeyGroup(b"saga:1:"))]), lane.number, None)
        assert (await bodies(admin)).keys() == {b"saga:2:a", b"saga:2:b"}
        assert (await conserved(admin))["cancelled"] == 4


async def test_groups_of_too_many_keys_are_rejected(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One group is refused alone; the intake splits a batch whose groups are too large together."""
    monkeypatch.setattr(keys, "MOST_FOUND", 3)
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        await park(store, lane, *(b"saga:%d:%d" % (saga, number) for saga in (1, 2, 3) for number in range(saga + 1)))
        for sagas in ([3], [1, 2]):
            groups = [Cancel(KeyGroup(b"saga:%d:" % saga)) for saga in sagas]
            with pytest.raises(Rejected, match="expected at most 3 messages to cancel"):
                await store.apply(lane, fold(groups), lane.number, None)
        assert len(await bodies(admin)) == 9
        for saga in (1, 2):
            await store.apply(lane, fold([Cancel(KeyGroup(b"saga:%d:" % saga))]), lane.number, None)
        assert len(await bodies(admin)) == 4


async def test_commands_find_packed_messages_by_their_key(database: str) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        await park(store, lane, b"a", b"b", b"c")
        await compact(admin)
        ids = {one.key: one.id for one in (await packed(admin)).values()}
        [entry] = (await read_model.find(admin, Filter(key=b"b"), 10)).messages
        assert (entry.place.id, entry.key) == (ids[b"b"], b"b")
        assert entry.place.segment is not None
        assert (await draining.count(admin, 0)).keyed == 0
        assert await importing.find_used_keys(admin, [b"a", b"nobody"]) == {b"a"}
        assert await read_model.count(admin, Filter(key=b"b")) == (1, 0)
        log_id = await actions.audit_log.begin(admin, "test", "cancel", {})
        pages = actions.waiting_pages(admin, Filter(key=b"b"))
        done = await actions.apply_to_matching(admin, actions.cancel, pages, log_id=log_id, say=lambda _: None)
        assert done == {FoundIn.SEGMENT: 1}
        assert await bodies(admin) == {b"a": b"body", b"c": b"body"}
        assert await actions.cancel(admin, [ids[b"a"]]) == {ids[b"a"]: FoundIn.WAITING}
        assert await bodies(admin) == {b"c": b"body"}


@asynccontextmanager
async def changing(
    store: Store, lane: PostgresLane, admin: asyncpg.Connection, new: Sequence[bytes], statement: str
) -> AsyncIterator[None]:
    """Replace message k by ``new``, or cancel it. Its ``statement`` waits until the body has ended what blocks it."""
    parcels = [parcel(store.now_upper_ms() + LATER_MS, b"new", key=key) for key in new]
    change = asyncio.create_task(store.park(lane, parcels, [] if new else [b"k"]))
    await blocked(admin, statement)
    yield
    assert await change == (set() if new else {b"k"})
    left = dict.fromkeys(new, b"new") | {b"l": b"old"}
    assert await bodies(admin) == left
    await restore_all(admin)
    assert await bodies(admin) == left


@pytest.mark.parametrize("new", [[], [b"k"]])
@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_a_change_waits_for_a_restore(database: str, new: Sequence[bytes], end: str) -> None:
    """Afterwards it finds a row, or the segment unchanged."""
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin, sql(database) as other:
        await park(store, lane, b"k", b"l", body=b"old")
        await compact(admin)
        transaction = other.transaction()
        await transaction.start()
        await restore.restore_one(other, catalog.FOREVER_MS)
        async with changing(store, lane, admin, new, statement="%FROM segment%FOR UPDATE%"):
            await getattr(transaction, end)()


@pytest.mark.parametrize("new", [[], [b"k"]])
@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_a_change_waits_for_a_compaction(database: str, new: Sequence[bytes], end: str) -> None:
    """Afterwards it finds the segment, or the row unchanged."""
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin, sql(database) as other:
        await park(store, lane, b"k", b"l", body=b"old")
        transaction = other.transaction()
        await transaction.start()
        await compact(other)
        async with changing(store, lane, admin, new, statement="%DELETE FROM message%"):
            await getattr(transaction, end)()


async def test_a_compaction_leaves_the_key_of_a_newer_message(database: str) -> None:
    """A message waiting along with a newer one of its key (rows edited by hand) keeps its key in the segment."""
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        await park(store, lane, b"k", b"l", body=b"old")
        newest = await admin.fetchval("UPDATE message_key SET id = id + 100 WHERE key = 'k' RETURNING id")
        await compact(admin)
        assert await admin.fetchval("SELECT id FROM message_key WHERE key = 'k' AND segment IS NULL") == newest
        await restore_all(admin)
        assert await admin.fetchval("SELECT id FROM message_key WHERE key = 'k' AND segment IS NULL") == newest
        assert sorted(one.key or b"" for one in (await everything(admin)).values()) == [b"k", b"l"]


@pytest.mark.parametrize("seed", range(3))
async def test_any_order_of_changes_compactions_and_restores(database: str, seed: int) -> None:
    chance = random.Random(seed)
    keys = [b"key %d" % n for n in range(12)]
    expected: dict[bytes | None, bytes] = {}
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        for turn in range(60):
            match chance.randrange(6):
                case 0 | 1:
                    some = chance.sample(keys, chance.randrange(1, 5))
                    await park(store, lane, *some, body=b"%d" % turn)
                    expected |= dict.fromkeys(some, b"%d" % turn)
                case 2:
                    some = chance.sample(keys, chance.randrange(1, 4))
                    assert await store.park(lane, [], some) == expected.keys() & set(some)
                    for key in some:
                        expected.pop(key, None)
                case 3:
                    await compact(admin, rows=chance.choice([3, 1000]))
                case 4:
                    await restore.restore_one(admin, catalog.FOREVER_MS)
                case _:
                    found = await everything(admin)
                    some_ids = chance.sample(sorted(found), min(2, len(found)))
                    await actions.cancel(admin, some_ids)
                    for number in some_ids:
                        expected.pop(found[number].key)
            assert await bodies(admin) == expected


async def test_changes_during_compactions_and_restores(database: str) -> None:
    """No key loses its newest message, and every cancel finds its message, even while a job is moving it."""
    keys = [b"key %d" % n for n in range(30)]
    async with opened(database) as store, sql(database) as admin, owned(store, 3) as lanes:
        done = asyncio.Event()

        async def move(seed: int) -> None:
            chance = random.Random(seed)
            async with sql(database) as mover:
                while not done.is_set():
                    with suppress(*WORTH_REPEATING):
                        await compact(mover, rows=chance.choice([5, 1000]))
                    with suppress(*WORTH_REPEATING):
                        while chance.random() < 0.7 and await restore.restore_one(mover, catalog.FOREVER_MS):
                            pass
                    await asyncio.sleep(0)

        async def change(lane: PostgresLane, mine: list[bytes], seed: int) -> dict[bytes | None, bytes]:
            chance = random.Random(seed)
            expected: dict[bytes | None, bytes] = {}
            for turn in range(60):
                some = chance.sample(mine, chance.randrange(1, 6))
                if chance.random() < 0.6:
                    await park(store, lane, *some, body=b"%d" % turn)
                    expected |= dict.fromkeys(some, b"%d" % turn)
                else:
                    assert await store.park(lane, [], some) == expected.keys() & set(some)
                    for key in some:
                        expected.pop(key, None)
            return expected

        moving = [asyncio.create_task(move(seed)) for seed in range(2)]
        found = await asyncio.gather(*(change(lane, keys[n::3], n) for n, lane in enumerate(lanes)))
        done.set()
        await asyncio.gather(*moving)
        expected = {key: body for part in found for key, body in part.items()}
        assert await bodies(admin) == expected
        await restore_all(admin)
        assert await bodies(admin) == expected
