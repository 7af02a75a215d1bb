"""The crash table with a standby: the active daemon dies, or loses a connection, at each step of a batch whose keys are
folded; and the standby dies at each step of a release. The other daemon continues."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import unquote

import pytest

from delayer.amqp.values import Delivery
from tests.support.daemon import DaemonProcess
from tests.support.place import Place, eventually, killed_by_fault, stopped
from tests.support.proxy import Proxy
from tests.support.raw import Message, Props, Raw, now_ms, number, text
from tests.support.servers import RabbitMQ

KEYS = 20
UNDER_WAY = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'delayer park' AND state <> 'idle'"
"""The batches that wait for the rest of their transaction."""
DUE_MS = 6_000
FAR_MS = 600_000
DEATHS = DIES, BROKER_CUT, STORE_CUT = "dies", "loses the broker", "loses the store"
WHOLE = Counter({f"newest {n}": 1 for n in range(KEYS)})


def park(key: str, body: str, due_ms: int) -> Message:
    headers = (b"x-deliver-at", number("l", due_ms)), (b"x-delay-key", text(key))
    return Message("delayer.in", b"k", Props(headers=headers), body.encode())


def cancel(key: str) -> Message:
    return Message("delayer.in", b"k", Props(headers=((b"x-delay-cancel", text(key)),)), b"")


def batch(due_ms: int) -> list[Message]:
    """Of each pair of keys, one is replaced, and one is parked and cancelled."""
    return [
        operation
        for n in range(KEYS)
        for operation in (
            park(f"r{n}", f"old {n}", due_ms),
            park(f"c{n}", f"cancelled {n}", due_ms),
            park(f"r{n}", f"newest {n}", due_ms),
            cancel(f"c{n}"),
        )
    ]


@asynccontextmanager
async def inbox(place: Place) -> AsyncIterator[tuple[Raw, Counter[str]]]:
    """A publisher, and the bodies that came."""
    came = Counter[str]()
    async with place.ledger(consume=False), await Raw.connect(place.broker) as raw:

        def arrived(delivery: Delivery) -> None:
            came.update([delivery.body.decode()])
            raw.channel.ack(delivery.tag)

        await raw.channel.consume("ledger", arrived, lambda: None)
        yield raw, came


async def finished(place: Place, *daemons: DaemonProcess) -> dict[str, int]:
    """Wait until no messages are waiting, stop the daemons, and return the counters."""
    await eventually(place.standing, lambda standing: not standing, timeout=60)
    for daemon in daemons:
        assert await daemon.stop() == 0, daemon.tail()
    return await place.conserved()


@pytest.mark.deadline(120)
@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("point", ["intake.read", "park.copied", "park.committed", "intake.acked"])
async def test_the_active_daemon(rabbitmq: RabbitMQ, vhost: str, store: str, point: str, death: str) -> None:
    name, port = unquote(vhost.rpartition("/")[2]), int(store.rpartition(":")[2].partition("/")[0])
    async with Proxy(rabbitmq.port) as to_broker, Proxy(port) as to_store:
        through = {
            "BROKER__URL": rabbitmq.url(name, port=to_broker.port),
            "STORE__URL": store.replace(f":{port}/", f":{to_store.port}/"),
        }
        place = await Place("store", vhost, store).declare()
        fault = f"{point}:1" if death == DIES else f"{point}:1:stop"
        async with place.daemon(fault, **through) as active:
            await active.ready()
            async with place.daemon() as standby, inbox(place) as (raw, came):
                await standby.ready()
                await raw.publish(*batch(now_ms() + DUE_MS))
                if death == DIES:
                    await killed_by_fault(active)
                else:
                    await stopped(active)
                    (to_broker if death == BROKER_CUT else to_store).cut()
                    active.signal(signal.SIGCONT)
                await eventually(lambda: came, lambda seen: seen == WHOLE, timeout=60)
                left = [standby] if death == DIES else [active, standby]
                counters = await finished(place, *left)
                assert came == WHOLE
    assert counters["released"] == KEYS
    assert counters["parked"] == counters["released"] + counters["cancelled"]


@pytest.mark.deadline(120)
@pytest.mark.parametrize(("point", "copies"), [("release.claimed", 1), ("release.published", 2)])
async def test_the_standby(vhost: str, store: str, point: str, copies: int) -> None:
    """It releases messages that the active daemon parked long before they are due."""
    place = await Place("store", vhost, store).declare()
    async with place.daemon() as active:
        await active.ready()
        async with place.daemon(f"{point}:1") as standby, inbox(place) as (raw, came):
            await standby.ready()
            lanes = "SELECT count(DISTINCT owner) FROM lane"
            await eventually(lambda: place.ask(lanes), lambda owners: owners == 2)
            for n in range(KEYS):
                await raw.publish(park(f"r{n}", f"newest {n}", now_ms() + FAR_MS))
                await eventually(place.rows, lambda rows, n=n: rows == n + 1)  # A batch each, so the lanes take turns.
            owned = f"SELECT count(*) FROM message JOIN lane ON number = lane WHERE owner LIKE '%:{standby.pid}'"
            theirs = await eventually(lambda: place.ask(owned), bool)
            await place.delayer("reschedule", "--all", "--yes", "--at", "1s")
            await killed_by_fault(standby)
            await eventually(lambda: came, lambda seen: seen.keys() == WHOLE.keys(), timeout=60)
            counters = await finished(place, active)
    assert max(came.values()) <= copies
    assert sum(came.values()) <= KEYS + theirs * (copies - 1)
    assert counters["released"] == counters["parked"] == KEYS


@pytest.mark.deadline(120)
@pytest.mark.parametrize("second", [pytest.param("cancel", marks=pytest.mark.long), "replace"])
async def test_a_batch_that_reaches_the_store_after_those_of_the_next_daemon(
    rabbitmq: RabbitMQ, vhost: str, store: str, second: str
) -> None:
    """The active daemon loses the broker while its batch is on a slow line to the store."""
    name, port = unquote(vhost.rpartition("/")[2]), int(store.rpartition(":")[2].partition("/")[0])
    async with Proxy(rabbitmq.port) as to_broker, Proxy(port) as to_store:
        through = {
            "BROKER__URL": rabbitmq.url(name, port=to_broker.port),
            "STORE__URL": store.replace(f":{port}/", f":{to_store.port}/"),
        }
        place = await Place("store", vhost, store).declare()
        async with place.daemon(**through) as active:
            await active.ready()
            async with place.daemon() as standby, inbox(place) as (raw, came):
                await standby.ready()
                owners = "SELECT count(DISTINCT owner) FROM lane"
                await eventually(lambda: place.ask(owners), lambda found: found == 2)
                to_store.slow(delay=0.25)
                due_ms = now_ms() + DUE_MS
                await raw.publish(park("k", "old", due_ms))
                await eventually(lambda: place.ask(UNDER_WAY), lambda found: found > 0)
                await raw.publish(cancel("k") if second == "cancel" else park("k", "newest", due_ms))
                to_broker.cut()
                await standby.event("standby took over")
                await active.event("consuming interrupted", timeout=60)  # After the end of its batch.
                to_store.resume()
                await finished(place, active, standby)
    assert came == ({} if second == "cancel" else {"newest": 1})
