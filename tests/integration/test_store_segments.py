"""Rows become segments and rows again in a real store: byte for byte, counted, by cheap plans, even with corrupt bytes
and while other workers run.
"""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise
from typing import Any

import asyncpg
import pytest

from delayer.audit.compact import CompactionPlan, numbers, pack_window
from delayer.core.segment import Broken, Restored, SegmentBroken
from delayer.core.units import DAY_MS
from delayer.store.rows import partitions
from delayer.store.segments import catalog, restore
from delayer.store.segments import compact as compacting
from delayer.store.segments.catalog import FOREVER_MS
from delayer.store.segments.compact import Compacted, CompactionWindow
from tests.integration.segments_store import START_MS, apart, restore_all, store
from tests.support.rows import Row, compact, conserved, everything, packed, put, row, rows, waiting, without_lanes
from tests.support.store import blocked, claim_when_due, opened, owned, parcel, release_all, sql


def strange() -> list[Row]:
    """Rows with rare but possible values."""
    chance = random.Random(4)
    every = bytes(range(256))
    kinds = [
        row(1, START_MS),
        Row(1, 2, START_MS * 1000 + 1, 5, 0, 1, b"", b"", b"", b"", b"", b"", b""),
        Row(1, 3, START_MS * 1000 + 999, -7, 1 << 40, 99, every, every, every, every, every, every * 9, every * 9),
        row(4, START_MS, body=chance.randbytes(1_000_000)),
        row(5, START_MS + DAY_MS - 1, body=b"x" * 70_000)._replace(properties=b"\xff" * 70_000),
        row(-5, START_MS + DAY_MS),
        row((1 << 62), START_MS)._replace(checksum=-1),
        row(6, START_MS + DAY_MS - 1)._replace(due_us=(START_MS + DAY_MS) * 1000 - 1),
    ]
    return kinds


@pytest.mark.parametrize("days", [0, 3])
@pytest.mark.parametrize("portion_bytes", [1 << 20, 1_000])
async def test_round_trip_to_the_byte(database: str, days: int, portion_bytes: int) -> None:
    async with store(database, days) as admin:
        before = {one.id: one for one in strange() + rows(500, START_MS, first_id=100, span_ms=3 * DAY_MS)}
        await put(admin, before.values())
        made = await compact(admin, rows=200)
        assert sum(one.messages for one in made) == len(before)
        assert await waiting(admin) == {}
        assert await packed(admin) == before
        assert (await conserved(admin))["compacted"] == len(before)
        back = await restore_all(admin, portion_bytes=portion_bytes)
        assert sum(one.messages for one in back) == len(before)
        assert [one.first_due_ms for one in back] == sorted(one.first_due_ms for one in back)
        after = await waiting(admin)
        assert {one.lane for one in after.values()} == {1}
        assert without_lanes(after) == without_lanes(before)
        assert (await conserved(admin))["restored"] == len(before)
        assert await admin.fetchval("SELECT count(*) FROM segment") == 0


async def test_the_header_of_a_segment(database: str) -> None:
    async with store(database) as admin:
        await put(admin, [row(7, START_MS + 5, body=b"abc"), row(3, START_MS + 9, body=b"de"), row(5, START_MS + 7)])
        [made] = await compact(admin)
        [listed] = await catalog.list_segments(admin)
        raw = 3 + 2 + 4 + 3 * 3
        assert (made.segment, made.messages, made.raw_bytes, made.more) == (listed.id, 3, raw, False)
        assert listed[1:7] == (1, START_MS + 5, START_MS + 9, 3, raw, made.packed_bytes)
        assert listed.broken is None
        assert await admin.fetchrow("SELECT ids, format FROM segment") == ([7, 5, 3], 1)
        assert await catalog.count(admin) == (1, 3, 0, 0, START_MS + 5)
        assert await catalog.list_segments(admin, START_MS + 5) == []
        assert await restore.restore_one(admin, START_MS + 4) is None
        assert await restore.restore_one(admin, START_MS + 5) == Restored(listed.id, 3, START_MS + 5)
        assert await catalog.count(admin) == (0, 0, 0, 0, None)
        assert await catalog.read_segment(admin, listed.id) is None
        assert await restore.restore(admin, listed.id) is None


