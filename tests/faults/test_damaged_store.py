"""An unreadable page or file of the store costs the segments that lie on it, and no other segment."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import pytest

from delayer.core.segment import Broken, Restored
from delayer.core.units import DAY_MS
from delayer.store import waiting as read_model
from delayer.store.admin import actions
from delayer.store.admin.detail import FoundIn
from delayer.store.rows import partitions
from delayer.store.segments import catalog, restore
from tests.support.fakes import NOW
from tests.support.postgres import Postgres
from tests.support.rows import compact, put, row, rows, waiting
from tests.support.store import sql

PAGE = 8192
EMPTY, NOISE = bytes(PAGE), b"\xff" * PAGE
LANE = 9
ROWS = 900
OF_A_SEGMENT = 30
BYTES_OF = "(SELECT reltoastrelid FROM pg_class WHERE oid = 'segment'::regclass)"
TABLE = "'segment'"
FIRST_DAY = NOW // DAY_MS + 10
KEY_OF_A_DAY = (
    f"(SELECT indexrelid FROM pg_index WHERE indrelid = '{partitions.name_of(FIRST_DAY)}'::regclass AND indisprimary)"
)


class Damaged(NamedTuple):
    """A store, and the segments that lie on its damaged page."""

    url: str
    lost: list[int]


async def fill(url: str) -> None:
    """Segments of bytes that do not compress, some of them on each page of their table."""
    chance = random.Random(1)
    async with sql(url) as admin:
        start = NOW + 10 * DAY_MS
        await admin.execute("ALTER TABLE segment SET (fillfactor = 10)")
        await put(admin, [row(n + 1, start + n * 1000, 1, chance.randbytes(300)) for n in range(ROWS)])
        await compact(admin, rows=OF_A_SEGMENT)
        await admin.execute(f"INSERT INTO lane VALUES ({LANE}, 0, 'gone') ON CONFLICT DO NOTHING")


async def fill_days(url: str) -> None:
    """Two segments of two days, and a row that keeps a place in the index of the first day's partition."""
    async with sql(url) as admin:
        for day in (FIRST_DAY, FIRST_DAY + 1):
            await partitions.make(admin, day, FIRST_DAY - 10)
            await put(admin, rows(50, day * DAY_MS, first_id=day * 100, span_ms=DAY_MS - 1))
        await compact(admin, rows=50)
        await put(admin, [row(1, FIRST_DAY * DAY_MS)])
        await admin.execute(f"INSERT INTO lane VALUES ({LANE}, 0, 'gone') ON CONFLICT DO NOTHING")


async def place(url: str, relation: str, page: int) -> str:
    """The file of ``relation`` after a checkpoint; it must have that page."""
    async with sql(url) as admin:
        await admin.execute("CHECKPOINT")
        path, pages = await admin.fetchrow(
            f"SELECT pg_relation_filepath({relation}), pg_relation_size({relation}) / {PAGE}"
        )
        assert pages > page
        return str(path)


async def on_page(url: str, page: int) -> list[int]:
    async with sql(url) as admin:
        found = await admin.fetch(
            "SELECT id FROM segment WHERE ctid >= $1 AND ctid < $2 ORDER BY id", (page, 0), (page + 1, 0)
        )
        return [id for (id,) in found]


@pytest.fixture(scope="module")
def damaged() -> Iterator[dict[str, Damaged]]:
    """Stores of one server. Each has lost a page of the segments' bytes, or their whole file, or an index page of a
    partition that receives the restored rows."""
    with Postgres() as server:
        template = server.add_store()
        asyncio.run(fill(server.url(template)))
        days = server.add_store()
        asyncio.run(fill_days(server.url(days)))
        stores, places = {}, []
        for name, of, relation, page, content in [
            ("bytes", template, BYTES_OF, 2, EMPTY),
            ("cancel", template, BYTES_OF, 2, EMPTY),
            ("file", template, BYTES_OF, 0, None),
            ("partition", days, KEY_OF_A_DAY, 1, EMPTY),
        ]:
            url = server.url(server.add_database(template=of))
            stores[name] = Damaged(url, asyncio.run(on_page(url, page)))
            places.append((asyncio.run(place(url, relation, page)), page, content))
        server.stop()
        for path, page, content in places:
            if content is None:
                (server.data / path).unlink()
                continue
            with (server.data / path).open("r+b") as file:
                file.seek(page * PAGE)
                file.write(content)
        server.start()
        yield stores


