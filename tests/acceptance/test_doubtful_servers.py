"""A daemon's log about a database that may lose commits, and about clocks that differ."""

from __future__ import annotations

from pathlib import Path

from tests.acceptance.own_vhost import OwnVhost
from tests.support.daemon import DaemonProcess
from tests.support.odd import Clock, program
from tests.support.servers import Postgres


async def test_a_database_without_fsync_is_logged(place: OwnVhost) -> None:
    with Postgres(settings={"fsync": "off", "full_page_writes": "off"}) as postgres:
        async with DaemonProcess(place.environ("store", postgres.url(postgres.add_store()))) as daemon:
            told = await daemon.event("store not durable")
            assert told["off"] == ["fsync", "full_page_writes"]
            assert "ALTER SYSTEM SET fsync = on" in told["next_step"]
            await daemon.ready()


async def test_a_wrong_clock_of_the_host_is_logged(place: OwnVhost, store: str, tmp_path: Path) -> None:
    clock = Clock(tmp_path / "clock")
    clock.set(3_600_000)
    async with DaemonProcess(place.environ("store", store), program=program(clock=clock.path)) as daemon:
        told = await daemon.event("clocks differ")
        assert told["reason"] == "the clock of this machine is 60 min ahead of the database's"
        await daemon.ready()
    async with DaemonProcess(place.environ("store", store)) as daemon:
        await daemon.ready()
        assert not [event for event in daemon.events if event["event"] in ("clocks differ", "store not durable")]
