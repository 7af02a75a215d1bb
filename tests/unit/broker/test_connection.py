"""Every connection opened passes the same check, including the second."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from delayer.amqp.address import Address
from delayer.amqp.errors import BrokerLost
from delayer.broker import connection
from delayer.broker.connection import ReconnectingConnection


class FakeConnection:
    blocked = ""

    def __init__(self) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_alarm(self, _: object) -> None: ...

    async def close(self) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


async def test_a_second_connection_that_is_not_accepted_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By then the broker's name may resolve to another broker, which would confirm the messages."""
    opened: list[FakeConnection] = []

    async def connect(_: Address, **__: Any) -> FakeConnection:
        opened.append(FakeConnection())
        return opened[-1]

    async def accept(one: Any) -> None:
        if one is not opened[0]:
            raise BrokerLost("another broker")

    monkeypatch.setattr(connection, "connect", connect)
    reconnecting = ReconnectingConnection(
        lambda: Address.parse_all("amqp://127.0.0.1"), "test", heartbeat=10, accept=accept
    )
    reconnecting.start()
    await reconnecting.connection(5.0)
    with pytest.raises(BrokerLost, match="another broker"):
        await reconnecting.another(5.0)
    assert [one.closed.done() for one in opened] == [False, True]
    await reconnecting.close()
