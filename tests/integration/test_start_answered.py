"""What a command has loaded when it was answered: what it needs for that is no more than what it needs to ask."""

from __future__ import annotations

from pathlib import Path

from delayer.store.upgrades import upgrade
from tests.conformance.store_contract import owned, parcel
from tests.integration.test_store_lane import opened
from tests.unit.cli.test_start import STATUS, STORE, loaded


async def test_commands_that_are_answered_load_only_what_they_need(vhost: str, database: str, tmp_path: Path) -> None:
    await upgrade(database)
    async with opened(database) as place, owned(place) as [lane]:
        due_ms = place.now_upper_ms() + 86_400_000
        await place.park(lane, [parcel(due_ms, b"one"), parcel(due_ms, b"two")], [])
    there = ("--broker-url", vhost, "--store-url", database)
    for verb in (("list",), ("show", f"1@{due_ms}"), ("reschedule", f"2@{due_ms}", "--by", "1h"), ("cancel", "2")):
        modules = loaded(tmp_path, *there, *verb, expect=0)
        assert "asyncpg" in modules
        assert not modules & STORE, verb
    modules = loaded(tmp_path, *there, "status", expect=0)
    assert "delayer.broker.brief" in modules
    assert not modules & STATUS
