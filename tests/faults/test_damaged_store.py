"""A page of the store that cannot be read any more costs the segment that lies on it, and nobody else."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from delayer.core.segment import Broken, Restored
from delayer.store import segments, upgrades
from delayer.store.partitions import DAY_MS
from delayer.store.segments import Fence
from tests.integration.test_store_lane import sql
from tests.rig.fakes import NOW
from tests.rig.postgres import Postgres
from tests.rig.rows import compact, put, row

PAGE = 8192
LANE = 9


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    """A server of its own, to be damaged."""
    with Postgres() as server:
        yield server


async def filled(url: str) -> str:
    """Three segments of bytes that do not compress; returns the file that their bytes lie in."""
    await upgrades.upgrade(url)
    chance = random.Random(1)
    async with sql(url) as admin:
        start = NOW + 10 * DAY_MS
        await put(admin, [row(n + 1, start + n * 1000, 1, chance.randbytes(300)) for n in range(900)])
        await compact(admin, rows=300)
        await admin.execute(f"INSERT INTO lane VALUES ({LANE}, 0, 'gone')")
        await admin.execute("CHECKPOINT")
        path: str = await admin.fetchval(
            "SELECT pg_relation_filepath(reltoastrelid) FROM pg_class WHERE relname = 'segment'"
        )
    return path


async def restored(url: str) -> list[Restored | Broken | None]:
    async with sql(url) as admin:
        return [await segments.restore_one(admin, Fence(LANE, 0), segments.FOREVER_MS) for _ in range(4)]


def test_a_damaged_page_costs_one_segment(postgres: Postgres) -> None:
    url = postgres.url(postgres.add_database())
    path = asyncio.run(filled(url))
    postgres.stop()
    with (postgres.data / path).open("r+b") as file:
        file.seek(2 * PAGE)
        file.write(bytes(PAGE))
    postgres.start()
    broken, *others, last = asyncio.run(restored(url))
    assert isinstance(broken, Broken)
    assert "the store cannot read its bytes" in broken.reason
    assert [one.messages for one in others if isinstance(one, Restored)] == [300, 300]
    assert last is None

    async def left() -> tuple[int, int]:
        async with sql(url) as admin:
            counted = await segments.count(admin)
            return counted.broken, counted.broken_messages

    assert asyncio.run(left()) == (1, 300)
