"""An import out of queues whose connection breaks, or goes silent, behind a commit: nothing comes in twice, and nothing
is said to be done that is not."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from delayer.broker.admin import Admin
from delayer.core.cascade import Cascade, routing_key
from delayer.core.importing import BEHIND, Batch
from delayer.core.topology import Queue, Topology, arguments
from delayer.imports import queues
from delayer.imports.queues import Queues
from tests.faults.place import eventually
from tests.faults.test_crash_import import delayer, gone
from tests.faults.test_crash_import_queues import HOLD
from tests.integration.test_store_lane import sql
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitMQ
from tests.support.raw import Message, Props, Raw

BATCH, COUNT = 20, 60
CASCADE = Cascade("nservicebus-v2")
OUT_OF_HOLD = ("hold-queues", "run", "--queue", "hold", "--ttl", "50000s", "--to-exchange", "", "--to-key", "work")
OUT_OF_CASCADE = ("cascade", "run", "--kind", "nservicebus-v2")
LAST = ("--unverified", "--yes", "--json")
Remove = Callable[[Queues, Batch], Awaitable[None]]


async def fill(url: str, queue: str, seconds: int = 50_000, expiration: bytes | None = None) -> None:
    work = Queue("work", arguments({"x-queue-type": "quorum"}))
    more: dict[str, Any] = dict(HOLD)
    hold = Queue("hold", arguments({"x-queue-type": "quorum", **more}))
    async with await Admin.connect(url) as admin:
        await admin.declare(Topology(queues=(work, hold)) if queue == "hold" else CASCADE.topology())
    through = ("", b"hold") if queue == "hold" else (queue, routing_key(seconds, b"work"))
    async with await Raw.connect(url) as raw:
        ids = [b"%d" % n for n in range(COUNT)]
        props = [Props(message_id=one, delivery_mode=2, expiration=expiration) for one in ids]
        await raw.publish(*(Message(*through, of, one) for of, one in zip(props, ids, strict=True)))


async def depth(url: str, queue: str) -> int | None:
    async with await Admin.connect(url) as admin:
        return (await admin.depths([queue]))[queue]


async def copies(store: str) -> Counter[bytes]:
    async with sql(store) as admin:
        return Counter(body for (body,) in await admin.fetch("SELECT body FROM message"))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "BATCH", BATCH)
    monkeypatch.setattr(queues, "PREFETCH", 2 * BATCH)
    monkeypatch.setattr(queues, "END_SECONDS", 1.0)


def cut_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Cut the connection between the commit of that batch and its acknowledgements."""
    real: Remove = Queues.remove
    batches = []

    async def remove(self: Queues, batch: Batch) -> None:
        batches.append(batch)
        if len(batches) == number:
            assert self._visits.subscription is not None
            self._visits.subscription._connection._transport.abort()  # type: ignore[union-attr]
            await asyncio.wait([self._visits.subscription._channel.closed])
        await real(self, batch)

    monkeypatch.setattr(Queues, "remove", remove)


@pytest.mark.parametrize(
    "number", [pytest.param(2, id="in the middle", marks=pytest.mark.long), pytest.param(3, id="the last batch")]
)
@pytest.mark.parametrize(("words", "queue"), [(OUT_OF_HOLD, "hold"), (OUT_OF_CASCADE, CASCADE.level(15))])
async def test_cut_behind_a_commit(
    store: str, vhost: str, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], queue: str, number: int
) -> None:
    await fill(vhost, queue)
    url = {"DELAYER_BROKER__URL": vhost}
    with monkeypatch.context() as patch:
        cut_at(patch, number)
        code, _, told = await delayer(store, "import", *words, *LAST, **url)
    assert (code, "committed messages may still be in it" in told) == (3, True), told
    at_least = COUNT - (number - 1) * BATCH
    await eventually(lambda: depth(vhost, queue), lambda count: count is not None and count >= at_least)
    code, out, told = await delayer(store, "import", *words, *LAST, **url)
    assert (code, json.loads(out)["parked"]) == (0, COUNT), told
    assert set((found := await copies(store)).values()) == {1}
    assert len(found) == COUNT
    await eventually(lambda: depth(vhost, queue), lambda count: count == 0)