async def test_restored_messages_are_released(database: str) -> None:
    """The daemon's own parking and releasing, and each message keeps the id of its park."""
    async with opened(database) as place, owned(place) as [one]:
        now = place.now_upper_ms()
        await place.park(one, [parcel(now - n, b"%d" % n) for n in range(5)], [])
        async with sql(database) as admin:
            ids = sorted(await waiting(admin))
            assert len(await compact(admin)) == 1
            assert await release_all(one) == []
            await restore_all(admin)
            released = await claim_when_due(one)
            await one.claimers[0].settle(released, [])
            assert [due.parcel.body for due in released] == [b"4", b"3", b"2", b"1", b"0"]
            assert sorted(due.id for due in released) == ids
            assert all(due.sound for due in released)
            assert await conserved(admin) == {
                "parked": 5, "restored": 5, "released": 5, "cancelled": 0, "compacted": 5, "held": 0,
            }  # fmt: skip


@pytest.mark.parametrize(
    ("days", "at_most", "odd_us"), [(5, 1, 500), (0, 7, 0), (5, 7, 500), (0, 100, 500), (5, 100, 0), (0, 10_000, 500)]
)
async def test_windows_cover_every_row_once(database: str, days: int, at_most: int, odd_us: int) -> None:
    """Lanes, days, gaps between them, many at one instant."""
    chance = random.Random(at_most)
    made = []
    for number in range(400):
        lane, day = chance.choice([1, 1, 2, 7]), chance.choice([0, 0, 1, 4, 30, 300])
        due_ms = START_MS + day * DAY_MS + chance.choice([0, 1, 2, chance.randrange(DAY_MS), DAY_MS - 1])
        made.append(row(number, due_ms, lane)._replace(due_us=due_ms * 1000 + chance.choice([0, 0, 0, odd_us])))
    async with store(database, days) as admin:
        await put(admin, made)
        found = await compacting.windows(admin, START_MS - 1, at_most)
        assert found == sorted(found)
        assert all(one.rows <= at_most or one.last_ms - one.first_ms < HOUR_MS for one in found)
        assert all(window.last_ms - window.first_ms < compacting.SPAN_MS for window in found)
        assert [sum(_inside(one, window) for one in made) for window in found] == [window.rows for window in found]
        assert all(sum(_inside(one, window) for window in found) == 1 for one in made)
        # No fewer windows are possible: neighbours are joined where allowed.
        for one, two in pairwise(found):
            fits = one.rows + two.rows <= at_most and two.last_ms - one.first_ms < compacting.SPAN_MS
            assert one.lane != two.lane or not fits
        await compact(admin, START_MS - 1, at_most)
        assert await waiting(admin) == {}


HOUR_MS = 3_600_000


def _inside(one: Row, window: CompactionWindow) -> bool:
    return one.lane == window.lane and window.first_ms <= one.due_us // 1000 <= window.last_ms


async def test_windows_begin_after_a_limit(database: str) -> None:
    async with store(database, 3) as admin:
        await put(admin, [row(n, START_MS + n * 1000) for n in range(10)])
        assert await compacting.windows(admin, START_MS + 9_000) == []
        [window] = await compacting.windows(admin, START_MS + 4_000)
        assert (window.first_ms, window.rows) == (START_MS + 4_001, 5)
        made = await compacting.compact_one(admin, window)
        assert made is not None
        assert sorted(await waiting(admin)) == [0, 1, 2, 3, 4]


