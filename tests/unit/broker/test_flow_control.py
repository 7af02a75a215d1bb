"""Flow control of sockets whose subscriptions share a limit, and the number of messages to read ahead."""

from __future__ import annotations

import random

import pytest

from delayer.broker.consumer import SAMPLE_PREFETCHES, AdaptivePrefetch, FlowControl

ROOM = 100


class Socket:
    def __init__(self) -> None:
        self.reading = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class Waiting:
    """Frees its bytes like a subscription."""

    def __init__(self, flow: FlowControl, socket: Socket) -> None:
        self.flow, self.socket, self.bytes = flow, socket, 0

    def gets(self, size: int) -> None:
        self.bytes += size
        self.flow.add_buffered(self, self.socket, size)

    def takes(self, size: int) -> None:
        self.bytes -= size
        self.flow.remove_buffered(size)

    def end_if_stalled(self, seconds: float = 0.0) -> None:
        size, self.bytes = self.bytes, 0
        self.flow.clear_buffered(self, size)


def several(count: int) -> tuple[FlowControl, Socket, list[Waiting]]:
    flow, socket = FlowControl(ROOM), Socket()
    return flow, socket, [Waiting(flow, socket) for _ in range(count)]


async def test_a_new_subscription_reads_a_bounded_amount() -> None:
    flow, socket, (one,) = several(1)
    one.gets(ROOM + 1)
    assert not socket.reading
    with flow.reading_on(2):
        assert socket.reading
        one.gets(ROOM - 1)
        assert socket.reading
        one.gets(1)
        assert not socket.reading
    with flow.reading_on(2):
        assert not socket.reading


async def test_a_new_connection_is_not_read_either() -> None:
    flow, _, (one,) = several(1)
    one.gets(101)
    again = Waiting(flow, Socket())
    again.gets(1)
    assert not again.socket.reading
    one.end_if_stalled()
    assert again.socket.reading


# The number of messages to read ahead: the wanted number, unless their bytes exceed the limit.

WANTED, WHOLE = 5_000, 32 << 20


@pytest.mark.parametrize(
    ("size", "more", "next_time"),
    [
        (300_000, False, 64),  # too small a step to subscribe again
        (200_000, True, WHOLE // 200_000),
        (512, True, WANTED),
        (0, True, WANTED),
    ],
)
def test_many_small_messages_raise_the_prefetch(size: int, more: bool, next_time: int) -> None:
    adaptive_prefetch = AdaptivePrefetch(WHOLE)
    adaptive_prefetch.record_overflow(64)
    adaptive_prefetch.prefetch(WANTED)
    for _ in range(SAMPLE_PREFETCHES * 64 - 1):
        assert not adaptive_prefetch.record_batch(1, size, WANTED)
    assert adaptive_prefetch.record_batch(1, size, WANTED) is more
    assert adaptive_prefetch.prefetch(WANTED) == next_time


def test_the_prefetch_stays_between_one_and_the_limit() -> None:
    chance = random.Random(1)
    adaptive_prefetch = AdaptivePrefetch(WHOLE)
    for _ in range(20_000):
        if chance.random() < 0.01:
            adaptive_prefetch.record_overflow(chance.randrange(10_000))
        adaptive_prefetch.record_batch(chance.randrange(200), chance.randrange(1 << 27), WANTED)
        assert 1 <= adaptive_prefetch.prefetch(WANTED) <= WANTED
