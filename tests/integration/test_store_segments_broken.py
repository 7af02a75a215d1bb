"""Segments when something goes wrong on the way: bytes that changed, and others at work on the same."""

from __future__ import annotations

import asyncio
import random

import asyncpg
import pytest

from delayer.core.segment import Broken, Restored
from delayer.store import statements
from delayer.store.rows.partitions import DAY_MS
from delayer.store.segments import catalog
from delayer.store.segments import compact as compacting
from delayer.store.segments.codec import Packed, SegmentBroken
from tests.integration.segments_store import START_MS, apart, restore_all, store
from tests.support.rows import compact, conserved, everything, packed, put, rows, waiting


async def test_a_segment_that_does_not_read_back_is_not_committed(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = compacting._insert

    async def worse(connection: asyncpg.Connection, lane: int, packed: Packed) -> int:
        return await good(connection, lane, packed._replace(packed=packed.packed[:-1] + b"?"))

    async with store(database) as admin:
        await put(admin, rows(20, START_MS))
        before = await everything(admin)
        with monkeypatch.context() as patch:
            patch.setattr(compacting, "_insert", worse)
            with pytest.raises(SegmentBroken, match="the bytes changed"):
                await compact(admin)
            patch.setattr(compacting, "_insert", lambda c, n, p: good(c, n, p._replace(messages=19)))
            with pytest.raises(SegmentBroken, match="expected 20 messages, found 19"):
                await compact(admin)
        with monkeypatch.context() as patch:
            patch.setattr(statements, "DELETE_RUN", f"{statements.DELETE_RUN} AND id > 1")
            with pytest.raises(RuntimeError, match="20 messages packed, but DELETE 19"):
                await compact(admin)
        assert await waiting(admin) == before
        assert await catalog.listed(admin) == []
        assert (await conserved(admin))["compacted"] == 0


async def test_a_flipped_bit_is_found_wherever_it_is(database: str) -> None:
    """And it blocks nobody: what is whole comes back, the broken one stays as it is, marked once."""
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
        assert all("checksum" in one.reason for one in back if isinstance(one, Broken))
        left = await catalog.listed(admin)
        assert {one.id for one in left} == broken
        assert all(one.broken and "checksum" in one.broken for one in left)
        count = sum(inside[number] for number in broken)
        assert await catalog.count(admin) == (len(broken), count, len(broken), count, None)
        assert len(await waiting(admin)) == 300 - count
        await conserved(admin)
        # Somebody who asks for one of them by its id tries it again; and it comes back when it is whole again.
        one, *_ = broken
        marked = await admin.fetchval("SELECT broken_at FROM segment WHERE id = $1", one)
        assert isinstance(await catalog.restore(admin, one), Broken)
        assert await admin.fetchval("SELECT broken_at FROM segment WHERE id = $1", one) == marked
        for number in broken:
            await admin.execute(FLIP, number, places[number])
            assert isinstance(await catalog.restore(admin, number), Restored)
        assert len(await waiting(admin)) == 300
        await conserved(admin)


FLIP = "UPDATE segment SET packed = set_bit(packed, $2::int, 1 - get_bit(packed, $2::int)) WHERE id = $1"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("packed = ''", "found 0 bytes"),
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
    """By a dump that was put back in part, for one. The segment is broken, and in nobody's way."""
    async with store(database) as admin:
        await put(admin, rows(10, START_MS) + rows(10, START_MS + DAY_MS, first_id=11))
        first, second = await compact(admin, rows=10)
        await put(admin, [rows(10, START_MS, lane=1)[4]])
        back = await restore_all(admin)
        assert [(one.segment, type(one)) for one in back] == [(first.segment, Broken), (second.segment, Restored)]
        [left] = await catalog.listed(admin)
        assert left.broken is not None
        assert "cannot be written: UniqueViolationError" in left.broken
        assert len(await waiting(admin)) == 11
        assert (await catalog.count(admin)).broken_messages == 10
        await admin.execute("DELETE FROM message WHERE lane = 1 AND id = 5")
        assert isinstance(await catalog.restore(admin, first.segment), Restored)
        assert len(await waiting(admin)) == 20


async def test_two_who_compact_the_same(database: str) -> None:
    async with store(database, 2) as admin:
        before = rows(3_000, START_MS, span_ms=2 * DAY_MS) + rows(500, START_MS, lane=2, first_id=5_000, span_ms=5)
        await put(admin, before)
        done = await asyncio.gather(*(apart(database, lambda one: compact(one, rows=100)) for _ in range(3)))
        assert sum(one.messages for made in done for one in made) == 3_500
        assert sum(bool(made) for made in done) > 1
        assert await packed(admin) == {one.id: one for one in before}
        await conserved(admin)
