"""Keys with any number of daemons: cancelled and replaced messages are never delivered, and every newest message is
delivered once (G7).

A publisher sends parks, replacements and cancels of many keys on one channel, first in peace and then while the active
daemon is killed repeatedly, and every fault of broker and store strikes in turn. There all messages are due after the
last fault.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path

import aio_pika
import pytest

from delayer.amqp.errors import BrokerLost
from tests.faults.fault import Fault
from tests.faults.features.striking import strike
from tests.faults.fleet import Fleet
from tests.support.place import eventually
from tests.support.raw import Message, Props, Raw, now_ms, number, text
from tests.support.servers import Postgres, RabbitMQ

KEYS = 300
BATCH = 20
PEACE_SECONDS, A_SECOND = 5, 300
DUE_MS = 5_000
KILLS = 4
KILL_EVERY = 5.0
SEED = 3_800
LONG = pytest.mark.long
IN_TURN = (
    Fault("broker killed", 0, 0.5), Fault("broker stopped", 0, 4.0), Fault("connections closed", 0, 0.0),
    Fault("memory alarm", 0, 3.0), Fault("store killed", 0, 0.5), Fault("store stopped", 0, 6.0),
    Fault("connections ended one by one", 0, 2.0), Fault("lane locks ended", 0, 1.0),
    Fault("statements cancelled", 0, 2.0), Fault("network cut", 0, 0.0, "broker"),
    Fault("network cut", 1, 0.0, "broker"),
    Fault("network cut", 0, 0.0, "store"), Fault("network cut", 1, 0.0, "store"),
    Fault("network half-open", 0, 6.0, "broker"), Fault("network half-open", 1, 6.0, "store"),
    Fault("daemon hangs", 0, 8.0), Fault("daemon hangs", 1, 8.0),
)  # fmt: skip


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[RabbitMQ, Postgres]]:
    """Servers that these tests may kill."""
    with RabbitMQ() as rabbitmq, Postgres() as postgres:
        yield rabbitmq, postgres


class Publisher:
    """Sends operations in order, on one channel. After a loss it first resends the unconfirmed operations, in their
    order."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._raw: Raw | None = None

    async def send(self, *operations: Message) -> None:
        while True:
            try:
                if self._raw is None:
                    self._raw = await Raw.connect(self._url)
                return await self._raw.publish(*operations)
            except (BrokerLost, OSError, AssertionError, TimeoutError):
                await self.close()
                await asyncio.sleep(0.1)  # A server that is down is asked again at this pace.

    async def close(self) -> None:
        raw, self._raw = self._raw, None
        if raw is not None:
            with suppress(BrokerLost, OSError):
                await raw.connection.close()


def park(key: str, body: str, due_ms: int) -> Message:
    headers = (b"x-deliver-at", number("l", due_ms)), (b"x-delay-key", text(key))
    return Message("delayer.in", b"k", Props(headers=headers), body.encode())


def cancel(key: str) -> Message:
    return Message("delayer.in", b"k", Props(headers=((b"x-delay-cancel", text(key)),)), b"")


@asynccontextmanager
async def opened(
    servers: tuple[RabbitMQ, Postgres], directory: Path, daemons: int
) -> AsyncIterator[tuple[Fleet, Publisher, Counter[str]]]:
    """A fleet, a publisher past its proxies, and the bodies that came."""
    async with Fleet.open(*servers, directory, mode="store", seed=SEED, daemons=daemons) as fleet:
        await fleet.settled()
        fleet.ledger.account.windows = []
        connection = await aio_pika.connect_robust(fleet.place.broker)
        channel = await connection.channel()
        queue = await channel.declare_queue("keys", durable=True, arguments={"x-queue-type": "quorum"})
        await queue.bind("delayer.out", "#")
        publisher, came = Publisher(fleet.place.broker), Counter[str]()
        try:
            yield fleet, publisher, came
            await eventually(lambda: fleet.sql("SELECT count(*) FROM message"), lambda left: left == 0, timeout=400)
            async with queue.iterator(timeout=2.0) as messages:
                with suppress(TimeoutError):
                    async for message in messages:
                        came[message.body.decode()] += 1
                        await message.ack()
        finally:
            await publisher.close()
            await connection.close()