async def test_few_messages_stay_rows_and_a_dry_run_plans_as_the_run(database: str) -> None:
    """One window has enough, one has enough with its keys, and one too few."""
    async with store(database) as admin:
        many = [row(n, START_MS + n) for n in range(400)]
        few = [row(400 + n, START_MS + 90 * DAY_MS + n) for n in range(5)]
        keyed = [row(500 + n, START_MS + n, lane=2, key=b"%d" % n if n < 200 else None) for n in range(300)]
        await put(admin, many + few + keyed)
        planned = CompactionPlan(0, 0, await compacting.windows(admin, 0, fewest=compacting.FEWEST), compacting.FEWEST)
        told = await numbers(database, planned, compacting.ROWS)
        done = [await pack_window(admin, one, compacting.ROWS, planned.fewest) for one in planned.windows]
        assert [one.rows for one in planned.windows] == [400, 300]
        assert (told.messages, told.segments, told.few, told.keyed) == (700, 2, 5, 200)
        assert [[made.messages for made in one.made] for one in done] == [[400], [300]]
        assert told.raw_bytes == sum(made.raw_bytes for one in done for made in one.made)


async def test_rows_that_a_restore_brings_back_wait_for_the_next_job(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each segment is restored at once. The job would pack its rows again and again."""
    made, pack = list[int](), compacting.compact_one

    async with store(database) as admin, sql(database) as other:

        async def pack_and_restore(*given: Any, **named: Any) -> Compacted | None:
            if (one := await pack(*given, **named)) is not None:
                assert await restore.restore(other, one.segment)
                made.append(one.messages)
            return one

        await put(admin, [row(n, START_MS + n) for n in range(25)])
        [window] = await compacting.windows(admin, 0)
        monkeypatch.setattr(compacting, "compact_one", pack_and_restore)
        await pack_window(admin, window, 10, 0)
        assert made == [10, 10, 7], "each segment begins with the last row of the one before, which is a row again"
        assert len(await waiting(admin)) == 25
        await conserved(admin)


async def test_many_due_at_one_instant(database: str) -> None:
    async with store(database) as admin:
        await put(admin, [row(n, START_MS) for n in range(1_000)])
        [window] = await compacting.windows(admin, 0, 100)
        assert window.rows == 1_000
        assert [one.messages for one in await compact(admin, rows=100)] == [100] * 10
        assert sorted(await packed(admin)) == list(range(1_000))


async def test_large_rows_stay(database: str) -> None:
    """In every position: first, in the middle, last, and alone."""
    async with store(database) as admin:
        most = compacting.LARGEST - len(row(0, START_MS).properties)
        sizes = [most + 2, 10, most + 1, most, most - 1, most + 3]
        await put(admin, [row(n, START_MS + n, body=b"x" * size) for n, size in enumerate(sizes)])
        before = await everything(admin)
        [made] = await compact(admin)
        assert made.messages == 3
        assert sorted(len(one.body) for one in (await waiting(admin)).values()) == [most + 1, most + 2, most + 3]
        assert await compact(admin) == []
        assert await everything(admin) == before
        await conserved(admin)


async def test_locked_rows_stay_rows(database: str) -> None:
    async with store(database) as admin, sql(database) as other:
        await put(admin, rows(20, START_MS))
        async with other.transaction():
            await other.execute("SELECT FROM message WHERE id <= 5 FOR UPDATE")
            [made] = await compact(admin)
            assert made.messages == 15
            assert await compact(admin) == []
        assert len(await everything(admin)) == 20
        [made] = await compact(admin)
        assert made.messages == 5
        await conserved(admin)


@pytest.mark.parametrize("portion", [1, 7, 100, 1_000])
async def test_rows_locked_in_portions_are_the_same_rows(database: str, portion: int) -> None:
    """For every end of a portion: inside a millisecond, among many of one instant, at a row that stays."""
    async with store(database) as admin:
        await put(admin, [row(n, START_MS + n // 50) for n in range(300)])
        await admin.execute("UPDATE message SET due_at = due_at + id % 20 * interval '1 microsecond' WHERE id < 150")
        await admin.execute("UPDATE message SET body = convert_to(repeat('x', 2 << 20), 'UTF8') WHERE id % 31 = 0")
        before = await everything(admin)
        [window] = await compacting.windows(admin, 0)
        made = await compacting.compact_one(admin, window, portion=portion, max_bytes=1 << 30)
        assert made is not None
        assert (made.messages, made.more) == (290, False)
        assert len(await waiting(admin)) == 10
        assert await everything(admin) == before
        await conserved(admin)


@pytest.mark.parametrize("portion", [1, 2, 3])
async def test_portions_end_at_the_limits(database: str, portion: int) -> None:
    async with store(database) as admin:
        await put(admin, [row(n, START_MS + n, body=b"x" * 100) for n in range(20)])
        [window] = await compacting.windows(admin, 0)
        first = await compacting.compact_one(admin, window, rows=8, portion=portion)
        second = await compacting.compact_one(admin, window, max_bytes=450, portion=portion)
        third = await compacting.compact_one(admin, window, portion=portion)
        assert first is not None and second is not None and third is not None
        assert [one.messages for one in (first, second, third)] == [8, 5, 7]
        assert [one.more for one in (first, second, third)] == [True, True, False]
        assert await compacting.compact_one(admin, window, portion=portion) is None
        await conserved(admin)


async def test_a_segment_is_bounded_by_bytes_but_takes_one(database: str) -> None:
    async with store(database) as admin:
        await put(admin, [row(n, START_MS + n, body=b"x" * (100 * n)) for n in range(1, 8)])
        [window] = await compacting.windows(admin, 0)
        taken = []
        while (one := await compacting.compact_one(admin, window, max_bytes=500)) is not None:
            taken.append((one.messages, one.more))
        # Rows that begin before the 500th byte are taken, but only as many rows are locked as fit by their mean size.
        assert taken == [(2, True), (2, True), (1, True), (1, True), (1, False)]
        assert len(await packed(admin)) == 7
        await conserved(admin)


async def test_a_partition_that_is_attached_during_a_restore_breaks_no_segment(database: str) -> None:
    """Rows of a day without a partition are routed to the default one, which rejects them after the attach."""
    async with store(database, 1) as admin, sql(database) as other, sql(database) as locker:
        first = START_MS // DAY_MS
        late = [row(1000 + n, START_MS + DAY_MS + n) for n in range(10)]
        await put(admin, [row(n, START_MS + n, body=b"x" * 10_000) for n in range(1, 200)] + late)
        await compact(admin)
        async with locker.transaction():
            await locker.execute(f"LOCK TABLE {partitions.name_of(first)} IN SHARE MODE")
            restoring = asyncio.create_task(restore.restore_one(admin, FOREVER_MS, portion_bytes=20_000))
            await blocked(other, "COPY%")
            assert await partitions.make(other, first + 1, first - 10) is partitions.PartitionResult.DONE
        with pytest.raises(asyncpg.CheckViolationError):
            await restoring
        assert [type(one) for one in await restore_all(admin)] == [Restored]
        assert len(await waiting(admin)) == 209


@pytest.mark.parametrize(
    ("event", "step", "error"),
    [
        ("INSERT ON segment", "NEW.packed := NEW.packed || '?'; RETURN NEW", "the bytes changed"),
        ("INSERT ON segment", "NEW.messages := 19; RETURN NEW", "expected 19 messages, found 20"),
        ("DELETE ON message", "RETURN CASE WHEN OLD.id > 1 THEN OLD END", "20 messages packed, but DELETE 19"),
    ],
)
async def test_a_segment_that_does_not_read_back_is_not_committed(
    database: str, event: str, step: str, error: str
) -> None:
    async with store(database) as admin:
        await put(admin, rows(20, START_MS))
        before = await everything(admin)
        await admin.execute(f"CREATE FUNCTION spoil() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN {step}; END$$")
        await admin.execute(f"CREATE TRIGGER spoil BEFORE {event} FOR EACH ROW EXECUTE FUNCTION spoil()")
        with pytest.raises((SegmentBroken, RuntimeError), match=error):
            await compact(admin)
        assert await waiting(admin) == before
        assert await catalog.list_segments(admin) == []
        assert (await conserved(admin))["compacted"] == 0


async def test_any_flipped_bit_is_found(database: str) -> None:
    """It does not block other segments: intact segments are restored, and the broken one stays unchanged, marked
    once."""
    chance = random.Random(2)
    async with store(database) as admin:
        await put(admin, rows(300, START_MS, span_ms=30 * DAY_MS))
        made = await compact(admin, rows=10)
        broken = {one.segment for one in made[::2]}
        places = {}
        for one in made[::2]:
            places[one.segment] = place = chance.randrange(one.packed_bytes * 8)
            await admin.execute(FLIP, one.segment, place)
        inside = {one.segment: one.messages for one in made}
        back = await restore_all(admin)
        assert {one.segment for one in back if isinstance(one, Broken)} == broken
        assert {one.segment for one in back if isinstance(one, Restored)} == inside.keys() - broken
        assert all(one.messages == inside[one.segment] for one in back)
        assert all("the bytes changed" in one.reason for one in back if isinstance(one, Broken))
        left = await catalog.list_segments(admin)
        assert {one.id for one in left} == broken
        assert all(one.broken and "the bytes changed" in one.broken for one in left)
        count = sum(inside[number] for number in broken)
        assert await catalog.count(admin) == (len(broken), count, len(broken), count, None)
        assert len(await waiting(admin)) == 300 - count
        await conserved(admin)
        # A restore by id retries a broken segment, which is restored once its bytes are intact again.
        one, *_ = broken
        marked = await admin.fetchval("SELECT broken_at FROM segment WHERE id = $1", one)
        assert isinstance(await restore.restore(admin, one), Broken)
        assert await admin.fetchval("SELECT broken_at FROM segment WHERE id = $1", one) == marked
        for number in broken:
            await admin.execute(FLIP, number, places[number])
            assert isinstance(await restore.restore(admin, number), Restored)
        assert len(await waiting(admin)) == 300
        await conserved(admin)


FLIP = "UPDATE segment SET packed = set_bit(packed, $2::int, 1 - get_bit(packed, $2::int)) WHERE id = $1"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("packed = ''", "the bytes changed"),
        ("digest = sha256('')", "expected the digest"),
        ("format = 7", "found 7"),
        ("messages = 9", "expected 9 messages, found 10"),
    ],
)
async def test_a_row_that_does_not_fit_its_bytes_is_broken(database: str, change: str, reason: str) -> None:
    async with store(database) as admin:
        await put(admin, rows(10, START_MS))
        await compact(admin)
        await admin.execute(f"UPDATE segment SET {change}")
        [found] = await restore_all(admin)
        assert isinstance(found, Broken)
        assert reason in found.reason
        assert await waiting(admin) == {}


async def test_messages_that_are_there_already_are_not_written_twice(database: str) -> None:
    """A partly restored dump may cause this. The segment is broken, and blocks no other."""
    async with store(database) as admin:
        await put(admin, rows(10, START_MS) + rows(10, START_MS + DAY_MS, first_id=11))
        first, second = await compact(admin, rows=10)
        await put(admin, [rows(10, START_MS, lane=1)[4]])
        back = await restore_all(admin)
        assert [(one.segment, type(one)) for one in back] == [(first.segment, Broken), (second.segment, Restored)]
        [left] = await catalog.list_segments(admin)
        assert left.broken is not None
        assert "cannot be written: duplicate key value" in left.broken
        assert len(await waiting(admin)) == 11
        assert (await catalog.count(admin)).broken_messages == 10
        await admin.execute("DELETE FROM message WHERE lane = 1 AND id = 5")
        assert isinstance(await restore.restore(admin, first.segment), Restored)
        assert len(await waiting(admin)) == 20


async def test_concurrent_compactions_pack_each_row_once(database: str) -> None:
    async with store(database, 2) as admin:
        before = rows(3_000, START_MS, span_ms=2 * DAY_MS) + rows(500, START_MS, lane=2, first_id=5_000, span_ms=5)
        await put(admin, before)
        done = await asyncio.gather(*(apart(database, lambda one: compact(one, rows=100)) for _ in range(3)))
        assert sum(one.messages for made in done for one in made) == 3_500
        assert sum(bool(made) for made in done) > 1
        assert await packed(admin) == {one.id: one for one in before}
        await conserved(admin)
