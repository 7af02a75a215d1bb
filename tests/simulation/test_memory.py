"""What the simulation's check of memory sees, and when it fails."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from delayer.config.model import Settings
from tests.simulation.memory import FEW, bounds_of, is_within, sizes


@dataclass(slots=True)
class Inner:
    rows: list[int] = field(default_factory=list)


class Outer:
    def __init__(self) -> None:
        self.inner = {"a": Inner([1]), "b": Inner([1, 2, 3])}


for one in (Inner, Outer):
    one.__module__ = "delayer.test"


def test_it_finds_the_largest_collection_of_each_attribute() -> None:
    assert sizes([Outer()]) == {"Outer.inner": 2, "Inner.rows": 3}


async def test_it_looks_into_suspended_tasks() -> None:
    async def hold(_: Inner) -> None:
        await asyncio.sleep(0)
        await asyncio.Event().wait()

    async def outer() -> None:
        await hold(Inner([1, 2]))

    task = asyncio.create_task(outer())
    await asyncio.sleep(0)
    assert sizes([task]) == {"Inner.rows": 2}
    task.cancel()


def test_a_collection_without_a_bound_stays_small() -> None:
    bounds = bounds_of(Settings())
    assert is_within(bounds, "SkippedRows.ids", FEW)
    assert not is_within(bounds, "SkippedRows.ids", FEW + 1)
    assert is_within(bounds, "AckTracker._order", 5_000)
    assert not is_within(bounds, "AckTracker._order", 5_001)