@pytest.mark.deadline(120)
@pytest.mark.parametrize("daemons", [pytest.param(2, marks=LONG), 3])
async def test_keys_stay_in_order_without_faults(
    daemons: int, servers: tuple[RabbitMQ, Postgres], tmp_path: Path
) -> None:
    async with opened(servers, tmp_path, daemons) as (_, publisher, came):
        keys, began = count(), time.monotonic()
        while (turn := next(keys)) < PEACE_SECONDS * A_SECOND // BATCH:
            due_ms, some = now_ms() + DUE_MS, range(turn * BATCH, (turn + 1) * BATCH)
            cancelled = [one for n in some for one in (park(f"c{n}", f"cancelled {n}", due_ms), cancel(f"c{n}"))]
            replaced = [park(f"r{n}", f"{version} {n}", due_ms) for n in some for version in ("old", "newest")]
            await publisher.send(*cancelled, *replaced)
            await asyncio.sleep(began + (turn + 1) * BATCH / A_SECOND - time.monotonic())
    whole = PEACE_SECONDS * A_SECOND
    assert came == Counter(f"newest {n}" for n in range(whole))


class Churn:
    """Random operations on all keys, endlessly; ``newest``: the message waiting under each key after the last
    operation."""

    def __init__(self, due_ms: int) -> None:
        self.due_ms = due_ms
        self.newest: dict[str, str] = {}
        self.sent = 0
        self._chance = random.Random(SEED)

    def batch(self) -> list[Message]:
        found = []
        for _ in range(BATCH):
            key = f"key {self._chance.randrange(KEYS)}"
            self.sent += 1
            if self._chance.random() < 0.3:
                self.newest.pop(key, None)
                found.append(cancel(key))
            else:
                self.newest[key] = f"{key}, {self.sent}"
                found.append(park(key, self.newest[key], self.due_ms))
        return found


@pytest.mark.deadline(600)
@pytest.mark.parametrize(
    ("daemons", "faults", "seconds"),
    [
        pytest.param(2, (Fault("broker killed", 0, 0.5), Fault("store killed", 0, 0.5)), 90, id="two, short"),
        pytest.param(2, IN_TURN, 240, id="two", marks=LONG),
        pytest.param(3, IN_TURN, 240, id="three", marks=LONG),
    ],
)
async def test_keys_stay_in_order_under_faults(
    daemons: int, faults: tuple[Fault, ...], seconds: int, servers: tuple[RabbitMQ, Postgres], tmp_path: Path
) -> None:
    async with opened(servers, tmp_path, daemons) as (fleet, publisher, came):
        churn, over = Churn(now_ms() + seconds * 1000), asyncio.Event()

        async def publish() -> None:
            while not over.is_set():
                await publisher.send(*churn.batch())
                await asyncio.sleep(BATCH / A_SECOND)

        publishing = asyncio.create_task(publish())
        kills = [Fault("daemon killed", turn % daemons, 0.0) for turn in range(KILLS)]
        struck = 0
        for kill in kills:
            struck += await strike(fleet, [kill])
            await asyncio.sleep(KILL_EVERY)  # not to wait for anything: this is the pace of the kills
        struck += await strike(fleet, faults)
        over.set()
        await publishing
        print(f"{struck} faults, {churn.sent} operations")
        assert struck >= len(kills)
        await eventually(lambda: fleet.place.depth("delays"), lambda depth: depth == 0, timeout=60)
        assert now_ms() < churn.due_ms, "the last fault came too late: allow more seconds"
    assert not fleet.surprises, fleet.surprises
    assert came == Counter(churn.newest.values())
