"""How long a daemon that could do without a store waits for it, before it says that there is none."""

from __future__ import annotations

import asyncio

import pytest

from delayer.core.errors import StoreLost
from tests.support.fakes import ScriptedStore, until
from tests.unit.release.lanes_scene import quick, scene

__all__ = ["quick"]
FOR_EVER = 3600.0


async def test_a_lane_is_waited_for() -> None:
    async with scene() as it:
        await asyncio.wait_for(it.lanes.wait_known(FOR_EVER), 5)
        assert it.lanes.usable


async def test_no_store_that_is_out_of_reach_is_waited_for_and_one_that_is_back_is() -> None:
    away = True

    async def connect() -> ScriptedStore:
        if away:
            raise StoreLost("refused")
        return ScriptedStore()

    async with scene(connect=connect) as it:
        await asyncio.wait_for(it.lanes.wait_known(FOR_EVER), 5)
        assert not it.lanes.usable
        away = False
        await asyncio.wait_for(it.lanes.ready.wait(), 5)
        assert not it.lanes.out_of_reach.is_set()


async def test_one_that_says_nothing_is_waited_for_so_long() -> None:
    silence = asyncio.Event()

    async def connect() -> ScriptedStore:
        await silence.wait()
        return ScriptedStore()

    async with scene(connect=connect) as it:
        await asyncio.wait_for(it.lanes.wait_known(0.01), 5)
        assert not it.lanes.usable
        silence.set()


async def test_lanes_that_were_let_go_of_without_a_broker_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken again with the first look that sees the broker, and keys may come before it."""
    monkeypatch.setattr("delayer.release.lane_manager.AWAY_SECONDS", 0.01)
    async with scene() as it:
        await it.lanes.ready.wait()
        it.reaching = False
        await until(lambda: not it.lanes.usable)
        waiting = asyncio.create_task(it.lanes.wait_known(FOR_EVER))
        await asyncio.sleep(0)
        assert not waiting.done()
        it.reaching = True
        await asyncio.wait_for(waiting, 5)
        assert it.lanes.usable
