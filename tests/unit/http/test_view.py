"""Cached queries: the pause between two, and the answer while one fails."""

from __future__ import annotations

import asyncio

import pytest

from delayer.core.errors import StoreLost
from delayer.http.view import Cached


class World:
    """A clock, and a slow source to query."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.takes = 0.0
        self.fails = False
        self.looks = 0
        self.hold: asyncio.Event | None = None

    def cached(self, seconds: float) -> Cached[int]:
        return Cached(self.look, seconds, "source", clock=lambda: self.now)

    async def look(self) -> int:
        self.looks += 1
        if self.hold is not None:
            await self.hold.wait()
        self.now += self.takes
        if self.fails:
            raise StoreLost("connect: no answer")
        return self.looks


@pytest.mark.parametrize(
    ("takes", "fails", "pause"), [(0.01, False, 2.0), (1.0, False, 20.0), (0.01, True, 2.0), (10.0, True, 2.0)]
)
async def test_the_pause_before_the_next_query(takes: float, fails: bool, pause: float) -> None:
    """A slow source is queried less often. A failed query is repeated soon, even after a slow failure."""
    world = World()
    cached = world.cached(2.0)
    world.takes, world.fails = takes, fails
    await cached.get()
    world.now += pause - 0.1
    await cached.get()
    assert world.looks == 1
    world.now += 0.2
    world.fails = False
    assert (await cached.get()).fresh == 2


async def test_an_unanswered_query_is_not_fresh() -> None:
    world = World()
    cached = world.cached(2.0)
    assert (await cached.get()).fresh == 1
    world.now += 3
    world.hold = asyncio.Event()
    assert (await cached.get(patience=0.01)).fresh == 1, "a slow query may still answer"
    world.now += 6
    seen = await cached.get(patience=0.01)
    assert (seen.fresh, seen.value, seen.error) == (None, 1, "no answer for 6 s")
    world.hold.set()
    assert (await cached.get()).fresh == 2


async def test_a_query_begun_before_a_change_is_repeated() -> None:
    world = World()
    cached = world.cached(20.0)
    world.hold = asyncio.Event()
    await cached.get(patience=0.01)
    cached.forget()
    world.hold.set()
    assert (await cached.get()).fresh == 1
    assert (await cached.get()).fresh == 2
    assert (await cached.get()).fresh == 2
