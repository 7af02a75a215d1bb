"""An import out of queues that is killed at every step: run again, everything is in the store or in its queue, once."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable
from typing import Any

import pytest

from delayer.broker.admin import Admin
from delayer.core.cascade import Cascade, routing_key
from delayer.core.topology import Queue, Topology, arguments
from tests.faults.place import eventually
from tests.faults.test_crash_import import BATCH, COUNT, delayer, gone
from tests.integration.test_store_lane import sql
from tests.support.raw import Message, Props, Raw
from tests.support.rows import conserved

pytestmark = pytest.mark.long

LEVEL, SECONDS = 15, 50_000
CASCADE = Cascade("nservicebus-v2")
HOLD = {"x-message-ttl": SECONDS * 1000, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "work"}
SOURCES: dict[str, tuple[str, tuple[str, ...]]] = {
    "cascade": (CASCADE.level(LEVEL), ("cascade", "--kind", "nservicebus-v2")),
    "hold-queues": ("hold", ("hold-queues", "--queue", "hold", "--ttl", f"{SECONDS}s", "--to-exchange", "",
                             "--to-key", "work")),
}  # fmt: skip
"""The queue that the messages stand in, and the words of the import."""
SOME = range(1, COUNT)
"""A batch or two of them; how much comes in one is the broker's."""
STEPS = {
    "import.begun": range(1),
    "import.staged": range(1),
    "import.taken:2": SOME,
    "park.copied:2": SOME,
    "import.committed:2": SOME,
    "import.removed:2": SOME,
    "import.emptied": range(COUNT, COUNT + 1),
}
"""How many are committed when it dies there."""
BODIES = [b"%d" % n for n in range(COUNT)]


class Broker:
    """The vhost that the messages come from."""

    def __init__(self, url: str, queue: str) -> None:
        self.url = url
        self.queue = queue

    async def fill(self) -> None:
        work = Queue("work", arguments({"x-queue-type": "quorum"}))
        hold = Queue("hold", arguments({"x-queue-type": "quorum", **HOLD}))
        async with await Admin.connect(self.url) as admin:
            await admin.declare(Topology(queues=(work, hold)) if self.queue == "hold" else CASCADE.topology())
        through = ("", b"hold") if self.queue == "hold" else (self.queue, routing_key(SECONDS, b"work"))
        async with await Raw.connect(self.url) as raw:
            await raw.publish(*(Message(*through, Props(message_id=body, delivery_mode=2), body) for body in BODIES))

    async def depth(self) -> int | None:
        async with await Admin.connect(self.url) as admin:
            return (await admin.depths([self.queue]))[self.queue]

    async def bodies(self) -> list[bytes]:
        """What is left there, taken out."""
        async with await Raw.connect(self.url) as raw:
            left = await self.depth() or 0
            inbox = await raw.inbox(self.queue)
            assert await inbox.until(lambda: len(inbox.arrivals) >= left)
            return [arrival.delivery.body for arrival in inbox.arrivals]


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, vhost: str) -> tuple[Broker, tuple[str, ...]]:
    queue, words = SOURCES[request.param]
    return Broker(vhost, queue), words


def said(words: Iterable[str], verb: str, *more: str) -> tuple[str, ...]:
    name, *options = words
    return ("import", name, verb, *options, *more, "--unverified", "--yes", "--json")


async def killed(store: str, broker: Broker, words: tuple[str, ...], fault: str, *more: str, **environ: str) -> None:
    code, out, told = await delayer(store, *said(words, "run", *more), fault=fault, **environ)
    assert code == -signal.SIGKILL, (out, told)
    await gone(store)


async def parked(store: str) -> list[bytes]:
    async with sql(store) as admin:
        await conserved(admin)
        return sorted(body for (body,) in await admin.fetch("SELECT body FROM message"))


def report_of(done: tuple[int, str, str], expect: int = 0) -> Any:
    code, out, told = done
    assert code == expect, told
    return json.loads(out)


@pytest.mark.parametrize("fault", STEPS)
async def test_run_again(store: str, source: tuple[Broker, tuple[str, ...]], fault: str) -> None:
    broker, words = source
    url = {"DELAYER_BROKER__URL": broker.url}
    await broker.fill()
    await killed(store, broker, words, fault, **url)
    committed = len(await parked(store))
    assert committed in STEPS[fault]
    # What was not removed is back when the broker has noticed; of what was, the acknowledgement may have been lost.
    least = COUNT - committed
    await eventually(broker.depth, lambda depth: depth is not None and depth >= least)
    refused, _, told = await delayer(store, *said(words, "run", "--limit", "7"), **url)
    assert (refused, "begun with other parameters" in told) == (1, True), told
    report = report_of(await delayer(store, *said(words, "run"), **url))
    assert (report["resumed"], report["parked"], report["held"]) == (True, COUNT, 0)
    assert await parked(store) == sorted(BODIES)
    await eventually(broker.depth, lambda depth: depth == 0)


@pytest.mark.parametrize("fault", STEPS)
async def test_abort_instead(store: str, source: tuple[Broker, tuple[str, ...]], fault: str) -> None:
    """What is committed stays here and is gone there, the rest is there."""
    broker, words = source
    url = {"DELAYER_BROKER__URL": broker.url}
    await broker.fill()
    await killed(store, broker, words, fault, **url)
    here = await parked(store)
    assert len(here) in STEPS[fault]
    least = COUNT - len(here)
    await eventually(broker.depth, lambda depth: depth is not None and depth >= least)
    report = report_of(await delayer(store, *said(words, "abort"), **url))
    assert (report["phase"], report["parked"]) == ("aborted", len(here))
    assert await parked(store) == here
    await eventually(broker.depth, lambda depth: depth == least)
    assert sorted([*here, *await broker.bodies()]) == sorted(BODIES)


@pytest.mark.parametrize("fault", ["import.committed:2", "import.removed:2"])
async def test_a_limit_that_was_reached(store: str, source: tuple[Broker, tuple[str, ...]], fault: str) -> None:
    """No batch comes any more in which what is committed would be met: it is removed all the same."""
    broker, words = source
    url = {"DELAYER_BROKER__URL": broker.url}
    limit = ("--limit", str(2 * BATCH))
    await broker.fill()
    await killed(store, broker, words, fault, *limit, **url)
    await eventually(broker.depth, lambda depth: depth is not None and depth >= COUNT - 2 * BATCH)
    report = report_of(await delayer(store, *said(words, "run", *limit), **url))
    assert report["parked"] == 2 * BATCH
    await eventually(broker.depth, lambda depth: depth == COUNT - 2 * BATCH)
    assert sorted([*await parked(store), *await broker.bodies()]) == sorted(BODIES)
