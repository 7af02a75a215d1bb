"""Failures: the one that is raised, and that nothing of theirs stays in memory, collector or not."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator, Sequence

import pytest

from delayer.broker.retry import LOSSES, Retry, raise_first, take_failures
from delayer.core.errors import BrokerLost, StoreLost
from delayer.core.message import Delivery
from delayer.intake.consume import AckTracker, Intake, QueueConsumer
from tests.support.fakes import Heartbeat, ScriptedConsumer, ScriptedSubscription, delivery


@pytest.mark.parametrize(
    ("results", "raised"),
    [
        ([None, StoreLost("one"), BrokerLost("two")], StoreLost),
        ([StoreLost("one"), None, KeyError("a bug")], KeyError),
        ([KeyError("a bug"), BrokerLost("one")], KeyError),
    ],
)
def test_a_bug_before_a_loss_else_the_first(
    results: Sequence[BaseException | None], raised: type[BaseException]
) -> None:
    with pytest.raises(raised):
        raise_first(results)


def test_nothing_to_raise() -> None:
    raise_first([])
    raise_first([None, None])
    raise_first([StoreLost("one"), BrokerLost("two")], unless=LOSSES)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Traced:
    """What a frame holds on to."""


@pytest.mark.usefixtures("no_collector")
async def test_tasks_that_failed_are_let_go() -> None:
    traced: list[weakref.ref[Traced]] = []

    async def fail() -> None:
        held = Traced()
        traced.append(weakref.ref(held))
        raise StoreLost("the disk is full")

    async def reap() -> None:
        done, _ = await asyncio.wait({asyncio.create_task(fail())})
        raise_first(take_failures(done))

    with pytest.raises(StoreLost):
        await reap()
    assert [reference() for reference in traced] == [None]


@pytest.mark.usefixtures("no_collector")
async def test_a_failed_batch_is_let_go() -> None:
    """Before the next one is read: a full disk fails one batch after the other, for hours."""
    stopping = asyncio.Event()
    traced: list[weakref.ref[Traced]] = []
    alive: list[int] = []

    async def carry(_batch: Sequence[Delivery], _settler: AckTracker) -> None:
        alive.append(sum(reference() is not None for reference in traced))
        held = Traced()
        traced.append(weakref.ref(held))
        if len(traced) == 2:
            stopping.set()
        raise StoreLost("the disk is full")

    async def prepare() -> None:
        pass

    subscriptions = [ScriptedSubscription([[delivery(1)]]) for _ in range(2)]
    session = QueueConsumer(
        Intake("delays", 10, gather=0.0),
        ScriptedConsumer(*subscriptions),
        carry,
        prepare=prepare,
        heartbeat=Heartbeat(),
    )
    await session.run(stopping)
    assert alive == [0, 0]


@pytest.mark.usefixtures("no_collector")
async def test_a_pause_frees_what_stands_in_rings() -> None:
    ring = Traced()
    ring.__dict__["itself"] = ring
    reference = weakref.ref(ring)
    del ring
    assert reference() is not None
    stopping = asyncio.Event()
    stopping.set()
    await Retry(stopping, lambda: None).pause()
    assert reference() is None
