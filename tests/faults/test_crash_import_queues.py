"""An import from queues, killed at every step, or losing its connection after a commit. After another run each message
is in the store or in its queue, once, and the report is correct."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from delayer.broker.admin import Admin
from delayer.core.cascade import Cascade, routing_key
from delayer.core.importing import ImportSelection, Left
from delayer.core.topology import Queue, Topology, arguments
from delayer.core.units import DAY_MS
from delayer.imports.brokers import Destinations
from delayer.imports.hold_queues import HoldQueues
from delayer.imports.state_machine import run
from delayer.store.admin.importing import ImportStore
from tests.faults.test_crash_import import BATCH, COUNT, delayer, killed, parked, report
from tests.support.place import eventually
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitMQ
from tests.support.raw import Message, Props, Raw
from tests.support.topology import declare

LEVEL, SECONDS = 15, 50_000
CASCADE = Cascade("nservicebus-v2")
HOLD = {"x-message-ttl": SECONDS * 1000, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "work"}
SOURCES: dict[str, tuple[str, tuple[str, ...]]] = {
    "cascade": (CASCADE.level(LEVEL), ("cascade", "--kind", "nservicebus-v2")),
    "hold-queues": ("hold", ("hold-queues", "--queue", "hold", "--ttl", f"{SECONDS}s", "--exchange", "",
                             "--routing-key", "work")),
}  # fmt: skip
"""The queue of the messages, and the arguments of the import."""
SOME = range(1, COUNT)
"""A batch or two; the broker decides how many arrive in one."""
STEPS = {
    "import.begun": range(1),
    "import.staged": range(1),
    "import.taken:2": SOME,
    "park.copied:2": SOME,
    "import.committed:2": SOME,
    "import.removed:2": SOME,
    "import.emptied": range(COUNT, COUNT + 1),
}
"""The number of committed messages after a death at each step."""
BODIES = [b"%d" % n for n in range(COUNT)]


@dataclass
class Broker:
    """The vhost of the messages."""

    url: str
    queue: str

    async def fill(self, seconds: int = SECONDS, expiration: bytes | None = None) -> dict[str, str]:
        """Publish the messages. Returns the environment that a command needs."""
        work = Queue("work", arguments({"x-queue-type": "quorum"}))
        hold = Queue("hold", arguments({"x-queue-type": "quorum", **HOLD}))
        await declare(self.url, Topology(queues=(work, hold)) if self.queue == "hold" else CASCADE.topology())
        through = ("", b"hold") if self.queue == "hold" else (self.queue, routing_key(seconds, b"work"))
        async with await Raw.connect(self.url) as raw:
            props = [Props(message_id=body, delivery_mode=2, expiration=expiration) for body in BODIES]
            await raw.publish(*(Message(*through, of, body) for of, body in zip(props, BODIES, strict=True)))
        return {"DELAYER_BROKER__URL": self.url}

    async def depth(self) -> int:
        async with await Admin.connect(self.url) as admin:
            return (await admin.depths([self.queue]))[self.queue] or 0

    async def bodies(self) -> list[bytes]:
        """Take out the remaining bodies."""
        async with await Raw.connect(self.url) as raw:
            left = await self.depth()
            inbox = await raw.inbox(self.queue)
            assert await inbox.until(lambda: len(inbox.arrivals) >= left)
            return [arrival.delivery.body for arrival in inbox.arrivals]


Import = tuple[Broker, tuple[str, ...]]


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, vhost: str) -> Import:
    queue, words = SOURCES[request.param]
    return Broker(vhost, queue), words


def said(words: Iterable[str], verb: str, *more: str) -> tuple[str, ...]:
    name, *options = words
    return ("import", name, verb, *options, *more, "--unverified", "--yes", "--json")


@pytest.mark.parametrize(
    "fault", [pytest.param(step, marks=[pytest.mark.long][: step != "import.committed:2"]) for step in STEPS]
)
async def test_run_again(store: str, source: Import, fault: str) -> None:
    broker, words = source
    url = await broker.fill()
    await killed(store, *said(words, "run"), fault=fault, **url)
    committed = len(await parked(store))
    assert committed in STEPS[fault]
    # Messages without an acknowledgement are back when the broker notices; some acknowledgements may have been lost.
    least = COUNT - committed
    await eventually(broker.depth, lambda depth: depth >= least)
    refused, _, told = await delayer(store, *said(words, "run", "--limit", "7"), **url)
    assert (refused, "begun with other parameters" in told) == (1, True), told
    done = await report(store, *said(words, "run"), **url)
    assert (done["resumed"], done["parked"], done["held"]) == (True, COUNT, 0)
    assert await parked(store) == sorted(BODIES)
    await eventually(broker.depth, lambda depth: depth == 0)


@pytest.mark.long
@pytest.mark.parametrize("fault", STEPS)
async def test_abort_instead(store: str, source: Import, fault: str) -> None:
    """Committed messages stay in the store and are gone from the queue; the rest is in the queue."""
    broker, words = source
    url = await broker.fill()
    await killed(store, *said(words, "run"), fault=fault, **url)
    here = await parked(store)
    assert len(here) in STEPS[fault]
    least = COUNT - len(here)
    await eventually(broker.depth, lambda depth: depth >= least)
    done = await report(store, *said(words, "abort"), **url)
    assert (done["phase"], done["parked"]) == ("aborted", len(here))
    assert await parked(store) == here
    await eventually(broker.depth, lambda depth: depth == least)
    assert sorted([*here, *await broker.bodies()]) == sorted(BODIES)


@pytest.mark.parametrize(
    "number", [pytest.param(2, id="in the middle", marks=pytest.mark.long), pytest.param(3, id="the last batch")]
)
async def test_the_connection_is_cut_after_a_commit(
    store: str, source: Import, rabbitmq: RabbitMQ, vhost_name: str, number: int
) -> None:
    """The connection is cut during a batch. The batch is committed, but its acknowledgement never reaches the
    broker."""
    broker, words = source
    async with Proxy(rabbitmq.port) as proxy:
        broker.url = rabbitmq.url(vhost_name, port=proxy.port)
        url = await broker.fill()
        fault = f"import.taken:{number}:stop"
        code, _, told = await delayer(store, *said(words, "run"), fault=fault, at_stop=proxy.cut, **url)
        assert (code, "committed messages may still be in it" in told) == (3, True), told
        await eventually(broker.depth, lambda depth: depth >= COUNT - (number - 1) * BATCH)
        assert (await report(store, *said(words, "run"), **url))["parked"] == COUNT
        assert await parked(store) == sorted(BODIES)
        await eventually(broker.depth, lambda depth: depth == 0)


@pytest.mark.long
async def test_messages_that_moved_down_a_level_before_the_run_continues(store: str, vhost: str) -> None:
    broker, words = Broker(vhost, CASCADE.level(2)), SOURCES["cascade"][1]
    url = await broker.fill(seconds=6)
    await killed(store, *said(words, "run"), fault="import.committed", **url)
    committed = len(await parked(store))
    await eventually(Broker(vhost, CASCADE.level(1)).depth, lambda depth: depth > 0)
    done = await report(store, *said(words, "run"), **url)
    assert 0 < done["this_time"]["already_committed"] <= committed
    assert set(Counter(await parked(store)).values()) == {1}


async def test_messages_behind_too_many_others_are_reported(store: str, rabbitmq: RabbitMQ, vhost: str) -> None:
    """Messages due before the cutoff are at the head of the queue, and the run does not see the message behind them."""
    broker = Broker(vhost, "hold")
    await broker.fill(expiration=b"40000000")
    async with await Raw.connect(vhost) as raw:
        await raw.publish(Message("", b"hold", Props(message_id=b"behind", delivery_mode=2), b"behind"))
    async with ImportStore.open(store) as book:
        source = HoldQueues(
            url=vhost, management_url=rabbitmq.management_url, patterns=["hold"], ttl_ms=3650 * DAY_MS,
            meant=ImportSelection(cutoff_ms=1_927_612_800_000), now=book.now_ms, prefetch=10, most_unacknowledged=30,
        )  # fmt: skip
        done = await run(source, book, Destinations(vhost, None, verified=False), "me", lambda *_: None)
        await source.close()
    assert done.left == {Left.BEHIND: COUNT + 1 - 40, "due before the cutoff": 40}
    assert await broker.depth() == COUNT + 1
