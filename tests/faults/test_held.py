"""Held messages are retried after growing pauses, are always visible, survive every restart, and never block other
messages. They are published automatically once their destination exists."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import defaultdict
from datetime import datetime
from itertools import pairwise
from typing import Any

import pytest

from tests.faults.villain import delay_header, held_rows
from tests.support.daemon import DaemonProcess
from tests.support.place import Place, eventually
from tests.support.raw import VOID, Message, Props, Raw
from tests.support.servers import Postgres, RabbitMQ

FIRST_MS, LONGEST_MS = 300, 3_000
PROGRAM = (
    sys.executable,
    "-c",
    f"from delayer.core import backoff; backoff.FIRST_MS, backoff.LONGEST_MS = {FIRST_MS}, {LONGEST_MS}\n"
    "from delayer.intake import dispatch; dispatch.MAX_ATTEMPTS = 1_000\n"
    "from delayer.cli.main import main; main()",
)
"""The daemon with pauses from 0.3 to 3 s instead of 10 s to an hour, so that some of them fit into a test."""
ROUTES = [
    {"from": "delayer.in", "to": "delayer.out"},
    {"from": "h.missing", "to": "h.missing.out"},
    {"from": "h.unbound", "to": "h.unbound.out"},
]
DOOMED = (b"for an exchange that is missing", b"for one without bindings")


def attempts(daemon: DaemonProcess) -> dict[str, list[tuple[int, float]]]:
    """By route: which attempt failed, and when (seconds)."""
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for event in daemon.events:
        if event["event"] == "message held" and "attempts" in event:
            at = datetime.fromisoformat(event["timestamp"]).timestamp()
            found[event["route"]].append((event["attempts"], at))
    return found


def tried(at_least: int) -> Any:
    return lambda event: event.get("attempts", 0) >= at_least


@pytest.mark.deadline(150)
@pytest.mark.parametrize("mode", ["store", "native", "native alone"])
async def test_held_messages_survive_every_restart_and_are_delivered_in_the_end(mode: str) -> None:
    """In native mode with a store, the store holds them; without a store they wait in the cascade."""
    with RabbitMQ() as rabbitmq, Postgres() as postgres:
        store = None if mode == "native alone" else postgres.url(postgres.add_store())
        place = Place(mode.partition(" ")[0], rabbitmq.url(), store)
        await place.declare()
        rabbitmq.api("PUT", "/api/exchanges/%2F/h.unbound.out", {"type": "topic", "durable": True})
        there = place.environ | {"ROUTE": json.dumps(ROUTES)}
        async with place.ledger() as ledger, DaemonProcess(there, program=PROGRAM) as daemon:
            await daemon.ready()
            async with await Raw.connect(place.broker) as raw:
                props = Props(headers=(delay_header(700),), delivery_mode=2)
                for through, body in zip(("h.missing", "h.unbound"), DOOMED, strict=True):
                    await raw.publish(Message(through, b"k", props, body))
            await daemon.event("message held", where=tried(4))
            await ledger.publish(500, longest_ms=500)
            await ledger.all_back()
            for failed in attempts(daemon).values():
                check_pauses(failed)
            daemon.signal(signal.SIGKILL)
            await daemon.wait()
            await all_held(place)

            await daemon.start()
            more = await daemon.event("message held", where=tried(1), after=len(daemon.events))
            assert more["attempts"] >= 4, "it began to count anew"
            for server in {"store": (postgres, rabbitmq), "native": (), "native alone": (rabbitmq,)}[mode]:
                await asyncio.to_thread(rabbitmq.settle)
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
                await all_held(place)
            await mend(rabbitmq)
            arrived = await out(place)
            # Without a store a kill may repeat messages on their way back into the cascade.
            assert set(arrived) == set(DOOMED)
            assert place.store is None or len(arrived) == len(DOOMED)
            assert await daemon.stop() == 0, daemon.tail()
        if place.store is None:
            await eventually(place.standing, lambda standing: not standing)
            return
        assert not await bodies_held(place)
        counters = await place.conserved()
        assert counters["held"] == 0


def check_pauses(failed: list[tuple[int, float]]) -> None:
    """Check that each attempt comes after its pause, twice the last pause less up to a fifth. On a busy machine the log
    has the earlier attempt up to 0.15 s late."""
    assert [number for number, _ in failed] == list(range(failed[0][0], failed[0][0] + len(failed)))
    for (number, before), (_, after) in pairwise(failed):
        pause = min(FIRST_MS * 2 ** (number - 1), LONGEST_MS) / 1000
        assert pause * 0.8 - 0.15 <= after - before, f"attempt {number + 1} came after {after - before:.3f} s"
        assert after - before <= pause + 4.0, f"attempt {number + 1} came after {after - before:.3f} s"


async def all_held(place: Place) -> None:
    """Wait until the store holds them, or the cascade carries them to their next attempt."""
    if place.store is None:
        await eventually(place.standing, lambda standing: sum(standing.values()) >= len(DOOMED))
    else:
        await eventually(lambda: bodies_held(place), lambda held: held == set(DOOMED))


async def bodies_held(place: Place) -> set[bytes]:
    return {body for body, _ in await held_rows(place)}


async def mend(rabbitmq: RabbitMQ) -> None:
    """Create the missing exchange, queue and bindings."""
    rabbitmq.api("PUT", "/api/queues/%2F/late", {"durable": True})
    rabbitmq.api("PUT", "/api/exchanges/%2F/h.missing.out", {"type": "topic", "durable": True})
    for exchange in ("h.missing.out", "h.unbound.out"):
        rabbitmq.api("POST", f"/api/bindings/%2F/e/{exchange}/q/late", {"routing_key": "#"})


async def out(place: Place) -> list[bytes]:
    async with await Raw.connect(place.broker) as raw:
        inbox = await raw.inbox("late")
        await inbox.got(DOOMED, timeout=80)
        return [arrival.delivery.body for arrival in inbox.arrivals]


async def either(daemon: DaemonProcess, *names: str, after: int) -> None:
    """Wait for an event of one of these names."""
    await eventually(lambda: any(event["event"] in names for event in daemon.events[after:]))


@pytest.mark.deadline(150)
async def test_a_full_refused_queue_does_not_stop_good_messages(
    rabbitmq: RabbitMQ, vhost_name: str, vhost: str, store: str
) -> None:
    """If that queue is at its limit, bad messages stay in the intake queue, with a warning; the rest are delivered.
    Nothing is lost, and the daemon refuses the bad ones when there is room again."""
    place = await Place("store", vhost, store).declare()
    limit = {"pattern": r"^delays\.refused$", "apply-to": "queues", "priority": 1}
    limit |= {"definition": {"max-length": 1, "overflow": "reject-publish"}}
    rabbitmq.api("PUT", f"/api/policies/{vhost_name}/full", limit)
    bad = [b"bad %d" % number for number in range(20)]
    async with place.ledger() as ledger, place.working() as daemon, await Raw.connect(place.broker) as raw:
        props = Props(headers=((b"x-delay", VOID),), delivery_mode=2)
        waiting = list(bad)
        while not any(event["event"] == "consuming interrupted" for event in daemon.events):
            # One after another: a quorum queue takes a whole burst, and reports its limit only then.
            seen = len(daemon.events)
            await raw.publish(Message("delayer.in", b"k", props, waiting.pop(0)))
            await either(daemon, "message refused", "consuming interrupted", after=seen)
        await raw.publish(*(Message("delayer.in", b"k", props, body) for body in waiting))
        for _ in range(5):
            await ledger.publish(2_000, longest_ms=100)
        await ledger.all_back()
        said = next(event for event in daemon.events if event["event"] == "consuming interrupted")
        assert "exchange 'delays.refused'" in said["reason"]
        refused = await raw.inbox("delays.refused")
        await refused.got(bad, timeout=60)
        assert await daemon.stop() == 0, daemon.tail()
        assert not ledger.verdict().missing
        assert await place.standing() == {}
