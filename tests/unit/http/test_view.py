"""Looks that are shared and kept: how often there is one, and what is said while there is none."""

from __future__ import annotations

import asyncio

import pytest

from delayer.core.errors import StoreLost
from delayer.http import view
from delayer.http.view import Cached


class World:
    """A clock, and something to look at that takes its time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.takes = 0.0
        self.fails = False
        self.looks = 0
        self.hold: asyncio.Event | None = None
        monkeypatch.setattr(view, "monotonic", lambda: self.now)

    async def look(self) -> int:
        self.looks += 1
        if self.hold is not None:
            await self.hold.wait()
        self.now += self.takes
        if self.fails:
            raise StoreLost("connect: no answer")
        return self.looks


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.mark.parametrize(
    ("takes", "fails", "pause"), [(0.01, False, 2.0), (1.0, False, 20.0), (0.01, True, 2.0), (10.0, True, 2.0)]
)
async def test_the_next_look(world: World, takes: float, fails: bool, pause: float) -> None:
    """A slow one is spared; one that failed is repeated soon, however long it took to fail."""
    cached = Cached(world.look, 2.0, "store")
    world.takes, world.fails = takes, fails
    await cached.get()
    world.now += pause - 0.1
    await cached.get()
    assert world.looks == 1
    world.now += 0.2
    world.fails = False
    assert (await cached.get()).fresh == 2


async def test_an_unanswered_look_is_not_fresh(world: World) -> None:
    cached = Cached(world.look, 2.0, "store", late=5.0)
    assert (await cached.get()).fresh == 1
    world.now += 3
    world.hold = asyncio.Event()
    assert (await cached.get(patience=0.01)).fresh == 1, "it may be slow"
    world.now += 6
    seen = await cached.get(patience=0.01)
    assert (seen.fresh, seen.value, seen.error) == (None, 1, "no answer for 6 s")
    world.hold.set()
    assert (await cached.get()).fresh == 2


async def test_a_look_from_before_a_change_is_repeated(world: World) -> None:
    cached = Cached(world.look, 20.0, "queues")
    world.hold = asyncio.Event()
    await cached.get(patience=0.01)
    cached.forget()
    world.hold.set()
    assert (await cached.get()).fresh == 1
    assert (await cached.get()).fresh == 2
    assert (await cached.get()).fresh == 2
