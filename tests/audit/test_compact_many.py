"""Several jobs at once over one store: each message is a row or in one segment, whoever was quicker."""

from __future__ import annotations

import asyncio

import pytest
from pyspark.sql import SparkSession

from tests.audit.backlog import everything, lawful
from tests.audit.compacting import COUNT, bring_back, filled, pack

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
