"""Hostile and awkward messages, alone and among good ones: each ends up where it should, and does not affect the
rest."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from urllib.parse import unquote

import pytest

from tests.faults import hostile
from tests.faults.hostile import CASES, FRAME, LARGEST, MODES, ROOMY, SILENT, STORE, Hostile
from tests.faults.villain import MUTE, ROUTES, STRAYS, Villain, assert_no_forged_line, delay_header, furnish
from tests.support.daemon import DaemonProcess
from tests.support.ledger import Ledger
from tests.support.place import Place
from tests.support.raw import Message, Props, text
from tests.support.servers import Postgres, RabbitMQ
from tests.support.silent import silent
from tests.support.verdict import Window

GOOD = 10_000
COPIES = 3
AT_ONCE = 15
SEED = 5
MANY = 32 << 20
"""A broker may pause for a body larger than this, in bytes."""

Cases = Mapping[str, Hostile]


def cases_of(mode: str) -> Cases:
    return {name: case for name, case in CASES.items() if mode in case.modes}


def among_the_silent(mode: str) -> Cases:
    """Without the cases that expire in five seconds: the intake queue waits eight seconds, and they would expire."""
    lasting = {name: case for name, case in cases_of(mode).items() if "expiration" not in name}
    return {**lasting, **SILENT}


@dataclass(frozen=True)
class Run:
    """The cases for one setup of the broker: each alone, and all of them among good ones."""

    alone: Callable[[str], Cases]
    among: Callable[[str], Cases]


ANYWHERE, BESIDE_SILENCE, WITH_ROOM = "anywhere", "beside-silence", "with-room"
RUNS: Mapping[str, Run] = {
    ANYWHERE: Run(cases_of, cases_of),
    BESIDE_SILENCE: Run(lambda _: SILENT, among_the_silent),
    WITH_ROOM: Run(lambda _: ROOMY, lambda mode: {**cases_of(mode), **ROOMY}),
}


@asynccontextmanager
async def scene(
    mode: str, rabbitmq: RabbitMQ, vhost: str, store: str, **more: str
) -> AsyncIterator[tuple[Place, DaemonProcess, Villain]]:
    """A daemon among good and bad destinations, and a villain who knows them."""
    via = furnish(rabbitmq, vhost)
    place = await Place(mode, rabbitmq.url(unquote(vhost)), store if mode == STORE else None, via_broker=via).declare()
    async with place.working(ROUTE=json.dumps(ROUTES), **more) as daemon, Villain.at(rabbitmq, vhost, place) as villain:
        yield place, daemon, villain


SceneOf = Callable[[str, str], AbstractAsyncContextManager[tuple[Place, DaemonProcess, Villain]]]


@pytest.fixture
def scene_of(rabbitmq: RabbitMQ, vhost_name: str, store: str) -> SceneOf:
    """The scene of one of the runs, in one of the modes."""

    @asynccontextmanager
    async def made(run: str, mode: str) -> AsyncIterator[tuple[Place, DaemonProcess, Villain]]:
        async with AsyncExitStack() as stack:
            broker, name = rabbitmq, vhost_name
            if run == WITH_ROOM:
                broker, name = RabbitMQ(config={"frame_max": FRAME, "max_message_size": LARGEST}), "%2F"
                stack.callback(broker.close)
                await asyncio.to_thread(broker.start)
            there = await stack.enter_async_context(scene(mode, broker, name, store))
            if run == BESIDE_SILENCE:
                await stack.enter_async_context(silent(broker, unquote(name), MUTE))
            yield there

    return made


def runs(*long: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("run", [pytest.param(run, marks=[pytest.mark.long][: run in long]) for run in RUNS])


@pytest.mark.deadline(120)
@pytest.mark.parametrize("mode", MODES)
@runs(BESIDE_SILENCE)
async def test_each_alone(run: str, mode: str, scene_of: SceneOf) -> None:
    """A good message follows each, and does not wait."""
    cases = RUNS[run].alone(mode)
    async with scene_of(run, mode) as (_, daemon, villain):
        for name, case in cases.items():
            await villain.publish(name, case)
            await villain.witness()
        ends = await villain.all_found()
        assert await daemon.stop() == 0, daemon.tail()
        villain.verify(ends)
        assert played(villain) == cases.keys()
        assert not [event for event in daemon.events if event["level"] == "error"]
        if any("a line of the log" in name for name in cases):
            assert_no_forged_line(daemon.events, daemon.stray_lines)


@pytest.mark.deadline(240)
@pytest.mark.parametrize("mode", MODES)
@runs(BESIDE_SILENCE, WITH_ROOM)
async def test_all_among_good_ones(run: str, mode: str, scene_of: SceneOf) -> None:
    """10,000 good ones with every bad one three times between them: the good ones arrive, once each."""
    cases = RUNS[run].among(mode)
    async with scene_of(run, mode) as (place, daemon, villain), place.ledger(SEED) as ledger:
        await mixed(cases, ledger, villain)
        await ledger.all_back()
        ends = await villain.all_found()
        assert await daemon.stop() == 0, daemon.tail()
        await ledger.drained()
        verdict = ledger.verdict()
        seen = Counter(one.end.value for found in ends.values() for one in found)
        print(f"{run}, {mode}: {verdict}; {len(cases)} kinds, {seen.total()} hostile: {dict(seen)}")
        given_back = run == BESIDE_SILENCE  # messages that wait for the silent queue at first
        villain.verify(ends, redelivered=given_back)
        assert played(villain) == cases.keys()
        verdict.assert_kept(redelivered=given_back)
        assert verdict.sent == GOOD
        if place.store:
            await place.conserved()


async def mixed(cases: Cases, ledger: Ledger, villain: Villain) -> None:
    """Publish both in random order."""
    order = [(name, copy) for name in cases for copy in range(COPIES)]
    random.Random(SEED).shuffle(order)

    async def mischief(some: Sequence[tuple[str, int]]) -> None:
        for name, copy in some:
            await villain.publish(name, cases[name], copy)

    published = 0
    for begin in range(0, len(order), AT_ONCE):
        good = GOOD * min(begin + AT_ONCE, len(order)) // len(order) - published
        published += good
        await asyncio.gather(ledger.publish(good, longest_ms=3_000), mischief(order[begin : begin + AT_ONCE]))


def played(villain: Villain) -> set[str]:
    return {name for name, _ in villain.sent.values()}


@pytest.mark.parametrize("mode", MODES)
async def test_bindings_in_a_circle_end_in_the_refused_queue(
    mode: str, rabbitmq: RabbitMQ, vhost_name: str, store: str
) -> None:
    """A route's destination, bound to the exchange of the same route: the copy arrives under another name."""
    async with scene(mode, rabbitmq, vhost_name, store) as (_, daemon, villain):
        rabbitmq.api("POST", f"/api/bindings/{vhost_name}/e/h.out/e/h.in", {"routing_key": "circle"})
        body = b"round and round"
        await villain.raw.publish(Message("h.in", b"circle", Props(headers=(delay_header(100),)), body))
        await villain.inbox.got([body])
        await villain.refused.got([body])
        await villain.witness()
        assert villain.inbox.counts[body] == villain.refused.counts[body] == 1
        assert await daemon.stop() == 0


