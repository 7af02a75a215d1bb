"""Several jobs at once over one store: each message is a row or in one segment, whoever was quicker."""

from __future__ import annotations

import asyncio
import re

import pytest
from pyspark.sql import SparkSession

from delayer.audit import compact, restore
from delayer.store.quiet import quiet_lane
from delayer.store.segments import Fence
from tests.audit.backlog import everything, lawful, segments_of
from tests.audit.compacting import COUNT, FEW, ROWS, WEEK_MS, bring_back, filled, pack
from tests.conformance.store_contract import owned, release_all
from tests.integration.test_store_lane import sql

pytestmark = pytest.mark.deadline(300)


async def test_two_jobs_at_once_share_the_rows(spark: SparkSession, database: str) -> None:
    async with filled(database):
        before = await everything(database)
        one, two = await asyncio.gather(pack(spark, database), pack(spark, database))
        assert not one.lost and not two.lost
        assert one.total("messages") + two.total("messages") == COUNT
        assert await everything(database) == before
        await lawful(database)
        back = await asyncio.gather(bring_back(spark, database), bring_back(spark, database))
        assert sum(one.messages for one in back) == COUNT
        assert not any(one.lost for one in back)
        assert await everything(database) == before
        await lawful(database)


async def test_packing_and_restoring_at_once(spark: SparkSession, database: str) -> None:
    """A restorer undoes what a packer does, as with a limit below restore_ahead; nothing is lost on the way."""
    async with filled(database):
        before = await everything(database)
        packing = asyncio.create_task(pack(spark, database, rows=200))
        while not packing.done():
            await bring_back(spark, database)
        await packing
        assert await everything(database) == before
        await lawful(database)


async def test_a_lane_that_changed_its_owner_takes_nothing_more(database: str) -> None:
    """The driver of a restore is gone and somebody owns its lane: its executors are refused."""
    async with filled(database, FEW) as store, sql(database) as admin:
        before = await everything(database)
        planned = await compact.plan(database, WEEK_MS, ROWS)
        for window in planned.windows:
            await compact.pack_window(admin, window, ROWS)
        [first, *_] = await segments_of(database)
        async with quiet_lane(database, "test") as lane:
            fence = Fence(lane.number, lane.epoch)
        async with quiet_lane(database, "another") as lane:
            assert lane.number == fence.number, "the lane that was given up is taken again"
            found = await restore.restore_segment(admin, fence, first["id"])
        assert found.lost is not None
        assert re.search("owner", found.lost)
        assert await everything(database) == before
        await lawful(database)
        async with owned(store) as [lane]:
            assert await release_all(lane) == []
