"""One connection after another is lost with the same messages in hand: no delivery limit takes them away (20 is what
RabbitMQ 4 gives a quorum queue that says nothing, and at the 21st loss the messages are gone)."""

from __future__ import annotations

import pytest

from tests.faults.injections.broker import LOSSES, take_and_lose
from tests.faults.place import Place
from tests.support.ledger import Ledger
from tests.support.proxy import Proxy
from tests.support.servers import RabbitMQ

SEED = 11_000
MESSAGES = 50


async def lost_again_and_again(rabbitmq: RabbitMQ, vhost: str, queue: str) -> None:
    """With all that stands in the queue in hand each time."""
    async with Proxy(rabbitmq.port) as proxy:
        url = vhost.replace(f":{rabbitmq.port}", f":{proxy.port}")
        for _ in range(LOSSES):
            await take_and_lose(url, proxy, queue, 20.0, messages=MESSAGES)


async def arrives(place: Place, ledger: Ledger) -> None:
    async with place.daemon() as daemon:
        await daemon.ready()
        await ledger.all_back()
        assert await daemon.stop() == 0, daemon.tail()
    (await place.settle_accounts(ledger)).assert_kept(redelivered=True)


@pytest.mark.parametrize("mode", ["store", "native"])
async def test_fifty_lost_connections_with_messages_in_the_intake_queue(
    rabbitmq: RabbitMQ, vhost: str, store: str, mode: str
) -> None:
    place = await Place(mode, vhost, store if mode == "store" else None).declare()
    async with place.ledger(SEED) as ledger:
        await ledger.publish(MESSAGES, longest_ms=500)
        await lost_again_and_again(rabbitmq, vhost, "delays")
        await arrives(place, ledger)


async def test_fifty_lost_connections_with_messages_in_the_due_queue(rabbitmq: RabbitMQ, vhost: str) -> None:
    place = await Place("native", vhost).declare()
    async with place.ledger(SEED) as ledger:
        async with place.daemon() as daemon:
            await daemon.ready()
            await ledger.publish(MESSAGES, delay_ms=4_000)
            await place.ready(0)
            assert await daemon.stop() == 0, daemon.tail()
        await place.ready(MESSAGES, "delays.due")
        await lost_again_and_again(rabbitmq, vhost, "delays.due")
        await arrives(place, ledger)
