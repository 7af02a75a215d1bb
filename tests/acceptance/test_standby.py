"""Two daemons on one intake queue: one consumes, and the other stands by; also, moving from one queue to another."""

from __future__ import annotations

import signal
from contextlib import AsyncExitStack

import aio_pika
import pytest

from tests.acceptance.conftest import Notices
from tests.acceptance.own_vhost import OwnVhost, delayed
from tests.support.daemon import DaemonProcess, command
from tests.support.flow import flowing
from tests.support.place import Place, eventually
from tests.support.web import Web

ANY_PORT = {"HTTP__LISTEN": "127.0.0.1:0"}
A_SECOND = 200


async def roles(*daemons: Web) -> list[tuple[str, float]]:
    """The role of each daemon, by its health check and by its metrics. Every daemon is ready."""
    found = []
    for web in daemons:
        answer = await web.get("/health/ready")
        assert answer.status == 200, answer.text
        found.append((answer.json["intake"], (await web.metrics())["delayer_intake_active",]))
    return found


ACTIVE, STANDBY = ("active", 1), ("standby", 0)


@pytest.mark.parametrize("mode", ["store", "native"])
async def test_the_standby_takes_over(place: OwnVhost, store: str, notices: Notices, mode: str) -> None:
    environ = place.environ(mode, store if mode == "store" else "") | ANY_PORT
    async with place.working(environ) as (first, raw, inbox):
        one = await Web.of(first)
        await eventually(lambda: notices.said("READY=1", f"STATUS=mode {mode}; intake active"))
        async with DaemonProcess(environ) as second:
            other = await Web.of(await second.ready())
            await eventually(lambda: notices.said("READY=1", f"STATUS=mode {mode}; intake standby"))
            await eventually(lambda: roles(one, other), lambda seen: seen == [ACTIVE, STANDBY])
            for web, role in ((one, "active"), (other, "standby")):
                assert f"delays ({role})" in (await web.get("/")).text
                told = await command(None, "status", environ=environ | {"HTTP__LISTEN": web.address})
                assert f"mode: {mode}   intake: {role}" in told
            await raw.publish(*(delayed(f"before {n}", 100) for n in range(100)))
            await inbox.got([b"before %d" % n for n in range(100)])
            assert await roles(one, other) == [ACTIVE, STANDBY]
            first.signal(signal.SIGKILL)
            await raw.publish(*(delayed(f"after {n}", 100) for n in range(100)))
            await inbox.got([b"after %d" % n for n in range(100)])
            assert await roles(other) == [ACTIVE]
            await eventually(lambda: notices.said(f"STATUS=mode {mode}; intake active"))
            assert (await second.event("standby took over"))["queue"] == "delays"
            assert await second.stop() == 0
            assert set(inbox.counts.values()) == {1}


async def test_shared_consumers_are_all_active_and_refuse_keys(place: OwnVhost, store: str) -> None:
    environ = place.environ("store", store) | ANY_PORT | {"INTAKE__CONSUMERS": "shared"}
    async with place.working(environ) as (first, raw, inbox), DaemonProcess(environ) as second:
        webs = [await Web.of(first), await Web.of(await second.ready())]
        await eventually(lambda: roles(*webs), lambda seen: seen == [ACTIVE, ACTIVE])
        await raw.publish(delayed("keyed", 10, under="order-1"), *(delayed(f"plain {n}", 10) for n in range(50)))
        await inbox.got([b"plain %d" % n for n in range(50)])

        def reasons() -> list[str]:
            events = (event for daemon in (first, second) for event in daemon.events)
            return [event["reason"] for event in events if event["event"] == "message refused"]

        (reason,) = await eventually(reasons)
        assert reason.startswith('x-delay-key: [intake] consumers = "shared" cannot keep keys in order')
        assert b"keyed" not in inbox.counts


async def test_from_one_value_of_consumers_to_the_other(vhost: str, database: str) -> None:
    """The steps of docs/operations.md, while publishers go on: nothing is lost, and only messages routed to both queues
    are delivered twice."""
    place = Place("store", vhost, database)
    new = {"INTAKE__QUEUE": "delays.2"}
    async with place.ledger(38) as ledger, place.working(INTAKE__CONSUMERS="shared") as old, AsyncExitStack() as stack:
        async with flowing(ledger, A_SECOND, longest_ms=3_000):
            await ledger.until(lambda: ledger.total() > A_SECOND)
            async with place.daemon() as early:
                assert await early.wait() == 1
                refused = await early.event("start refused")
                assert refused["next_step"].startswith("set the other value of [intake] consumers")
            await place.delayer("topology", "apply", **new)
            async with await aio_pika.connect(vhost) as connection, await connection.channel() as channel:
                await (await channel.get_queue("delays")).unbind("delayer.in", "#")
            await place.ready(0)
            assert await old.stop() == 0
            changed = await stack.enter_async_context(place.working(**new))
            await ledger.until(lambda: ledger.total() > 4 * A_SECOND)
        await ledger.all_back()
        assert await changed.stop() == 0
        verdict = await place.settle_accounts(ledger)
    print(verdict)
    verdict.assert_kept(repeats=True)
