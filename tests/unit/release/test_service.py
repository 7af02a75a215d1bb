"""The release of a process: one loop for each lane that the store yields, over a broker and a store in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from delayer.core.counters import Counters
from delayer.core.hold import HoldKind
from delayer.core.message import Target
from delayer.release.loop import LaneRelease, ReleaseService
from delayer.release.ports import Lane
from tests.support.fakes import Heartbeat, HostLive, ScriptedLane, ScriptedLive, ScriptedPublisher, host_ms, until
from tests.support.memory_broker import MemoryBroker, MemoryLink, MemoryPublisher
from tests.support.memory_store import MemoryBacklog, MemoryStore
from tests.support.store import parcel


class Process:
    """A daemon's release, next to its part of the store."""

    def __init__(self, store: MemoryStore, broker: MemoryBroker) -> None:
        self.link = MemoryLink(broker)
        self.backlog = MemoryBacklog(store, poll_seconds=0.005)
        self.stopping = asyncio.Event()
        service = ReleaseService(self.backlog, self._release)
        self.tasks = [asyncio.create_task(part.run(self.stopping)) for part in (self.backlog, service)]

    def _release(self, lane: Lane) -> LaneRelease:
        return LaneRelease(lane, MemoryPublisher(self.link), HostLive(), heartbeat=Heartbeat(), counters=Counters())

    async def stop(self) -> None:
        self.stopping.set()
        await asyncio.gather(*self.tasks)

    async def die(self) -> None:
        """As with SIGKILL: none of it is left running, and the servers end its sessions."""
        for task in self.tasks:
            task.cancel()
        self.link.cut()
        self.backlog.die()
        await asyncio.wait(self.tasks)


@pytest.mark.parametrize("death", [False, True])
async def test_two_processes_release_each_message_and_none_early(death: bool) -> None:
    """One of them may die; the other then releases from all lanes, and only messages in flight are delivered twice."""
    store, broker = MemoryStore(host_ms), MemoryBroker()
    broker.declare("delayer.out")
    arrived: list[tuple[int, bytes]] = []
    broker.queues["delayer.out"].watcher = lambda one: arrived.append((host_ms(), one.body))
    one, other = Process(store, broker), Process(store, broker)
    await until(lambda: len(store.live) == 2 and one.backlog.usable and other.backlog.usable)
    sent = [parcel(host_ms() + 3 * n, b"%d" % n, target=Target(b"", b"delayer.out")) for n in range(100)]
    for n in range(0, 100, 5):
        await (one if n % 2 else other).backlog.apply(sent[n : n + 5])
    if death:
        await until(lambda: len(arrived) >= 20)
        await one.die()
    await until(lambda: {body for _, body in arrived} == {message.body for message in sent})
    await other.stop()
    if not death:
        await one.stop()
        assert len(arrived) == len(sent)
    dues = {message.body: message.due_ms for message in sent}
    assert [body for at_ms, body in arrived if at_ms < dues[body]] == []
    assert store.conserved() == {"parked": 100, "released": 100}


async def test_a_message_that_no_queue_takes_is_held() -> None:
    store, broker = MemoryStore(host_ms, lanes=1), MemoryBroker()
    one = Process(store, broker)
    await until(lambda: one.backlog.usable)
    await one.backlog.apply([parcel(host_ms(), target=Target(b"", b"gone"))])
    await until(lambda: store.counters[1, "held"] == 1)
    await one.stop()
    [message] = store.messages.values()
    assert message.hold is not None and message.hold.kind is HoldKind.RETURNED


class Yields:
    """A store that yields these lanes."""

    def __init__(self, *lanes: ScriptedLane) -> None:
        self._lanes = lanes
        self.ended = asyncio.Event()

    async def lanes(self) -> AsyncIterator[Lane]:
        for lane in self._lanes:
            yield lane
        await self.ended.wait()


def scripted(lane: Lane) -> LaneRelease:
    return LaneRelease(lane, ScriptedPublisher(), ScriptedLive(), heartbeat=Heartbeat(), counters=Counters())


async def test_a_lost_lane_ends_only_its_loop_and_the_end_of_the_store_ends_all() -> None:
    first, second = ScriptedLane(1), ScriptedLane(2)
    store, stopping = Yields(first, second), asyncio.Event()
    task = asyncio.create_task(ReleaseService(store, scripted).run(stopping))
    await asyncio.gather(first.sleeping.wait(), second.sleeping.wait())
    first.leave()
    await first.closed.wait()
    store.ended.set()
    stopping.set()
    second.note_parked(0)
    await task
    assert second.closed.is_set()


async def test_a_bug_in_one_loop_is_raised_and_closes_every_lane() -> None:
    first, second = ScriptedLane(1), ScriptedLane(2, claims=[ZeroDivisionError()])
    with pytest.raises(ZeroDivisionError):
        await ReleaseService(Yields(first, second), scripted).run(asyncio.Event())
    assert first.closed.is_set() and second.closed.is_set()
