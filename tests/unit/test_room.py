"""Bytes in hand: shared, given back, and never waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from delayer.core.message import CONFIRMED, Due, Outcome, Outgoing, Parcel, Target
from delayer.services.counting import Counters
from delayer.services.release import Portion, Release
from delayer.services.room import ALL, LEAST, Room
from tests.rig.fakes import NOW, Pulse, ScriptedLane, ScriptedPublisher, until

BODY = 1_000_000


def test_what_is_not_needed_is_there_for_others() -> None:
    room = Room(10 * LEAST)
    with room.share(8 * LEAST) as one:
        with room.share(8 * LEAST) as two:
            assert (one.size, two.size) == (8 * LEAST, 2 * LEAST)
            with room.share(8 * LEAST) as three, room.share(5) as four:
                assert (three.size, four.size) == (LEAST, 5), "nobody waits"
        one.keep(LEAST)
        with room.share(20 * LEAST) as two:
            assert two.size == 9 * LEAST
    assert room.left == 10 * LEAST


class Full(ScriptedLane):
    """Has messages of 1 MB without an end."""

    async def claim(self, limit: int, max_bytes: int, scope: object = None) -> list[Due]:
        parcel = Parcel(NOW, b"r", b"e", b"k", Target(b"e", b"k"), b"\0\0", b"x" * BODY)
        await asyncio.sleep(0)
        return [Due(n, NOW, 0, parcel, True) for n in range(max(1, min(limit, -(-max_bytes // BODY))))]

    @property
    def more(self) -> bool:
        return True


class Slow(ScriptedPublisher):
    def __init__(self) -> None:
        super().__init__()
        self.in_hand = self.most = self.largest = 0

    async def publish(self, batch: Sequence[Outgoing]) -> list[Outcome]:
        self.batches += 1
        self.in_hand += len(batch)
        self.most, self.largest = max(self.most, self.in_hand), max(self.largest, len(batch))
        await asyncio.sleep(0.01)
        self.in_hand -= len(batch)
        return [CONFIRMED] * len(batch)


async def at_work(lanes: int, publisher: Slow, enough: Callable[[], bool]) -> Room:
    """So many lanes release until it is enough; the room that they shared."""
    room, stopping = Room(), asyncio.Event()
    releases = [
        Release(Full(n), publisher, portion=Portion(), pulse=Pulse(), counters=Counters(), room=room)
        for n in range(lanes)
    ]
    tasks = [asyncio.create_task(release.run(stopping)) for release in releases]
    await until(enough)
    stopping.set()
    await asyncio.gather(*tasks)
    return room


async def test_what_lanes_have_in_hand_does_not_grow_with_their_number() -> None:
    publisher = Slow()
    room = await at_work(16, publisher, lambda: publisher.batches > 16 * 10)
    assert publisher.most * BODY <= ALL + 2 * 16 * BODY, "a part of a message more for each lane, and the least one"
    assert room.left == ALL


async def test_one_lane_may_have_a_full_portion() -> None:
    """Beside others it is a matter of who comes first."""
    publisher = Slow()
    room = await at_work(1, publisher, lambda: publisher.batches > 10)
    assert publisher.largest * BODY > 10 << 20
    assert room.left == ALL