async def test_acknowledgements_of_several_batches_that_went_nowhere(
    store: str, vhost: str, rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the first commit nothing comes to the broker any more; what it had sent by then is committed as well."""
    await fill(vhost, "hold")
    loop = asyncio.get_running_loop()
    async with Proxy(rabbitmq.port) as proxy:
        url = {"DELAYER_BROKER__URL": rabbitmq.url(vhost.rpartition("/")[2], port=proxy.port)}
        real: Remove = Queues.remove
        batches = []

        async def in_the_test(what: Callable[[], None]) -> None:
            async def do() -> None:
                what()

            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(do(), loop))

        async def remove(self: Queues, batch: Batch) -> None:
            batches.append(batch)
            subscription = self._visits.subscription
            assert subscription is not None

            async def received() -> int:
                return subscription.received

            if len(batches) == 1:
                await eventually(received, lambda count: count == 2 * BATCH)
                await in_the_test(lambda: proxy.stall(to_client=False))
            await real(self, batch)
            if len(batches) == 2:
                await in_the_test(proxy.cut)
                await in_the_test(proxy.resume)

        with monkeypatch.context() as patch:
            patch.setattr(Queues, "remove", remove)
            code, _, told = await delayer(store, "import", *OUT_OF_HOLD, *LAST, **url)
        assert code == 3, told
        assert (await copies(store)).total() == 2 * BATCH
        await eventually(lambda: depth(vhost, "hold"), lambda count: count == COUNT)
        code, out, told = await delayer(store, "import", *OUT_OF_HOLD, *LAST, **url)
    assert code == 0, told
    assert json.loads(out)["this_time"] == {"parked": BATCH, "held": 0, "superseded": 0, "already_committed": 2 * BATCH}
    assert set((found := await copies(store)).values()) == {1}
    assert len(found) == COUNT
    assert await depth(vhost, "hold") == 0


@pytest.mark.long
async def test_messages_that_fell_a_level_before_the_run_continues(store: str, vhost: str) -> None:
    level, below, seconds = 2, 1, 6
    await fill(vhost, CASCADE.level(level), seconds)
    url = {"DELAYER_BROKER__URL": vhost}
    code, _, told = await delayer(store, "import", *OUT_OF_CASCADE, *LAST, fault="import.committed", **url)
    assert code < 0, told
    await gone(store)
    committed = (await copies(store)).total()
    await eventually(lambda: depth(vhost, CASCADE.level(below)), lambda count: count is not None and count > 0)
    code, out, told = await delayer(store, "import", *OUT_OF_CASCADE, *LAST, **url)
    assert code == 0, told
    report: dict[str, Any] = json.loads(out)
    assert report["this_time"]["already_committed"] > 0
    assert report["this_time"]["already_committed"] <= committed
    assert set((await copies(store)).values()) == {1}


async def test_messages_behind_too_many_others_are_reported(
    store: str, vhost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the cutoff does not mean are in the way, and what is behind them was not looked at."""
    monkeypatch.setattr(queues, "KEPT", 30)
    monkeypatch.setattr(queues, "PREFETCH", 10)
    await fill(vhost, "hold", expiration=b"40000000")
    async with await Raw.connect(vhost) as raw:
        await raw.publish(Message("", b"hold", Props(message_id=b"behind", delivery_mode=2), b"behind"))
    words = (*OUT_OF_HOLD, "--ttl", "3650d", "--cutoff", "2031-01-31T08:00:00Z", *LAST)
    code, out, told = await delayer(store, "import", *words, DELAYER_BROKER__URL=vhost)
    assert (code, json.loads(out)["left"]) == (1, {BEHIND: COUNT + 1 - 40, "due before the cutoff": 40}), told
    assert await depth(vhost, "hold") == COUNT + 1
