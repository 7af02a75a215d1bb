"""Break one thing on the broker, and verify finds exactly that thing. It never changes anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, urlsplit

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel

from delayer.broker.admin import Admin
from delayer.broker.errors import BrokerUnreachable, TopologyFinding
from delayer.broker.management_api import NAMES_LENGTH, Management, Members
from delayer.broker.pipelined_admin import why_silent
from delayer.broker.route_check import _read_exchange
from delayer.broker.verify import BrokerPolicy, Verifier, bindings_from, policies_in_force, policies_of
from delayer.core.cascade import CASCADE_KINDS, Cascade, delivery_binding, due_topology, intake_topology
from delayer.core.topology import Queue, Topology, arguments
from delayer.imports.hold_queues import _queues
from tests.support.place import eventually
from tests.support.servers import RabbitMQ
from tests.support.topology import bound, declare

OURS = Cascade()
WHOLE = OURS.topology() + intake_topology() + due_topology(OURS)

Break = Callable[[AbstractChannel], Awaitable[Any]]


def everything(rabbitmq: RabbitMQ, vhost: str) -> list[Any]:
    """The whole vhost as the management API lists it, without figures that move by themselves."""
    name = quote(urlsplit(vhost).path[1:], safe="")
    return [
        rabbitmq.api("GET", f"/api/exchanges/{name}?columns=name,type,durable,arguments"),
        rabbitmq.api("GET", f"/api/queues/{name}?columns=name,durable,arguments"),
        rabbitmq.api("GET", f"/api/bindings/{name}"),
    ]


async def on_channel(vhost: str, action: Break) -> None:
    async with await aio_pika.connect(vhost) as connection, connection.channel() as channel:
        await action(channel)


async def look(rabbitmq: RabbitMQ, vhost: str, topology: Topology = WHOLE, *, told: bool) -> list[TopologyFinding]:
    """Verify with or without the management API, and check that it changed nothing."""
    before = everything(rabbitmq, vhost)
    async with await Admin.connect(vhost, management_url=rabbitmq.management_url if told else None) as admin:
        findings = await admin.verify(topology)
        depths = await admin.depths([queue.name for queue in topology.queues])
    assert everything(rabbitmq, vhost) == before
    assert not any(depths.values()), "no message stays behind"
    return findings


def brief(findings: list[TopologyFinding]) -> list[tuple[str, str, str]]:
    return [(finding.severity, finding.kind, finding.name) for finding in findings]


@pytest.mark.parametrize("kind", CASCADE_KINDS)
async def test_a_declared_topology_has_no_findings(rabbitmq: RabbitMQ, vhost: str, kind: str) -> None:
    cascade = Cascade(kind)  # type: ignore[arg-type]
    topology = cascade.topology() + intake_topology() + due_topology(cascade)
    await declare(vhost, topology)
    assert await look(rabbitmq, vhost, topology, told=True) == []
    assert brief(await look(rabbitmq, vhost, topology, told=False)) == [("unknown", "binding", "*")]


@pytest.mark.parametrize("told", [True, False])
async def test_an_empty_vhost_lacks_everything_and_stays_empty(rabbitmq: RabbitMQ, vhost: str, told: bool) -> None:
    errors = [finding for finding in await look(rabbitmq, vhost, told=told) if finding.severity == "error"]
    assert {finding.state for finding in errors} == {"missing"}
    names = [thing.name for thing in WHOLE.exchanges] + [thing.name for thing in WHOLE.queues]
    assert [finding.name for finding in errors] == names


def unbound(queue: str, source: str, key: str) -> Break:
    async def action(channel: AbstractChannel) -> None:
        await (await channel.get_queue(queue)).unbind(source, key)

    return action


def unbound_exchange(exchange: str, source: str, key: str) -> Break:
    async def action(channel: AbstractChannel) -> None:
        await (await channel.get_exchange(exchange)).unbind(source, key)

    return action


unbind_exchange = unbound_exchange(OURS.level(12), OURS.level(13), "*." * 14 + "0.#")


async def bind_level_queue_twice(channel: AbstractChannel) -> None:
    await (await channel.get_queue(OURS.level(3))).bind(OURS.level(5), "#")


async def bind_with_arguments(channel: AbstractChannel) -> None:
    await (await channel.get_queue("delays")).bind(OURS.level(5), "*." * 22 + "1.#", arguments={"x": "y"})


async def delete_queue(channel: AbstractChannel) -> None:
    await channel.queue_delete(OURS.level(5))


async def wrong_ttl(channel: AbstractChannel) -> None:
    name = OURS.level(5)
    right = next(dict(queue.arguments) for queue in WHOLE.queues if queue.name == name)
    await channel.queue_delete(name)
    queue = await channel.declare_queue(name, durable=True, arguments=right | {"x-message-ttl": 31_999})
    await queue.bind(name, "*." * 22 + "1.#")


async def no_alternate_exchange(channel: AbstractChannel) -> None:
    await channel.exchange_delete(OURS.delivery)
    exchange = await channel.declare_exchange(OURS.delivery, "topic", durable=True)
    await exchange.bind(OURS.level(0), "*." * 27 + "0.#")
    await (await channel.get_queue("delays.due")).bind(OURS.delivery, delivery_binding("delays.due"))


async def short_delivery_limit(channel: AbstractChannel) -> None:
    right = next(dict(queue.arguments) for queue in WHOLE.queues if queue.name == "delays")
    del right["x-delivery-limit"]
    await channel.queue_delete("delays")
    queue = await channel.declare_queue("delays", durable=True, arguments=right)
    await queue.bind("delayer.in", "#")


@pytest.mark.parametrize(
    ("action", "wanted"),
    [
        (unbound(OURS.level(13), OURS.level(13), "*." * 14 + "1.#"), ("binding", OURS.level(13), "1.#'", "nothing")),
        (unbind_exchange, ("binding", OURS.level(13), "0.#'", "nothing")),
        (
            unbound_exchange(OURS.delivery, OURS.level(0), "*." * 27 + "0.#"),
            ("binding", OURS.level(0), "exchange delayer.delay-delivery", "nothing"),
        ),
        (unbound("delays", "delayer.in", "#"), ("binding", "delayer.in", "queue delays with key '#'", "nothing")),
        (
            unbound("delays.due", OURS.delivery, delivery_binding("delays.due")),
            ("binding", OURS.delivery, "queue delays.due", "nothing"),
        ),
        (unbound(OURS.strays, OURS.strays, ""), ("binding", OURS.strays, f"queue {OURS.strays}", "nothing")),
        (bind_level_queue_twice, ("binding", OURS.level(5), "no other", f"{OURS.level(3)} with key '#'")),
        (bind_with_arguments, ("binding", OURS.level(5), "no other", "queue delays")),
        (delete_queue, ("queue", OURS.level(5), "x-message-ttl=32000", "nothing")),
        (
            lambda channel: channel.exchange_delete(OURS.level(5)),
            ("exchange", OURS.level(5), "durable topic", "nothing"),
        ),
        (wrong_ttl, ("queue", OURS.level(5), "x-message-ttl=32000", "current is '31999'")),
        (no_alternate_exchange, ("exchange", OURS.delivery, "alternate-exchange=", "inequivalent arg")),
        (short_delivery_limit, ("queue", "delays", "x-delivery-limit=1000000", "x-delivery-limit")),
    ],
)
async def test_verify_finds_exactly_the_broken_object(
    rabbitmq: RabbitMQ, vhost: str, action: Break, wanted: tuple[str, str, str, str]
) -> None:
    kind, name, expected, found = wanted
    await declare(vhost, WHOLE)
    await on_channel(vhost, action)
    (finding,) = await look(rabbitmq, vhost, told=True)
    assert (finding.severity, finding.kind, finding.name) == ("error", kind, name)
    assert expected in finding.expected
    assert found in finding.found


@pytest.mark.parametrize(
    ("action", "errors"),
    [
        (unbind_exchange, []),  # AMQP does not list bindings
        (delete_queue, [("error", "queue", OURS.level(5))]),
        (wrong_ttl, [("error", "queue", OURS.level(5))]),
    ],
)
async def test_findings_without_the_management_api(
    rabbitmq: RabbitMQ, vhost: str, action: Break, errors: list[tuple[str, str, str]]
) -> None:
    await declare(vhost, WHOLE)
    await on_channel(vhost, action)
    findings = brief(await look(rabbitmq, vhost, told=False))
    assert [finding for finding in findings if finding[0] == "error"] == errors
    assert ("unknown", "binding", "*") in findings


async def test_addresses_that_users_bind_are_no_findings(rabbitmq: RabbitMQ, vhost: str) -> None:
    await declare(vhost, WHOLE + Topology(queues=(Queue("a.b"), Queue("b"))))
    await declare(vhost, bound("a.b", OURS.delivery, delivery_binding("a.b")))
    assert await look(rabbitmq, vhost, told=True) == []
    await declare(vhost, bound("b", OURS.delivery, "#.b"))
    (finding,) = await look(rabbitmq, vhost, told=True)
    assert (finding.severity, finding.kind, finding.name) == ("note", "binding", OURS.delivery)
    assert "'#.b'" in finding.found


async def test_a_policy_that_shortens_delays_is_found(rabbitmq: RabbitMQ, vhost: str) -> None:
    await declare(vhost, WHOLE)
    name = quote(urlsplit(vhost).path[1:], safe="")
    harmless = {"pattern": "", "definition": {"alternate-exchange": "x"}, "apply-to": "exchanges", "priority": 9}
    kept: dict[str, object] = {"message-ttl": 500}
    if rabbitmq.version >= (4, 3):  # earlier brokers refuse such a policy
        kept |= {"delayed-retry-type": "all", "delayed-retry-min": 1000, "consumer-timeout": 60_000}
    short = {"pattern": "^delays$", "definition": kept, "apply-to": "queues"}
    await asyncio.to_thread(rabbitmq.api, "PUT", f"/api/policies/{name}/harmless", harmless)
    await asyncio.to_thread(rabbitmq.api, "PUT", f"/api/policies/{name}/short", short)
    (finding,) = await look(rabbitmq, vhost, told=True)
    assert (finding.severity, finding.kind, finding.name) == ("error", "policy", "delays")
    assert all(f"'{key}': " in finding.found for key in kept)


def policy(
    name: str, pattern: str = "", applies_to: str = "all", priority: int = 0, operator: bool = False
) -> BrokerPolicy:
    return BrokerPolicy(name, pattern, applies_to, priority, {}, operator)


@pytest.mark.parametrize(
    ("policies", "in_force"),
    [
        ([], []),
        ([policy("low", priority=1), policy("high", priority=2)], ["high"]),
        ([policy("high", priority=2), policy("low", priority=1)], ["high"]),
        ([policy("ours", priority=2), policy("theirs", operator=True)], ["theirs", "ours"]),
        ([policy("other", "^x"), policy("part", "lay")], ["part"]),
        ([policy("classic", applies_to="classic_queues")], []),
        ([policy("quorum", applies_to="quorum_queues")], ["quorum"]),
        ([policy("exchanges", applies_to="exchanges")], []),
        ([policy("unreadable", "(?<x")], ["unreadable"]),
    ],
)
def test_policies_in_force(policies: list[BrokerPolicy], in_force: list[str]) -> None:
    queue = Queue("delays", arguments({"x-queue-type": "quorum"}))
    assert [one.name for one in policies_in_force(policies, queue)] == in_force


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://guest:wr0ng@{at}", "refused the user"),
        ("http://guest:wr0ng@127.0.0.1:1", "Connection refused"),
        ("http://guest:guest@{at}/nothing/here", "answered 4"),
    ],
)
async def test_an_unreachable_management_api_is_reported_and_the_rest_is_checked(
    rabbitmq: RabbitMQ, vhost: str, url: str, reason: str
) -> None:
    await declare(vhost, WHOLE)
    await on_channel(vhost, delete_queue)
    address = url.format(at=f"127.0.0.1:{rabbitmq.management_port}")
    async with await Admin.connect(vhost, management_url=address) as admin:
        findings = await admin.verify(WHOLE)
    assert brief(findings) == [("error", "queue", OURS.level(5)), ("unknown", "binding", "*")]
    assert reason in findings[1].found
    assert "wr0ng" not in str(findings)


@pytest.mark.parametrize(
    ("members", "minority"),
    [
        ((3, 3), ""), ((3, 2), ""), ((3, 1), "1 of 3"), ((3, 0), "0 of 3"), ((2, 1), "1 of 2"), ((4, 2), "2 of 4"),
        ((1, 1), ""), ((1, 0), "0 of 1"), ((3, None), ""),
    ],
)  # fmt: skip
def test_minorities(members: tuple[int, int | None], minority: str) -> None:
    assert Members(*members).minority == minority


async def test_a_queue_whose_members_do_not_run_is_found(rabbitmq: RabbitMQ, vhost: str) -> None:
    """With and without the management API. With a majority, querying the members does not consume messages."""
    sources = intake_topology()
    (intake,) = (queue for queue in sources.queues if queue.name == "delays")
    classic = Topology(queues=(Queue("old", arguments({"x-queue-type": "classic"})),))
    await declare(vhost, sources + classic)
    management = Management(rabbitmq.management_url, urlsplit(vhost).path[1:])
    async with await aio_pika.connect(vhost) as connection, connection.channel() as channel:
        await channel.default_exchange.publish(aio_pika.Message(b"one"), "delays")
        assert await why_silent(vhost, intake) == ""
        async with (await channel.get_queue("delays")).iterator() as messages:
            message = await anext(messages)
            assert await why_silent(vhost, intake) == ""
            assert not message.redelivered
            assert "x-delivery-count" not in message.headers
            await message.ack()
    seen = await management.members(["delays", "old"])
    assert (seen["delays"][:2], seen["old"][:2]) == ((1, 1), (1, None))
    member = f"{{'{management.vhost}_delays', node()}}"
    rabbitmq.ctl("eval", f"ra:stop_server(quorum_queues, {member}).")
    silent = await why_silent(vhost, intake)
    async with await Admin.connect(vhost, management_url=rabbitmq.management_url) as admin:
        findings = await admin.verify(sources)
    rabbitmq.ctl("eval", f"ra:restart_server(quorum_queues, {member}).")
    await eventually(lambda: why_silent(vhost, intake), lambda reason: not reason)
    assert "a majority" in silent
    assert [(one.name, one.found, one.state) for one in findings] == [("delays", "0 of 1", "minority")]


OK = b"HTTP/1.0 200 OK\r\n\r\n"


@pytest.mark.parametrize(
    "told",
    [
        b"AMQP\0\0\x09\x01", b"HTTP/1.0 503 Unavailable\r\n\r\n<html>",
        *(OK + body for body in (b"<html>", b'{"error": "login required"}', b"{}", b"null", b"[1]", b"[{}]", b'["a"]')),
        OK + b'[{"name": 1, "source": 1, "pattern": 1}]', OK + b'{"type": "topic", "arguments": []}',
    ],
)  # fmt: skip
async def test_a_server_that_is_not_a_management_api_is_rejected(told: bytes) -> None:
    verifier = Verifier(SimpleNamespace(version=(4, 4)), WHOLE, None)  # type: ignore[arg-type]
    async with answering(told) as url:
        management = Management(url, "/")
        for read in (
            management.delayed(["a"]), bindings_from(management, "x"), policies_of(management),
            _read_exchange(management, "x"), verifier._down_findings(management), verifier._copy_findings(management),
            _queues(management),
        ):  # fmt: skip
            with pytest.raises(BrokerUnreachable, match=r"not RabbitMQ's management API|answered 503"):
                await read


@asynccontextmanager
async def answering(told: bytes) -> AsyncIterator[str]:
    """The URL of a server that answers each request with ``told``."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(told)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_an_answer_that_does_not_end_is_given_up() -> None:
    """The socket's timeout bounds only each read, and a daemon would wait for its topology."""

    async def trickle(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"[")
        with suppress(ConnectionError):
            while not leaving.is_set():
                writer.write(b" ")
                await writer.drain()
                await asyncio.wait([waiting], timeout=0.05)
        writer.close()
        left.set()

    leaving, left = asyncio.Event(), asyncio.Event()
    waiting = asyncio.create_task(leaving.wait())
    async with await asyncio.start_server(trickle, "127.0.0.1", 0) as server:
        management = Management(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "/", timeout=0.2)
        with pytest.raises(BrokerUnreachable, match=r"no whole answer within 0\.4 s"):
            await management.delayed(["a"])
        leaving.set()
        await left.wait()


