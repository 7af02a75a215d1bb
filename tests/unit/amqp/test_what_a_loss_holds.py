"""What an exception of the wire holds: the daemon's collector, which would find rings, comes rarely."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from delayer.amqp.errors import ChannelClosed
from delayer.amqp.framing import commands
from delayer.core.message import Outgoing
from tests.unit.amqp.conversing import message, publishes
from tests.unit.amqp.scripted import scripted


class Letters(list[Outgoing]):
    """A list that can be referred to weakly."""


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


async def test_nothing_of_a_publish_stays_that_the_broker_objected_to(no_collector: None) -> None:
    """An objection is an outcome, and no failure after which the daemon would collect."""
    async with scripted() as script:
        _, channel, peer = await script.channel(confirms=True)
        letters = Letters([message("1")])
        seen = weakref.ref(letters)
        publishing = asyncio.create_task(channel.publish(letters, timeout=30))
        del letters
        await publishes(peer, 1)
        peer.send(commands.Channel.Close(404, "NOT_FOUND - no exchange", 60, 40), 1)
        await asyncio.wait([publishing])
        assert isinstance(publishing.exception(), ChannelClosed)
        del publishing
        assert seen() is None
