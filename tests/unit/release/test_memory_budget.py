"""Bytes in hand: shared, given back, and never waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from delayer.core.counters import Counters
from delayer.core.message import CONFIRMED, Due, Outcome, Outgoing, Parcel, Target
from delayer.release.loop import Portion, Release
from delayer.release.memory_budget import ALL, LEAST, SLOWEST, UNHURRIED, Room
from tests.support.fakes import NOW, Pulse, ScriptedLane, ScriptedPublisher, until

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


MB = 1 << 20


@pytest.mark.parametrize(
    ("claims", "next_one"),
    [
        ([], ALL),
        ([(16 * MB, UNHURRIED)], ALL),
        ([(8 * MB, 2 * UNHURRIED)], 4 * MB),
        ([(8 * MB, 4 * UNHURRIED)], 2 * MB),
        ([(8 * MB, 4 * UNHURRIED), (2 * MB, 0.1)], 4 * MB),
        ([(8 * MB, 4 * UNHURRIED), (MB, 0.1)], 4 * MB),
        ([(8 * MB, 4 * UNHURRIED), (MB - 1, 0.1)], 2 * MB),  # that it was quick does not say what more would be
        ([(8 * MB, 4 * UNHURRIED), *[(ALL, 0.1)] * 9], ALL),
        ([(0, 100.0)], SLOWEST),  # whatever it waited for, it was not its rows
        ([(100, 100.0), (100, 0.1)], SLOWEST),
        ([(100, 100.0), (SLOWEST, 0.1)], 2 * SLOWEST),
    ],
)
def test_a_claim_takes_what_the_line_carries_in_time(claims: list[tuple[int, float]], next_one: int) -> None:
    room = Room()
    for size, seconds in claims:
        room.took(size, seconds)
    with room.share(ALL) as share:
        assert share.size == next_one


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
