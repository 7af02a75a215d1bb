"""Hostile and awkward messages, alone and among good ones: each ends where it should, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from urllib.parse import unquote

import pytest

from tests.faults.hostile import EMPTY, MODES, SILENT, STORE, End, Hostile, cases_of
from tests.faults.place import Place
from tests.faults.villain import (
    MUTE,
    ROUTES,
    STRAYS,
    Villain,
    assert_no_forged_line,
    delay_header,
    furnish,
    turned_away,
    verify,
)
from tests.rig.daemon import DaemonProcess
from tests.rig.raw import Message, Props, Raw, text
from tests.rig.servers import Postgres, RabbitMQ
from tests.rig.silent import silent

GOOD = 10_000
COPIES = 3
AT_ONCE = 15
SEED = 5


@pytest.fixture
def vhost_name(rabbitmq: RabbitMQ) -> Iterator[str]:
    name = rabbitmq.add_vhost()
    yield name
    rabbitmq.drop_vhost(name)


@asynccontextmanager
async def scene(
    mode: str, rabbitmq: RabbitMQ, vhost: str, store: str, **more: str
) -> AsyncIterator[tuple[Place, DaemonProcess, Villain]]:
    """A daemon among good and bad destinations, and a villain who knows them."""
    via = furnish(rabbitmq, vhost)
    place = await Place(mode, rabbitmq.url(unquote(vhost)), store if mode == STORE else None, via_broker=via).declare()
    async with place.daemon(ROUTE=json.dumps(ROUTES), **more) as daemon:
        await daemon.ready()
        async with Villain.at(rabbitmq, vhost, place) as villain:
            yield place, daemon, villain


@pytest.mark.deadline(120)
@pytest.mark.parametrize("mode", MODES)
async def test_each_alone(mode: str, rabbitmq: RabbitMQ, vhost_name: str, store: str) -> None:
    """A good message behind each, which waits for nothing."""
    async with scene(mode, rabbitmq, vhost_name, store) as (_, daemon, villain):
        await each_alone(cases_of(mode), daemon, villain)
        assert_no_forged_line(daemon.events, daemon.stray_lines)


async def each_alone(cases: Mapping[str, Hostile], daemon: DaemonProcess, villain: Villain) -> None:
    bodies = {}
    for index, (name, case) in enumerate(cases.items()):
        bodies[name] = await villain.publish(name, case)
        await villain.witness(index)
    ends = await villain.all_found()
    assert await daemon.stop() == 0, daemon.tail()
    for name, case in cases.items():
        verify(name, case, ends[bodies[name]], sorts=villain.rabbitmq.sorts_headers)
    assert len(ends) == len(cases) + len(cases), "something came that nobody sent"
    assert not [event for event in daemon.events if event["level"] == "error"]


@pytest.mark.deadline(180)
@pytest.mark.parametrize("mode", MODES)
async def test_all_among_good_ones(mode: str, rabbitmq: RabbitMQ, vhost_name: str, store: str) -> None:
    """10,000 good ones with every bad one three times between them: the good ones arrive, once each."""
    async with scene(mode, rabbitmq, vhost_name, store) as (place, daemon, villain):
        await all_among_good_ones(cases_of(mode), place, daemon, villain)


async def all_among_good_ones(
    cases: Mapping[str, Hostile], place: Place, daemon: DaemonProcess, villain: Villain
) -> None:
    chance = random.Random(SEED)
    order = [(name, copy) for name in cases for copy in range(COPIES)]
    chance.shuffle(order)
    async with place.ledger(SEED) as ledger:
        bodies: dict[tuple[str, int], bytes] = {}
        published = 0

        async def mischief(some: Sequence[tuple[str, int]]) -> None:
            for name, copy in some:
                bodies[name, copy] = await villain.publish(name, cases[name], copy)

        for begin in range(0, len(order), AT_ONCE):
            good = GOOD * min(begin + AT_ONCE, len(order)) // len(order) - published
            published += good
            await asyncio.gather(ledger.publish(good, longest_ms=3_000), mischief(order[begin : begin + AT_ONCE]))
        await ledger.all_back()
        ends = await villain.all_found()
        assert await daemon.stop() == 0, daemon.tail()
        await ledger.drained()
        verdict = ledger.verdict()
        for name, copy in order:
            copies = COPIES if name == EMPTY else 1
            verify(name, cases[name], ends[bodies[name, copy]], copies, sorts=villain.rabbitmq.sorts_headers)
        assert sum(map(len, ends.values())) == len(order), "something came that nobody sent"
        print(f"{place.mode}: {verdict}; {len(order)} hostile: " + ", ".join(
            f"{sum(one.end is end for found in ends.values() for one in found)} {end.value}" for end in End
        ))  # fmt: skip
        verdict.assert_kept(redelivered=True)  # what stood beside a publish that was not taken
        assert verdict.sent == GOOD
        if place.store:
            await place.conserved()


@pytest.mark.long
@pytest.mark.deadline(120)
@pytest.mark.parametrize("mode", MODES)
async def test_a_queue_that_does_not_answer(mode: str, rabbitmq: RabbitMQ, vhost_name: str, store: str) -> None:
    """A good message behind each, and it comes."""
    async with (
        scene(mode, rabbitmq, vhost_name, store) as (_, daemon, villain),
        silent(rabbitmq, unquote(vhost_name), MUTE),
    ):
        await each_alone(SILENT, daemon, villain)


@pytest.mark.long
@pytest.mark.deadline(240)
@pytest.mark.parametrize("mode", MODES)
async def test_a_queue_that_does_not_answer_among_good_ones(
    mode: str, rabbitmq: RabbitMQ, vhost_name: str, store: str
) -> None:
    """And among all the other bad ones: everybody else's messages come, and once."""
    async with (
        scene(mode, rabbitmq, vhost_name, store) as (place, daemon, villain),
        silent(rabbitmq, unquote(vhost_name), MUTE),
    ):
        # What expires in five seconds does so in the intake queue, which stands still for eight at first.
        cases = {name: case for name, case in cases_of(mode).items() if "expiration" not in name}
        await all_among_good_ones(cases | SILENT, place, daemon, villain)