async def test_a_server_that_does_not_answer_is_asked_once() -> None:
    """A command has a dozen questions, and each would wait for its whole timeout."""
    asked = 0

    async def silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await leaving.wait()
        writer.close()

    leaving = asyncio.Event()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        management = Management(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "/", timeout=0.2)
        for _ in range(3):
            with pytest.raises(BrokerUnreachable):
                await management.members(["a"])
        leaving.set()
    assert asked == 1


async def test_a_queue_without_counts_is_unknown() -> None:
    """With ``management.disable_stats`` a row has no counts, and neither does a new queue's."""
    rows = b'[{"name": "a"}, {"name": "b", "messages": 3, "messages_ready": 1, "messages_unacknowledged": 0}]'
    async with answering(OK + b'{"page": 1, "items": ' + rows + b"}") as url:
        assert await Management(url, "/").delayed(["a", "b"]) == {"a": None, "b": 2}


async def test_only_the_named_queues_are_read(rabbitmq: RabbitMQ, vhost: str) -> None:
    """Other applications may have thousands. Names have any character, and more of them than one request takes."""
    names = [*(f"{n}.+|(a)/b c%2F\\" for n in range(NAMES_LENGTH // 20)), "Delays"]
    queues = [Queue(name, arguments({"x-queue-type": "classic"})) for name in [*names, "other", "0"]]
    await declare(vhost, Topology(queues=tuple(queues)))
    management = Management(rabbitmq.management_url, urlsplit(vhost).path[1:])
    assert (await management.members([*names, "missing"])).keys() == set(names)


async def test_a_read_only_user_sees_existing_objects(rabbitmq: RabbitMQ, vhost: str) -> None:
    await declare(vhost, WHOLE)
    await on_channel(vhost, delete_queue)
    name = urlsplit(vhost).path[1:]
    await asyncio.to_thread(rabbitmq.add_user, "onlooker", "onlooker", vhost=name, read=".*")
    async with await Admin.connect(vhost.replace("guest:guest", "onlooker:onlooker")) as admin:
        findings = await admin.verify(WHOLE)
    assert [f.name for f in findings if f.severity == "error"] == [OURS.level(5)]
    assert len([f for f in findings if f.severity == "unknown"]) >= len(WHOLE.queues) - 1


def test_an_invalid_management_url_is_rejected_without_being_shown() -> None:
    with pytest.raises(ValueError, match="expected http://") as caught:
        Management("file:///etc/s3cret", "/")
    assert "s3cret" not in str(caught.value)


async def test_wrong_arguments_of_a_shared_cascade_are_found(rabbitmq: RabbitMQ, vhost: str) -> None:
    """Celery's own switch: broker_native_delayed_delivery_queue_type = "classic"."""
    cascade = Cascade("celery")
    classic = Topology(queues=(Queue(cascade.level(4), arguments({"x-queue-type": "classic"})),))
    await declare(vhost, classic)
    findings = await look(rabbitmq, vhost, cascade.topology(), told=True)
    (wrong,) = [finding for finding in findings if finding.state != "missing"]
    assert (wrong.kind, wrong.name) == ("queue", cascade.level(4))
