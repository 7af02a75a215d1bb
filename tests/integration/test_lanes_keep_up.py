"""What comes little by little is parked into one lane; it must not wait behind a lane that gets nowhere."""

from __future__ import annotations

import pytest

from tests.acceptance.world import wait_for
from tests.conformance.store_contract import parcel
from tests.integration.lanes_shared import migrated, running
from tests.integration.test_store_lane import sql

DUE_MS = 1_000


async def test_a_claim_that_waits_for_somebodys_lock_holds_up_only_what_was_parked_before(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayer.release.loop.BEHIND", 0.3)
    await migrated(database)
    async with running(database) as daemon, sql(database) as somebody:
        await daemon.lanes.park([parcel(daemon.now_upper_ms() + DUE_MS, b"locked")], [])
        async with somebody.transaction():
            assert len(await somebody.fetch("SELECT id FROM message FOR UPDATE")) == 1
            await wait_for(lambda: any(release.behind for _, release in daemon.lanes._releases.values()))
            for body in (b"one", b"two", b"three"):
                await daemon.lanes.park([parcel(daemon.now_upper_ms(), body)], [])
            await wait_for(lambda: len(daemon.publisher.published) == 3, timeout=10)
            assert {one.body for _, one in daemon.publisher.published} == {b"one", b"two", b"three"}
        await wait_for(lambda: len(daemon.publisher.published) == 4)