@pytest.mark.deadline(90)
@pytest.mark.parametrize("mode", MODES)
async def test_delayed_five_times_over(mode: str, rabbitmq: RabbitMQ, vhost_name: str, store: str) -> None:
    """Sent in again as it came out, with a new delay: it comes every time, and its headers do not grow."""
    async with scene(mode, rabbitmq, vhost_name, store) as (_, daemon, villain):
        props = Props(headers=(delay_header(1000), (b"trace", delay_header(5)[1])), message_id=b"m", delivery_mode=2)
        sizes, ids = set(), set()
        for turn in range(5):
            body = b"again %d" % turn
            await villain.raw.publish(Message("h.in", b"inbox", props, body))
            await villain.inbox.got([body])
            arrival = villain.inbox.only(body)
            assert arrival.at_ms >= arrival.due_ms
            came = arrival.props
            ids.add(came.one(b"x-delayer-id"))
            sizes.add(len(came.headers or ()))
            assert came.one(b"trace") == props.one(b"trace")
            props = came.without(b"x-delay").adding(delay_header(1000))
        assert len(sizes) == 1, sizes
        assert len(ids) == 5, ids
        assert await daemon.stop() == 0


@pytest.mark.parametrize("mode", MODES)
async def test_bindings_in_a_circle_end_in_the_refused_queue(
    mode: str, rabbitmq: RabbitMQ, vhost_name: str, store: str
) -> None:
    """A route's destination, bound to the exchange of the same route: the copy comes in under another name."""
    async with scene(mode, rabbitmq, vhost_name, store) as (_, daemon, villain):
        rabbitmq.api("POST", f"/api/bindings/{vhost_name}/e/h.out/e/h.in", {"routing_key": "circle"})
        body = b"round and round"
        await villain.raw.publish(Message("h.in", b"circle", Props(headers=(delay_header(100),)), body))
        await villain.inbox.got([body])
        await villain.refused.got([body])
        await villain.witness(0)
        assert villain.inbox.counts[body] == villain.refused.counts[body] == 1
        assert await daemon.stop() == 0


