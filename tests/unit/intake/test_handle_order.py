"""Keys keep the order of arrival: within a batch by steps, between batches by turns."""

from __future__ import annotations

import asyncio

import pytest

from delayer.amqp.edits import Endpoints
from delayer.core.cascade import Cascade
from delayer.core.errors import StoreLost
from delayer.core.message import Delivery, Target
from delayer.core.plan import Cancel, Park, Plan
from delayer.intake.handle import Classified, Turns, batch_plan, wait

NAMES = Endpoints(Cascade(), b"delays.due", b"delays.refused", 131_000)
TARGET = Target(b"out", b"k")


def sorted_plan(tag: int, plan: Plan) -> Classified:
    return Classified(Delivery(tag, False, b"in", b"k", b"\0\0", b""), None, plan)


@pytest.mark.parametrize(
    ("plans", "steps"),
    [
        ([], []),
        ([Park(1, TARGET)], [([1], [])]),
        ([Cancel(b"a"), Park(1, TARGET, b"a")], [([2], [b"a"])]),
        ([Park(1, TARGET, b"a"), Cancel(b"b")], [([1], [b"b"])]),
        ([Park(1, TARGET, b"a"), Cancel(b"a")], [([1], []), ([], [b"a"])]),
        ([Park(1, TARGET, b"a"), Cancel(b"a"), Park(2, TARGET, b"a")], [([1], []), ([3], [b"a"])]),
    ],
)
def test_a_cancel_acts_after_what_it_follows(plans: list[Plan], steps: list[tuple[list[int], list[bytes]]]) -> None:
    work = batch_plan([sorted_plan(tag, plan) for tag, plan in enumerate(plans, 1)], NAMES, lambda: b"id")
    parked = [[tag for tag, plan in enumerate(plans, 1) if isinstance(plan, Park)] for _ in work.steps]
    found = []
    for step in work.steps:
        tags = [delivery.tag for delivery in step.deliveries]
        found.append(([tag for tag in tags if parked and tag in parked[0]], step.cancels))
    assert found == steps
    assert [delivery.tag for step in work.steps for delivery in step.deliveries] == list(range(1, len(plans) + 1))


async def test_turns_are_taken_in_the_order_of_asking() -> None:
    turns, order, go = Turns(), [], asyncio.Event()

    async def keyed(name: str, first: bool) -> None:
        async with turns.turn() as before:
            if first:
                await go.wait()
            await wait(before)
            order.append(name)

    tasks = [asyncio.create_task(keyed(name, name == "a")) for name in "abc"]
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "c"]


async def test_a_failed_turn_fails_those_that_wait_for_it_and_no_later_one() -> None:
    turns, go = Turns(), asyncio.Event()

    async def failing() -> None:
        async with turns.turn():
            await go.wait()
            raise StoreLost("gone")

    async def waiting() -> None:
        async with turns.turn() as before:
            await wait(before)

    tasks = [asyncio.create_task(failing()), asyncio.create_task(waiting()), asyncio.create_task(waiting())]
    await asyncio.sleep(0)
    go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [StoreLost] * 3
    await waiting()
