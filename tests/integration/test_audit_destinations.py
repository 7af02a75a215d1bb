"""Destinations checked on a real broker: the answers match its routing, and checking publishes nothing."""

from __future__ import annotations

import itertools
import socket
from typing import Any
from urllib.parse import quote, urlsplit

import aio_pika
from aio_pika.abc import AbstractChannel
from aio_pika.exceptions import ChannelClosed, DeliveryError

from delayer.broker.route_check import CheckedTarget, RouteVerdict, Verdict, check_targets, skip_targets
from tests.support.rabbitmq import RabbitMQ

KINDS = ("direct", "topic", "fanout", "headers")
KEYS = ("", "a", "b", "a.b", "a.b.c", ".", "a.", "b.c.d", "ü", "#", "*", "a.#")


def target(exchange: str | bytes, key: str | bytes, first_due_ms: int = 1_000, messages: int = 3) -> CheckedTarget:
    raw = [name.encode() if isinstance(name, str) else name for name in (exchange, key)]
    return CheckedTarget(raw[0], raw[1], messages, first_due_ms)


async def topology(channel: AbstractChannel) -> None:
    """Exchanges of every kind: bound to queues, to each other in a circle, to existing and missing alternates."""
    queue = await channel.declare_queue("somewhere", durable=True)
    last = await channel.declare_exchange("last", "fanout", durable=True)
    await queue.bind(last)
    await channel.declare_exchange("deaf", "fanout", durable=True)
    for kind in KINDS:
        for suffix, alternate in (("", None), ("-alt", "last"), ("-deaf", "deaf"), ("-gone", "gone")):
            arguments: dict[str, Any] = {"alternate-exchange": alternate} if alternate else {}
            await channel.declare_exchange(kind + suffix, kind, durable=True, arguments=arguments)
    for suffix in ("", "-alt", "-deaf", "-gone"):
        for pattern in ("a.*", "b.#", "#.c"):
            await queue.bind(f"topic{suffix}", pattern)
        await queue.bind(f"direct{suffix}", "a")
        await queue.bind(f"direct{suffix}", "ü")
    await queue.bind("fanout", "ignored")
    await queue.bind("headers", "", arguments={"x-match": "all"})
    behind = await channel.declare_exchange("behind", "topic", durable=True, arguments={"alternate-exchange": "last"})
    inner = await channel.get_exchange("topic")
    await inner.bind(behind, "a")
    await behind.bind(inner, "#")
    await channel.declare_exchange("inside", "fanout", durable=True, internal=True)
    await queue.bind("inside")


async def broker_takes(channel: AbstractChannel, exchange: str, key: str) -> bool | None:
    """Whether the broker routes a message; None for an exchange that closes the channel."""
    where = await channel.get_exchange(exchange, ensure=False) if exchange else channel.default_exchange
    try:
        await where.publish(aio_pika.Message(b""), key, mandatory=True)
    except DeliveryError:
        return False
    except ChannelClosed:
        return None
    return True


EXCHANGES = [*(kind + suffix for kind in KINDS for suffix in ("", "-alt", "-deaf", "-gone")), "behind", "", "amq.topic"]


async def test_every_answer_matches_the_broker(rabbitmq: RabbitMQ, vhost: str) -> None:
    pairs = list(itertools.product(EXCHANGES, (*KEYS, "somewhere")))
    async with await aio_pika.connect(vhost) as connection:
        channel = await connection.channel(on_return_raises=True)
        await topology(channel)
        before = await depth(channel)
        asked = await check_targets(vhost, rabbitmq.management_url, [target(*pair) for pair in pairs])
        assert await depth(channel) == before, "nothing was published to find out"
        answers = {(one.exchange.decode(), one.routing_key.decode()): answer for one, answer in asked.routes}
        assert asked.remarks == ()
        assert set(answers) == set(pairs)
        for exchange, key in pairs:
            verdict = answers[exchange, key].verdict
            if verdict not in (Verdict.UNKNOWN, Verdict.ALTERNATE):
                takes = await broker_takes(channel, exchange, key)
                assert verdict is Verdict.ROUTED if takes else verdict.bad, (exchange, key, verdict)
    certain = {exchange for (exchange, _), answer in answers.items() if answer.verdict is not Verdict.UNKNOWN}
    assert set(EXCHANGES) - certain == {"headers", "headers-alt", "headers-deaf", "headers-gone"}
    for suffix, alternate in (("-alt", "last"), ("-deaf", "deaf"), ("-gone", "gone")):
        assert answers[f"direct{suffix}", "b"] == RouteVerdict(Verdict.ALTERNATE, alternate)
    assert answers["topic", "b.c.d"].verdict is Verdict.ROUTED
    assert answers["topic", "a"].verdict is Verdict.UNROUTABLE


async def depth(channel: AbstractChannel) -> int | None:
    return (await channel.declare_queue("somewhere", durable=True, passive=True)).declaration_result.message_count