async def test_replies_never_enter_delayers_own_queues(rabbitmq: RabbitMQ, vhost_name: str, store: str) -> None:
    """A cancel names the queue for its reply. A queue of delayer would treat the reply as a message, so the daemon does
    not send it there, and the cancel still applies."""
    async with scene(STORE, rabbitmq, vhost_name, store) as (place, daemon, villain):
        rabbitmq.api("PUT", f"/api/queues/{vhost_name}/h.answers", {"durable": True})
        queues = [b"delays", b"delays.refused", b"delays.due", STRAYS.encode(), b"delayer.delay-level-00"]
        for name in queues[2:]:  # left over from native mode
            rabbitmq.api("PUT", f"/api/queues/{vhost_name}/{name.decode()}", {"durable": True})
        answers = await villain.raw.inbox("h.answers")
        for queue in (*queues, b"h.answers"):
            props = Props(headers=((b"x-delay-cancel", text("k")),), reply_to=queue, delivery_mode=2)
            await villain.raw.publish(Message("h.in", b"k", props, b"cancel"))
        assert await answers.until(lambda: len(answers.arrivals) == 1)
        await villain.witness()
        assert await daemon.stop() == 0, daemon.tail()
        for name in queues:
            assert await place.depth(name.decode()) == 0, name
        assert not villain.refused.arrivals
        assert not [event for event in daemon.events if event["level"] != "info"]


@pytest.mark.long
@pytest.mark.deadline(400)
@pytest.mark.parametrize("mode", MODES)
async def test_the_largest_default_body_arrives(mode: str, template: str, postgres: Postgres) -> None:
    """16 MiB, or 128, among 10,000 good ones: the body arrives whole, and no other is lost. RabbitMQ 3.10 may stop for
    its 128 MiB longer than a publish may take: only then are some delivered twice, perhaps including the largest."""
    store = postgres.add_database(template=template)
    with RabbitMQ() as broker:
        case = hostile.delivered(delay_header(2000), size=broker.largest_body)
        too_large = hostile.turned_away(delay_header(1000), size=broker.largest_body + 1)

        async def mischief(villain: Villain) -> None:
            await villain.publish("largest", case)
            await villain.witness()
            await villain.publish("too large", too_large)

        async with (
            scene(mode, broker, "%2F", postgres.url(store)) as (place, daemon, villain),
            place.ledger(SEED) as ledger,
        ):
            begin_ms = time.time() * 1000
            await asyncio.gather(ledger.publish(GOOD, longest_ms=3_000), mischief(villain))
            await villain.all_found(timeout=200)
            ledger.account.windows = [Window(begin_ms, time.time() * 1000)]
            await ledger.all_back()
            await villain.witness()
            assert await daemon.stop() == 0, daemon.tail()
            await ledger.drained()
            stood_still = broker.largest_body > MANY
            ends = await villain.found()
            came = [
                one for found in ends.values() for _, _, one in found if one and len(one.delivery.body) == case.size
            ]
            print(f"{mode}: {case.size >> 20} MiB, {came[0].at_ms - came[0].due_ms:.0f} ms late, {len(came)} times")
            print(ledger.verdict())
            once = {body: found[:1] for body, found in ends.items()} if stood_still else ends
            villain.verify(once, redelivered=True)
            ledger.verdict().assert_kept(repeats=stood_still, redelivered=True)
            assert not [event for event in daemon.events if event["event"].endswith("lost")]
    postgres.drop_database(store)