async def test_no_reply_enters_what_is_delayers_own(rabbitmq: RabbitMQ, vhost_name: str, store: str) -> None:
    """A cancel names the queue that is to hear of it. One of delayer's own would take the reply for a message: it is
    not sent there, and the cancel stands."""
    async with scene(STORE, rabbitmq, vhost_name, store) as (place, daemon, villain):
        rabbitmq.api("PUT", f"/api/queues/{vhost_name}/h.answers", {"durable": True})
        queues = [b"delays", b"delays.refused", b"delays.due", STRAYS.encode(), b"delayer.delay-level-00"]
        for name in queues[2:]:  # of another time, in native mode
            rabbitmq.api("PUT", f"/api/queues/{vhost_name}/{name.decode()}", {"durable": True})
        answers = await villain.raw.inbox("h.answers")
        for queue in (*queues, b"h.answers"):
            props = Props(headers=((b"x-delay-cancel", text("k")),), reply_to=queue, delivery_mode=2)
            await villain.raw.publish(Message("h.in", b"k", props, b"cancel"))
        assert await answers.until(lambda: len(answers.arrivals) == 1)
        await villain.witness(0)
        assert await daemon.stop() == 0, daemon.tail()
        for name in queues:
            assert await place.depth(name.decode()) == 0, name
        assert not villain.refused.arrivals
        assert not [event for event in daemon.events if event["level"] != "info"]


async def test_a_content_class_that_nobody_knows(rabbitmq: RabbitMQ, vhost_name: str, store: str) -> None:
    """The broker ends the publisher's connection; the daemon never hears of it."""
    async with scene(STORE, rabbitmq, vhost_name, store) as (place, daemon, villain):
        async with await Raw.connect(place.broker) as raw:
            assert await turned_away(raw, Message("h.in", b"k", Props(), b"class 61"), content_class=61)
        await villain.witness(0)
        assert await daemon.stop() == 0


@pytest.mark.deadline(90)
@pytest.mark.parametrize("mode", MODES)
async def test_as_large_as_a_broker_lets_them_be(mode: str, template: str, postgres: Postgres) -> None:
    """A broker with frames of 4 MB takes header tables of 1 MB; its largest body comes back whole."""
    largest = 2 << 20
    store = postgres.add_database(template=template)
    with RabbitMQ(config={"frame_max": 4 << 20, "max_message_size": largest}) as roomy:
        async with scene(mode, roomy, "%2F", postgres.url(store)) as (_, daemon, villain):
            table = (delay_header(1000), (b"large", text("v" * 1_000_000)))
            sizes = {b"large table": b"", b"largest body": b"\xce" * (largest - len(b"largest body"))}
            for name, rest in sizes.items():
                headers = table if not rest else table[:1]
                await villain.raw.publish(Message("h.in", b"k", Props(headers=headers, delivery_mode=2), name + rest))
            case = Hostile(End.TURNED_AWAY, headers=table[:1], body=b"\xce" * largest)
            await villain.publish("too large", case)
            bodies = [name + rest for name, rest in sizes.items()]
            await villain.inbox.got(bodies)
            for body in bodies:
                villain.inbox.only(body)
            assert villain.inbox.only(b"large table").props.one(b"large") == text("v" * 1_000_000)
            assert await daemon.stop() == 0
    postgres.drop_database(store)


@pytest.mark.long
@pytest.mark.deadline(300)
@pytest.mark.parametrize("mode", MODES)
async def test_the_largest_body_that_brokers_take_by_default(mode: str, template: str, postgres: Postgres) -> None:
    """16 MiB, or 128: whole, and nobody else is lost beside it."""
    store = postgres.add_database(template=template)
    with RabbitMQ() as broker:
        async with scene(mode, broker, "%2F", postgres.url(store)) as (_, daemon, villain):
            name = b"largest"
            body = name + b"\xce" * (broker.largest_body - len(name))
            props = Props(headers=(delay_header(2000),), delivery_mode=2)
            await villain.raw.publish(Message("h.in", b"k", props, body))
            await villain.witness(0)
            await villain.inbox.got([body], timeout=200)
            arrival = villain.inbox.only(body)
            print(f"{mode}: {len(body) >> 20} MiB, {arrival.at_ms - arrival.due_ms:.0f} ms late")
            assert arrival.at_ms >= arrival.due_ms
            case = Hostile(End.TURNED_AWAY, headers=(delay_header(1000),), body=b"\xce" * broker.largest_body)
            await villain.publish("too large", case)
            await villain.witness(1)
            assert await daemon.stop() == 0, daemon.tail()
            assert not [event for event in daemon.events if event["event"].endswith(("lost", "interrupted"))]
    postgres.drop_database(store)