async def test_a_damaged_page_of_segment_bytes(damaged: dict[str, Damaged]) -> None:
    """Its pieces belong to a segment, or to two that are neighbours."""
    found = []
    async with sql(damaged["bytes"].url) as admin:
        while one := await restore.restore_one(admin, catalog.FOREVER_MS):
            found.append(one)
        broken = [one for one in found if isinstance(one, Broken)]
        assert 1 <= len(broken) <= 2
        assert "the store cannot read its bytes" in broken[0].reason
        assert len(found) == ROWS // OF_A_SEGMENT
        counted = await catalog.count(admin)
        assert (counted.broken, counted.broken_messages) == (len(broken), len(broken) * OF_A_SEGMENT)
        assert len(await waiting(admin)) == ROWS - counted.broken_messages


async def test_cancel_and_reschedule_report_messages_on_a_damaged_page(damaged: dict[str, Damaged]) -> None:
    """Messages of other segments are found. Messages of the damaged segments are reported as unreadable."""
    async with sql(damaged["cancel"].url) as admin:
        entries = {one.id: await read_model.unpack(admin, one.id) for one in await catalog.list_segments(admin)}
        broken = [number for number, found in entries.items() if found is None]
        assert 1 <= len(broken) <= 2
        assert {len(found) for found in entries.values() if found is not None} == {OF_A_SEGMENT}
        inside = await admin.fetchval("SELECT ids[1] FROM segment WHERE id = $1", broken[0])
        wanted = [found[0].place.id for found in entries.values() if found is not None][-2:]  # of two segments
        for ask in (actions.cancel, partial(actions.reschedule, when=actions.NewDue(by_ms=1))):
            found = await ask(admin, [wanted.pop(), inside, ROWS * 9])
            assert list(found.values()) == [FoundIn.SEGMENT, FoundIn.UNREADABLE, FoundIn.NOWHERE]


async def test_a_missing_file_of_segment_bytes_does_not_block_later_segments(damaged: dict[str, Damaged]) -> None:
    """Each segment is tried once, and marked as broken: none blocks a later segment."""
    async with sql(damaged["file"].url) as admin:
        for _ in range(ROWS // OF_A_SEGMENT):
            found = await restore.restore_one(admin, catalog.FOREVER_MS)
            assert isinstance(found, Broken)
            assert "the store cannot read its bytes: could not open file" in found.reason
        assert await restore.restore_one(admin, catalog.FOREVER_MS) is None
        assert (await catalog.count(admin)).broken == ROWS // OF_A_SEGMENT


async def test_a_damaged_partition(damaged: dict[str, Damaged]) -> None:
    """A segment that cannot be written there is marked, and blocks none of other days."""
    async with sql(damaged["partition"].url) as admin:
        spoiled, sound = [one.id for one in await catalog.list_segments(admin)]
        broken = await restore.restore_one(admin, catalog.FOREVER_MS)
        assert isinstance(broken, Broken)
        assert broken.segment == spoiled
        assert "its messages cannot be written: index" in broken.reason
        found = await restore.restore_one(admin, catalog.FOREVER_MS)
        assert isinstance(found, Restored)
        assert found.segment == sound
        assert await restore.restore_one(admin, catalog.FOREVER_MS) is None
        assert [one.id for one in await catalog.list_segments(admin) if one.broken] == [spoiled]
        assert await admin.fetchval("SELECT messages FROM segment") == 50
