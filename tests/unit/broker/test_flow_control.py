"""When the sockets are read whose subscriptions share a bound."""

from __future__ import annotations

import pytest

from delayer.broker.consumer import Inflow
from tests.faults.place import eventually

ROOM = 100


class Socket:
    def __init__(self) -> None:
        self.reading = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class Waiting:
    """Lets go as a subscription does."""

    def __init__(self, flow: Inflow, socket: Socket) -> None:
        self.flow, self.socket, self.bytes = flow, socket, 0

    def gets(self, size: int) -> None:
        self.bytes += size
        self.flow.came(self, self.socket, size)

    def takes(self, size: int) -> None:
        self.bytes -= size
        self.flow.went(size)

    def let_go(self) -> None:
        size, self.bytes = self.bytes, 0
        self.flow.emptied(self, size)


def several(count: int) -> tuple[Inflow, Socket, list[Waiting]]:
    flow, socket = Inflow(ROOM), Socket()
    return flow, socket, [Waiting(flow, socket) for _ in range(count)]


async def test_all_of_them_together_are_bounded() -> None:
    _, socket, (one, other, third) = several(3)
    one.gets(60)
    other.gets(40)
    assert socket.reading
    third.gets(1)
    assert not socket.reading
    one.takes(50)
    assert not socket.reading, "more than half"
    other.takes(2)
    assert socket.reading


async def test_a_closing_subscription_reads_the_broker_s_answers() -> None:
    flow, socket, (one, other) = several(2)
    one.gets(30)
    other.gets(90)
    assert not socket.reading
    one.let_go()
    assert not socket.reading, "more than half"
    with flow.listening(4):
        assert socket.reading
        other.gets(20)
        assert socket.reading
        other.gets(2 * ROOM)
        assert socket.reading
    other.gets(1)
    assert not socket.reading


async def test_a_beginning_subscription_reads_a_bounded_amount() -> None:
    flow, socket, (one,) = several(1)
    one.gets(ROOM + 1)
    assert not socket.reading
    with flow.listening(2):
        assert socket.reading
        one.gets(ROOM - 1)
        assert socket.reading
        one.gets(1)
        assert not socket.reading
    with flow.listening(2):
        assert not socket.reading


async def test_a_new_connection_is_not_read_either() -> None:
    flow, _, (one,) = several(1)
    one.gets(101)
    again = Waiting(flow, Socket())
    again.gets(1)
    assert not again.socket.reading
    one.let_go()
    assert again.socket.reading


async def test_all_subscriptions_let_go_of_a_buffer_full_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayer.broker.consumer.UNREAD", 0.01)
    _, socket, them = several(3)
    for one in them:
        one.gets(40)
    assert not socket.reading

    async def left() -> int:
        return sum(one.bytes for one in them)

    await eventually(left, lambda size: size == 0)
    assert socket.reading


async def test_several_subscriptions_do_not_know_whose_data_waits() -> None:
    flow, _, (one, other) = several(2)
    one.gets(101)
    assert flow.behind(one)
    other.gets(1)
    assert not flow.behind(one)
