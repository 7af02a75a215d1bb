"""What the simulation's check of memory sees, and when it fails."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import delayer
from delayer.config.model import Settings
from tests.simulation.memory import FEW, IN_FLIGHT, bounds_of, is_within, sizes

CLASSES = [
    node
    for path in Path(delayer.__file__).parent.rglob("*.py")
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.ClassDef)
]


@dataclass(slots=True)
class Inner:
    rows: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Derived(Inner):
    more: set[int] = field(default_factory=set)


class Outer:
    def __init__(self) -> None:
        self.inner = {"a": Inner([1]), "b": Inner([1, 2, 3])}


for one in (Inner, Derived, Outer):
    one.__module__ = "delayer.test"


def test_it_finds_the_largest_collection_of_each_attribute() -> None:
    assert sizes([Outer()]) == {"Outer.inner": 2, "Inner.rows": 3}


def test_it_finds_the_slots_of_all_bases() -> None:
    assert sizes([Derived([1, 2], {3})]) == {"Derived.rows": 2, "Derived.more": 1}


def attributes(of: str) -> Iterator[str]:
    """What the classes of this name, and their bases, assign to themselves."""
    for node in CLASSES:
        if node.name == of:
            yield from (
                one.target.id
                for one in node.body
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            )
            yield from (
                one.attr
                for one in ast.walk(node)
                if isinstance(one, ast.Attribute)
                and isinstance(one.ctx, ast.Store)
                and isinstance(one.value, ast.Name)
                and one.value.id == "self"
            )
            for base in node.bases:
                yield from attributes(ast.unparse(base).partition("[")[0])


@pytest.mark.parametrize("name", sorted({*IN_FLIGHT, *bounds_of(Settings())}))
def test_each_named_class_and_attribute_exists(name: str) -> None:
    of, _, attribute = name.partition(".")
    assert of in {node.name for node in CLASSES}
    assert not attribute or attribute in attributes(of)


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
