"""A silent destination queue, such as a quorum queue without its majority: other destinations do not wait for it. Its
messages are held, and delivered when it answers again. A broker that does not answer at all does not cause held
messages."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Collection

import pytest

from tests.faults.villain import delay_header
from tests.support.daemon import DaemonProcess
from tests.support.place import Place, eventually
from tests.support.raw import Inbox, Message, Props, Raw
from tests.support.servers import Postgres, RabbitMQ
from tests.support.silent import silent

PROGRAM = (
    sys.executable,
    "-c",
    "from delayer.core import backoff; backoff.FIRST_MS, backoff.LONGEST_MS = 1_000, 15_000\n"
    "from delayer.cli.main import main; main()",
)
"""The daemon with pauses from 1 to 15 s instead of 10 s to an hour. Its ten attempts take longer than the silence."""
MODES = ("store", "native")
QUEUE = "h.mute"
ROUTES = [{"from": "delayer.in", "to": "delayer.out"}, {"from": "h.in", "to": "h.out"}]
AT_FIRST, LATER = 10, 15
MOST = 25.0
"""The largest lateness of a good message, once: the time of a publish, of its probe, and of this machine."""
AGAIN = 5.0
"""The largest lateness afterwards, in seconds."""


def furnish(rabbitmq: RabbitMQ, vhost: str) -> None:
    """Declare a second destination, next to that of the good messages."""
    rabbitmq.api("PUT", f"/api/exchanges/{vhost}/h.out", {"type": "topic", "durable": True})
    at = f"/api/queues/{vhost}/{QUEUE}"
    rabbitmq.api("PUT", at, {"durable": True, "arguments": {"x-queue-type": "quorum"}})
    rabbitmq.api("POST", f"/api/bindings/{vhost}/e/h.out/q/{QUEUE}", {"routing_key": "mute.#"})


def mute(number: int, delay_ms: int) -> Message:
    return Message("h.in", b"mute.x", Props(headers=(delay_header(delay_ms),), delivery_mode=2), b"m%d" % number)


@pytest.mark.long
@pytest.mark.deadline(360)
@pytest.mark.parametrize("delay_ms", [1_000, 0])
@pytest.mark.parametrize("mode", MODES)
async def test_other_destinations_do_not_wait_for_a_silent_one(
    mode: str, delay_ms: int, rabbitmq: RabbitMQ, vhost_name: str, vhost: str, store: str
) -> None:
    furnish(rabbitmq, vhost_name)
    place = await Place(mode, vhost, store if mode == "store" else None).declare()
    environ = place.environ | {"ROUTE": json.dumps(ROUTES)}
    async with (
        place.ledger() as ledger,
        DaemonProcess(environ, program=PROGRAM) as daemon,
        await Raw.connect(place.broker) as raw,
    ):
        await daemon.ready()
        async with silent(rabbitmq, vhost_name, QUEUE):
            await raw.publish(*(mute(number, delay_ms) for number in range(AT_FIRST)))
            for number in range(AT_FIRST, AT_FIRST + LATER):
                await ledger.publish(200, longest_ms=1_000)
                await raw.publish(mute(number, delay_ms))
                await asyncio.sleep(1.0)  # not to wait for anything: this is the load's pace
            await ledger.all_back(timeout=MOST)
            held = await daemon.event("message held")
            assert held["reason"].startswith("no confirm within 8 s: exchange 'h.out', key 'mute.x'")
            # By now the daemon knows the silent queue: its messages do not delay the rest.
            for number in range(1000, 1005):
                await raw.publish(mute(number, delay_ms))
                await ledger.publish(200, longest_ms=500)
                await ledger.all_back(timeout=AGAIN)
        inbox = await raw.inbox(QUEUE)
        wanted = [b"m%d" % number for number in (*range(AT_FIRST + LATER), *range(1000, 1005))]
        await inbox.got(wanted, timeout=120)
        await eventually(place.standing, lambda standing: not standing, timeout=120)
        assert await daemon.stop() == 0, daemon.tail()
        # A message in the store or in the cascade keeps its id, held or not. A message on its way in is read again, and
        # gets another id. In native mode this includes messages that entered the cascade during the first wait.
        known = [b"m%d" % number for number in range(AT_FIRST)]
        assert most_ids(inbox, known) <= (1 if delay_ms else 3)
        assert most_ids(inbox, wanted) <= (1 if mode == "store" and delay_ms else 3 - bool(delay_ms))
        await ledger.drained()
        verdict = ledger.verdict()
        print(f"{mode}, {delay_ms} ms: {verdict}; for the silent queue: {copies(inbox)}")
        assert not (verdict.missing or verdict.early or verdict.changed)
        if place.store:
            assert (await place.conserved())["held"] == 0


def copies(inbox: Inbox) -> Counter[int]:
    """The number of messages by their number of arrivals."""
    return Counter(Counter(arrival.delivery.body for arrival in inbox.arrivals).values())


def most_ids(inbox: Inbox, bodies: Collection[bytes]) -> int:
    """The largest number of ids of one of these messages. None came early."""
    ids: dict[bytes, set[object]] = {body: set() for body in bodies}
    for arrival in inbox.arrivals:
        assert arrival.at_ms >= arrival.due_ms
        if arrival.delivery.body in ids:
            ids[arrival.delivery.body].add(arrival.props.one(b"x-delayer-id"))
    return max(map(len, ids.values()))


@pytest.mark.long
@pytest.mark.deadline(180)
async def test_a_paused_broker_does_not_cause_holds() -> None:
    """The whole broker pauses for longer than two publishes may take: messages are late, but none is held or lost."""
    with RabbitMQ() as rabbitmq, Postgres() as postgres:
        place = await Place("store", rabbitmq.url(), postgres.url(postgres.add_store())).declare()
        async with place.ledger() as ledger, DaemonProcess(place.environ, program=PROGRAM) as daemon:
            await daemon.ready()
            await ledger.publish(2_000, longest_ms=8_000)
            await ledger.publish(500, longest_ms=20_000)
            await place.ready(0)
            await asyncio.to_thread(rabbitmq.pause)
            await asyncio.sleep(19)  # not to wait for anything: this is the pause
            await asyncio.to_thread(rabbitmq.resume)
            await ledger.all_back(timeout=60)
            assert await daemon.stop() == 0, daemon.tail()
            assert not [event for event in daemon.events if event["event"] == "message held"]
            assert [event for event in daemon.events if event["event"] == "release interrupted"]
            assert not ledger.verdict().missing
            assert (await place.conserved())["held"] == 0
