"""Messages through the declared cascade on a real broker: on time, once, to their address; strays block no other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from delayer.broker.admin import Admin
from delayer.core.cascade import CASCADE_KINDS, MAX_SECONDS, Cascade, delivery_binding, intake_topology, routing_key
from delayer.core.topology import Queue, Topology, arguments
from tests.support.place import eventually
from tests.support.raw import Inbox, Message, Props, Raw, array, now_ms, text
from tests.support.topology import bound, declare

QUORUM = arguments({"x-queue-type": "quorum"})


class Bench:
    """A declared cascade, addresses bound at its end, and a consumer on each."""

    def __init__(self, admin: Admin, raw: Raw, cascade: Cascade, inboxes: dict[str, Inbox]) -> None:
        self.admin, self.cascade, self.inboxes = admin, cascade, inboxes
        self._raw = raw

    async def send(self, seconds: int, address: str, *bodies: bytes) -> None:
        entry, key = self.cascade.entry(seconds), routing_key(seconds, address.encode())
        await self._raw.publish(*(Message(entry, key, Props(delivery_mode=2), body) for body in bodies))

    async def waiting(self) -> dict[str, int]:
        """Levels that hold messages."""
        depths = await self.admin.depths(level.name for level in self.cascade.levels())
        return {name: depth for name, depth in depths.items() if depth}


@asynccontextmanager
async def bench(vhost: str, kind: str, *addresses: str) -> AsyncIterator[Bench]:
    cascade = Cascade(kind)  # type: ignore[arg-type]
    async with await Raw.connect(vhost) as raw, await Admin.connect(vhost) as admin:
        await declare(vhost, cascade.topology() + Topology(queues=tuple(Queue(name, QUORUM) for name in addresses)))
        for name in addresses:
            await declare(vhost, bound(name, cascade.delivery, delivery_binding(name)))
        yield Bench(admin, raw, cascade, {name: await raw.inbox(name) for name in addresses})


@pytest.mark.parametrize("kind", CASCADE_KINDS)
async def test_messages_arrive_once_on_time_and_only_at_their_address(vhost: str, kind: str) -> None:
    async with bench(vhost, kind, "sales.orders", "orders", "eu.sales.orders") as here:
        sent = {}
        for seconds in range(4):
            bodies = [b"%d %d" % (seconds, number) for number in range(5)]
            sent |= dict.fromkeys(bodies, now_ms() + seconds * 1000)
            await here.send(seconds, "sales.orders", *bodies)
        await here.send(3, "orders", b"3 last")
        inbox = here.inboxes["sales.orders"]
        await inbox.got(sent)
        await here.inboxes["orders"].got([b"3 last"])
        assert await here.waiting() == {}
    for body, due_ms in sent.items():
        # Both clocks round, because the broker works in whole milliseconds.
        assert due_ms - 2 <= inbox.only(body).at_ms < due_ms + 2_000, body
    counts = [len(here.inboxes[name].arrivals) for name in ("sales.orders", "orders", "eu.sales.orders")]
    assert counts == [len(sent), 1, 0]


@pytest.mark.parametrize("kind", CASCADE_KINDS)
@pytest.mark.parametrize("seconds", [1 << 27, (1 << 27) + 1, MAX_SECONDS])
async def test_the_longest_delays_wait_in_level_27_and_nowhere_else(vhost: str, kind: str, seconds: int) -> None:
    async with bench(vhost, kind, "a") as here:
        await here.send(seconds, "a", b"x")
        await eventually(here.waiting, lambda waiting: waiting == {here.cascade.level(27): 1})
        assert here.inboxes["a"].arrivals == []


async def test_strays_are_set_aside_and_do_not_block_other_messages(vhost: str) -> None:
    """A level's dead-letter worker has at most 32 messages in flight. Without an alternate exchange, 40 strays would
    block the five messages behind them forever."""
    async with bench(vhost, "delayer", "good") as here:
        strays = here.cascade.strays
        await here.send(0, "nobody", b"bad at once")
        await here.send(1, "nobody", *(b"bad %d" % number for number in range(40)))
        good = [b"good %d" % number for number in range(5)]
        await here.send(1, "good", *good)
        await here.inboxes["good"].got(good)
        await eventually(lambda: here.admin.depths([strays]), lambda depths: depths == {strays: 41})
        assert await here.waiting() == {}
        assert len(here.inboxes["good"].arrivals) == 5


@pytest.mark.parametrize("exchange", ["delayer.in", ""])
async def test_messages_that_expire_in_the_intake_queue_are_refused(vhost: str, exchange: str) -> None:
    """The refused exchange is a fanout: otherwise CC would route an expired message to its own keys again."""
    async with await Raw.connect(vhost) as raw, await Admin.connect(vhost) as admin:
        await declare(vhost, intake_topology())
        props = Props(headers=((b"CC", array(text("delays"))),), expiration=b"50", delivery_mode=2)
        await raw.publish(Message(exchange, b"delays", props, b"x"))
        queues = ("delays", "delays.refused")
        await eventually(lambda: admin.depths(queues), lambda depths: depths == {"delays": 0, "delays.refused": 1})
