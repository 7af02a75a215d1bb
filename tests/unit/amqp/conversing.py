"""What the tests of a connection say to the scripted broker, and wait for."""

from __future__ import annotations

import asyncio
from typing import Any

from pamqp import body, commands, header

from delayer.amqp.connection import Connection
from delayer.amqp.properties import encode_headers, entry, long_string
from delayer.core.message import Outgoing
from tests.unit.amqp.scripted import Peer


def message(token: str, payload: bytes = b"body") -> Outgoing:
    properties = encode_headers(entry(b"x-delayer-id", long_string(token.encode())))
    return Outgoing(b"", b"q", properties, payload, token.encode())


async def publishes(peer: Peer, count: int) -> None:
    """Wait until that many whole publishes (of one body frame each) arrived."""
    for _ in range(count):
        await peer.expect(commands.Basic.Publish)
        await peer.expect(header.ContentHeader)
        await peer.expect(body.ContentBody)


async def say_goodbye(connection: Connection, peer: Peer) -> None:
    closing = asyncio.create_task(connection.close())
    while not isinstance((await peer.next_frame())[1], commands.Connection.Close):
        pass
    peer.send(commands.Connection.CloseOk())
    await closing


async def consume(channel: Any, peer: Peer, on_delivery: Any, on_cancelled: Any = lambda: None) -> None:
    consuming = asyncio.create_task(channel.consume("q", on_delivery, on_cancelled))
    asked = await peer.expect(commands.Basic.Consume)
    peer.send(commands.Basic.ConsumeOk(asked.consumer_tag), 1)
    assert await consuming == asked.consumer_tag


async def round_trip(channel: Any, peer: Peer) -> None:
    """When this returns, everything that the peer sent before was read."""
    asking = asyncio.create_task(channel.qos(1))
    await peer.expect(commands.Basic.Qos)
    peer.send(commands.Basic.QosOk(), 1)
    await asking