async def test_missing_closed_and_unknown_destinations(rabbitmq: RabbitMQ, vhost: str) -> None:
    async with await aio_pika.connect(vhost) as connection:
        channel = await connection.channel()
        await topology(channel)
        await channel.declare_queue("theirs", exclusive=True)
        wanted = {
            ("nowhere", "k"): Verdict.MISSING,
            ("", "nowhere"): Verdict.MISSING,
            ("", "theirs"): Verdict.ROUTED,
            ("", ""): Verdict.MISSING,
            ("inside", "k"): Verdict.CLOSED,
            ("headers-deaf", "k"): Verdict.UNKNOWN,
            ("", "somewhere\n"): Verdict.MISSING,
            ("topic\n", "a.b"): Verdict.MISSING,
            (b"\xff", "k"): Verdict.UNKNOWN,
            ("", b"\xff"): Verdict.UNKNOWN,
            ("nul\x00", "k"): Verdict.MISSING,
            ("direct", b"\xff\x00"): Verdict.UNROUTABLE,
            ("fanout", b"\xff\x00"): Verdict.ROUTED,
            ("", "amq.rabbitmq.reply-to.g1h2AA5yZXBseUAxMjM0NQ"): Verdict.UNKNOWN,
        }
        asked = await check_targets(vhost, rabbitmq.management_url, [target(*pair) for pair in wanted])
    found = {(one.exchange, one.routing_key): answer.verdict for one, answer in asked.routes}
    assert found == {(target(*pair).exchange, target(*pair).routing_key): verdict for pair, verdict in wanted.items()}


async def test_an_alternate_by_policy_counts(rabbitmq: RabbitMQ, vhost: str) -> None:
    name = quote(urlsplit(vhost).path[1:], safe="")
    async with await aio_pika.connect(vhost) as connection:
        await topology(await connection.channel())
        definition = {"pattern": "^direct", "apply-to": "exchanges", "definition": {"alternate-exchange": "last"}}
        rabbitmq.api("PUT", f"/api/policies/{name}/spare", definition)
        targets = [target("direct", "b"), target("direct-deaf", "b")]
        asked = await check_targets(vhost, rabbitmq.management_url, targets)
    alternates = {one.exchange: answer.way for one, answer in asked.routes}
    assert alternates == {b"direct": "last", b"direct-deaf": "deaf"}, "an argument comes first"


async def test_without_the_management_api_only_missing_exchanges_are_found(vhost: str) -> None:
    async with await aio_pika.connect(vhost) as connection:
        await topology(await connection.channel())
    asked = await check_targets(vhost, None, [target("topic", "a"), target("nowhere", "a"), target("", "somewhere")])
    assert [answer.verdict for _, answer in asked.routes] == [Verdict.ROUTED, Verdict.MISSING, Verdict.UNKNOWN]
    (remark,) = asked.remarks
    assert "broker.management_url" in remark


async def test_a_management_api_that_does_not_answer_is_reported(vhost: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://guest:s3cret@127.0.0.1:{unused.getsockname()[1]}"
        asked = await check_targets(vhost, url, [target("amq.topic", "a"), target("nowhere", "a")])
    assert {answer.verdict for _, answer in asked.routes} == {Verdict.UNKNOWN, Verdict.MISSING}
    (remark,) = asked.remarks
    assert "bindings could not be read" in remark
    assert "s3cret" not in remark


async def test_a_broker_out_of_reach_ends_the_questions() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"amqp://guest:s3cret@127.0.0.1:{unused.getsockname()[1]}/"
        asked = await check_targets(url, None, [target("x", "a"), target("", "q")])
    assert [answer.verdict for _, answer in asked.routes] == [Verdict.NOT_ASKED] * 2
    assert asked.counts == {"not asked": 6}
    assert any("could not be asked" in remark for remark in asked.remarks)
    assert "s3cret" not in str(asked.remarks)


async def test_a_broker_that_never_answers_costs_no_more_than_the_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"amqp://guest:guest@127.0.0.1:{silent.getsockname()[1]}/"
        asked = await check_targets(url, None, [target("x", "a")], seconds=0.3)
    assert [answer.verdict for _, answer in asked.routes] == [Verdict.NOT_ASKED]
    assert any("the time limit of 0.3 s ended" in remark for remark in asked.remarks)


async def test_the_soonest_are_queried_first_and_the_rest_counted(rabbitmq: RabbitMQ, vhost: str) -> None:
    targets = [target("", f"missing-{n}", first_due_ms=n) for n in range(300)]
    asked = await check_targets(vhost, rabbitmq.management_url, reversed(targets), most=200)
    assert [one.first_due_ms for one, _ in asked.routes] == list(range(300))
    assert [answer.verdict for _, answer in asked.routes] == [Verdict.MISSING] * 200 + [Verdict.NOT_ASKED] * 100
    assert asked.remarks == ("checked only the 200 soonest of 300 destinations",)


async def test_thousands_of_keys_of_one_exchange_are_one_look(rabbitmq: RabbitMQ, vhost: str) -> None:
    async with await aio_pika.connect(vhost) as connection:
        await topology(await connection.channel())
    targets = [target("topic-gone", f"{'a' if n % 2 else 'c'}.{n}") for n in range(50_000)]
    asked = await check_targets(vhost, rabbitmq.management_url, targets, seconds=20)
    assert asked.counts == {"routed": 75_000, "alternate": 75_000}


def test_destinations_that_were_not_asked() -> None:
    asked = skip_targets([target("x", "a")], "as it was told")
    assert (asked.counts, asked.remarks) == ({"not asked": 3}, ("as it was told",))
