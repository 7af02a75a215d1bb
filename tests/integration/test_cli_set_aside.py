"""Refused messages and strays by the command line: listed, retried and dropped, on a real broker."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Iterator
from importlib import import_module
from urllib.parse import urlsplit

import pytest

from delayer.amqp.values import Delivery
from delayer.broker.pipelined_admin import DELAYS_FROM, pipelined_admin
from delayer.config.loading import load
from delayer.core.hold import Hold, HoldKind
from delayer.core.message import Parcel, Target
from delayer.format import reading
from delayer.format.envelope import HoldNote, envelope_properties
from delayer.set_aside import queues
from delayer.set_aside.change import SetAsideChange, queue_of
from delayer.set_aside.messages import Selection
from tests.integration.cli import Run, channel_to, ids, said, take
from tests.support.place import counted
from tests.support.raw import Message, Props, Raw, number, text
from tests.support.servers import RabbitMQ

QUEUE = b"delayer.delay-strays"


def envelope(number: int, reason: str, body: bytes = b"body") -> tuple[Parcel, bytes]:
    """A held message, and its properties among the strays."""
    now_ms = time.time_ns() // 1_000_000
    parcel = Parcel(now_ms, b"in", b"in", b"k", Target(b"out", b"k"), b"\0\0", body, None)
    held = HoldNote(Hold(HoldKind.RETURNED, reason), 10, None)
    return parcel, envelope_properties(parcel, b"%032x" % number, held)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer reads 6 messages ahead, in portions of 4."""
    import_module("delayer.cli.set_aside")  # It bounds --limit by MAX_LISTED when it is loaded.
    monkeypatch.setattr(queues, "MAX_LISTED", 6)
    monkeypatch.setattr(queues, "PORTION", 4)
    monkeypatch.setattr(queues, "MAX_NAMED", 3)


async def put_strays(raw: Raw, count: int) -> None:
    reasons = {n: "312" if n % 2 else "late: by 9 s" for n in range(count)}
    await raw.publish(*(Message("", QUEUE, envelope(n, why)[1], b"body") for n, why in reasons.items()))


@pytest.mark.words
@pytest.mark.usefixtures("few")
async def test_a_change_reaches_every_message(delayer: Run, vhost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer of the first six is full of messages that stay."""
    delayer("--mode", "native", "topology", "apply")

    def left() -> list[str]:
        return ids(delayer, "strays", "list", "--limit", "6")

    async with await Raw.connect(vhost) as raw:
        await put_strays(raw, 30)
        assert len(left()) == 6
        listed = delayer("strays", "list", "--limit", "6")
        assert "The queue has 30 strays; only the first 6 were looked at" in listed.stderr
        (far,) = ids(delayer, "strays", "list", f"id:{29:032x}")
        assert "Dropped: 1 of 1." in delayer("strays", "drop", far).stdout
        assert "Matched: 15 of 29." in delayer("strays", "drop", "--reason", "late", "--dry-run").stdout
        assert "Dropped: 15." in delayer("strays", "drop", "--reason", "late", "--yes").stdout
        unknown = delayer("strays", "drop", "id:0", expect=1)
        assert "0 of 1" in unknown.stdout and "id:0 is not in the queue" in unknown.stderr
        monkeypatch.setattr(queues, "MAX_LISTED", 100)
        assert set(ids(delayer, "strays", "list")) == {f"id:{n:032x}" for n in range(1, 29, 2)}
        assert "Dropped: 14." in delayer("strays", "drop", "--all", "--yes").stdout
        assert left() == []


@pytest.mark.parametrize("wanted", [Selection(), Selection(reason="312")])
async def test_the_figures_of_two_commands_at_once_add_up(delayer: Run, vhost: str, wanted: Selection) -> None:
    delayer("--mode", "native", "topology", "apply")
    async with await Raw.connect(vhost) as raw:
        await put_strays(raw, 20)
    settings = load(None, {}, {"broker.url": vhost, "mode": "native"})
    change = SetAsideChange(settings, "strays", "drop", wanted)
    counted = await change.count()
    await SetAsideChange(settings, "strays", "drop", Selection(frozenset({f"id:{1:032x}"}))).carry_out("me")
    result = await change.carry_out("me", counted)
    met = counted.messages - 1
    assert result.heading == f"Dropped: {met} of {counted.messages}"
    assert list(result.lines) == ["1 were no longer in the queue."]


@pytest.mark.usefixtures("few")
async def test_no_message_is_retried_twice(delayer: Run, vhost: str) -> None:
    """A retried message that is refused again is at the end of the queue."""
    delayer("topology", "apply")
    note = (b"x-delayer-refused", text("no delay")), (b"x-delayer-exchange", text("delayer.in"))
    note = (*note, (b"x-delayer-routing-key", text("k")))
    told: list[int] = []
    async with await Raw.connect(vhost) as raw:

        async def refuse(numbers: range) -> None:
            props = [
                Props(headers=(*note, (b"x-delayer-routing-key", text("k"))), message_id=b"%d" % n) for n in numbers
            ]
            await raw.publish(*(Message("", b"delays.refused", one, b"body") for one in props))

        async def add(messages: int) -> None:
            await refuse(range(100 + sum(told), 100 + sum(told) + messages))
            told.append(messages)

        await refuse(range(20))
        done = await queue_of(load(None, {}, {"broker.url": vhost}), "refused").change("retry", queues.ANY, add)
    assert (done.matched, done.changed, done.remaining) == (20, 20, [])
    assert sum(told) == 20 and max(told) <= 4, "in portions"
    assert len(await take(vhost, "delays")) == 20


@pytest.mark.words
@pytest.mark.usefixtures("few")
async def test_messages_that_stay_are_counted_and_the_first_ones_named(delayer: Run, vhost: str) -> None:
    delayer("topology", "apply")
    async with await Raw.connect(vhost) as raw:
        await raw.publish(*(Message("", b"delays.refused", Props(message_id=b"%d" % n), b"body") for n in range(20)))
    done = delayer("refused", "retry", "--all", "--yes", expect=1)
    assert "Published again: 0." in done.stdout
    assert done.stderr.count("stays refused") == 3 and "17 more stay there." in done.stderr


@pytest.mark.words
async def test_a_reason_selects_among_strays_without_an_id(delayer: Run, vhost: str) -> None:
    delayer("--mode", "native", "topology", "apply")
    newer = Props(headers=((b"x-delayer-envelope", number("l", 99)),), delivery_mode=2)
    async with await Raw.connect(vhost) as raw:
        await raw.publish(Message("", QUEUE, Props(delivery_mode=2), b"none"), Message("", QUEUE, newer, b"newer"))
    listed = json.loads(delayer("--mode", "native", "strays", "list", "--json").stdout)["messages"]
    reasons = {one["body"]: one["reason"] for one in listed}
    assert reasons.keys() == {"none", "newer"} and len(set(reasons.values())) == 2, reasons
    assert "Dropped: 1." in delayer("--mode", "native", "strays", "drop", "--reason", reasons["newer"], "--yes").stdout
    (left,) = json.loads(delayer("--mode", "native", "strays", "list", "--json").stdout)["messages"]
    assert left["body"] == "none"


def test_store_mode_has_none(delayer: Run) -> None:
    assert "There are no strays." in delayer("--mode", "store", "strays", "list").stdout
    assert "`delayer topology apply`" in delayer("--mode", "native", "strays", "list", expect=1).stderr


@pytest.mark.words
def test_only_the_beginning_of_a_large_stray_is_kept() -> None:
    parcel, properties = envelope(1, "312", b"x" * 1_000_000)
    delivery = Delivery(1, False, b"", QUEUE, properties, parcel.body)
    read = queues.read_stray(delivery, b"delayer.delay-delivery", b"delays.due", 10_000)
    shown = queues.SetAsideMessage.stray(delivery, read)
    assert len(pickle.dumps(shown)) < 1_000
    assert (shown.size, shown.reason) == (1_000_000, "312")


LIMIT = 20
"""Deliveries after which RabbitMQ 4 by default deletes a message of a quorum queue."""
LOOKS = LIMIT + 5
COUNT = 5
MANY = 100
"""RabbitMQ 3.10 returns more than 32 nacked messages in another order."""


@pytest.mark.parametrize("store", ["with a store", "without a store"])
@pytest.mark.parametrize("verb", ["refused", "strays"])
async def test_listing_neither_deletes_nor_reorders_messages(
    delayer: Run, vhost: str, rabbitmq: RabbitMQ, verb: str, store: str
) -> None:
    environ: dict[str, str | None] = {"DELAYER_MODE": "native"}
    if store == "without a store":
        environ["DELAYER_STORE__URL"] = None
    if rabbitmq.counts_only_failed_deliveries:  # then even a policy with such a limit is harmless
        rabbitmq.api(
            "PUT",
            f"/api/policies/{urlsplit(vhost).path[1:]}/limit",
            {"pattern": ".*", "definition": {"delivery-limit": LIMIT}, "apply-to": "queues"},
        )
    delayer("topology", "apply", **environ)
    async with await Raw.connect(vhost) as raw:
        strays = [Message("", QUEUE, envelope(n, "312")[1], b"%d" % n) for n in range(COUNT)]
        await raw.publish(*(refused_ones(COUNT) if verb == "refused" else strays))
        names = [f"id:delayer.in-{n}" if verb == "refused" else f"id:{n:032x}" for n in range(COUNT)]
        for _ in range(LOOKS):
            assert ids(delayer, verb, "list", **environ) == names


@pytest.fixture
def applied(delayer: Run) -> Iterator[Run]:
    delayer("topology", "apply")
    yield delayer


def refused_ones(count: int, exchange: str = "delayer.in", reason: str = "too long") -> list[Message]:
    """Refused messages as the daemon publishes them."""
    notes = {"who": "me", "x-delayer-refused": reason, "x-delayer-exchange": exchange,
             "x-delayer-routing-key": "orders.eu", "x-delayer-expiration": "600000"}  # fmt: skip
    found = []
    for n in range(count):
        headers = tuple((name.encode(), text(it)) for name, it in {**notes, "x-delayer-id": f"{exchange}-{n}"}.items())
        body = b"%s %d" % (exchange.encode(), n)
        found.append(Message("delays.refused", b"orders.eu", Props(headers=headers, delivery_mode=2), body))
    return found


async def test_refused_messages_are_listed_and_published_again(applied: Run, vhost: str, rabbitmq: RabbitMQ) -> None:
    told = {"DELAYER_BROKER__MANAGEMENT_URL": rabbitmq.management_url}
    await counted(rabbitmq, vhost)
    run = applied("refused", "list", **told)
    if rabbitmq.version < DELAYS_FROM:
        assert run.stdout == "There are no refused messages.\n"
    else:
        assert run.stdout == "No refused messages are ready.\n" and "up to 12 s ago" in run.stderr
    assert json.loads(applied("refused", "list", "--json", **told).stdout)["delayed"] == 0
    async with await Raw.connect(vhost) as raw:
        await raw.publish(*refused_ones(250), *refused_ones(3, "missing", "wrong"))
    assert len(ids(applied, "refused", "list", "--limit", "500")) == 253
    assert len(ids(applied, "refused", "list")) == 50
    assert ids(applied, "refused", "list", "id:missing-2") == ["id:missing-2"]
    wrong = ("refused", "list", "--reason", "wro", "--limit", "500")
    assert ids(applied, *wrong) == ["id:missing-0", "id:missing-1", "id:missing-2"]
    assert "the first 50 were looked at" in applied("refused", "list").stderr
    assert "Matched: 250 of 253." in applied("refused", "retry", "--reason", "long", "--dry-run").stdout
    assert "Published again: 1 of 1." in applied("refused", "retry", "id:delayer.in-7").stdout
    failed = applied("refused", "retry", "--all", "--yes", expect=1)
    assert "Published again: 249." in failed.stdout
    assert failed.stderr.count("stays refused: no route comes from its exchange 'missing'") == 3
    back = await take(vhost, "delays")
    assert sorted(one.body for one in back) == sorted(b"delayer.in %d" % n for n in range(250))
    for one in back:
        assert (one.exchange, one.routing_key, one.expiration) == ("delayer.in", "orders.eu", 600.0)
        # The broker's counts of redeliveries from a quorum queue.
        counts = {"x-delivery-count", "x-acquired-count"}
        assert one.headers.keys() - counts == {"who", "x-delayer-id"}
    assert len(ids(applied, "refused", "list")) == 3
    told = json.loads(applied("audit-log", "--json").stdout)
    assert [(one["verb"], one["messages"]) for one in told] == [("refused retry", 249), ("refused retry", 1)]


async def test_a_list_returns_once_its_messages_are_back_in_their_places(applied: Run, vhost: str) -> None:
    """RabbitMQ returns them a moment after it has closed the channel."""
    async with await Raw.connect(vhost) as raw, pipelined_admin(vhost, "test") as admin:
        await raw.publish(*refused_ones(MANY))
        refused = queue_of(load(None, {}, {"broker.url": vhost}), "refused")
        for _ in range(LOOKS):
            found = (await refused.find()).found
            assert [one.id for one in found] == [f"id:delayer.in-{n}" for n in range(MANY)]
            assert await admin.depths([refused.queue]) == {refused.queue: MANY}


async def test_a_retry_fixes_headers_and_reports_how_many_were_refused_again(applied: Run, vhost: str) -> None:
    mends = ("--delay", "10s", "--set-header", "tries:int=3", "--drop-header", "who")
    async with await Raw.connect(vhost) as raw, channel_to(vhost) as channel:
        await raw.publish(*refused_ones(3))
        assert "Refused again within 2 s: 0." in applied("refused", "retry", "id:delayer.in-1", *mends).stderr
        await (await channel.get_queue("delays.refused")).bind("delayer.in", "#")  # In place of a daemon.
        again = applied("refused", "retry", "id:delayer.in-2", "--drop-header", "who", expect=1)
        assert "Refused again within 2 s: 1." in again.stderr
    first, second = (said(one) for one in await take(vhost, "delays"))
    assert first == {"x-delayer-id": "delayer.in-1", "x-delay": 10_000, "tries": 3}
    assert second.keys() == {"x-delayer-id"}
    for forms, why in (
        ('["timestamp"]', "does not read x-delay"),
        ('["timestamp", "x-delay"]', "timestamp before x-d"),
    ):
        routes = f'[{{"from": "delayer.in", "delay_from": {forms}}}]'
        told = applied("refused", "retry", "id:delayer.in-0", "--delay", "5s", expect=1, DELAYER_ROUTE=routes)
        assert "id:delayer.in-0 stays refused: its route" in told.stderr
        assert why in told.stderr
    for header, why in ((f"n:int={1 << 63}", "an integer of 64 bits"), ("n" * 129 + "=", "128 bytes, found 129")):
        assert why in applied("refused", "retry", "id:delayer.in-0", "--set-header", header, expect=2).stderr
    one = json.loads(applied("audit-log", "--json").stdout)[-1]
    assert json.loads(one["asked"])["mended"] == {"delay_ms": 10_000, "headers": {"tries": 3}, "dropped": ["who"]}


async def test_large_messages_are_listed_without_keeping_their_bodies(applied: Run, vhost: str) -> None:
    """The daemon shows them on its page too, so it must not hold fifty messages of 100 MB in memory."""
    (one,) = refused_ones(1)
    async with await Raw.connect(vhost) as raw:
        await raw.publish(*(one._replace(body=b"\xc3\xa4" * 150_000) for _ in range(3)))
    settings = load(None, {}, {"broker.url": vhost})
    seen = await queue_of(settings, "refused").find(limit=2)
    found = seen.found
    assert (len(found), seen.depth) == (2, 3)
    assert {one.size for one in found} == {300_000}
    assert all(len(one.head) <= reading.PREVIEW + 1 for one in found)
    (told, *_) = json.loads(applied("refused", "list", "--json").stdout)["messages"]
    assert told["body_bytes"] == 300_000
    assert told["body"] == "\u00e4" * (reading.PREVIEW // 2)


async def test_refused_messages_are_dropped(applied: Run, vhost: str) -> None:
    async with await Raw.connect(vhost) as raw:
        await raw.publish(*refused_ones(5), *refused_ones(3, "other"))
    applied("refused", "drop", expect=2)
    applied("refused", "drop", "--all", "--route", "other", expect=2)
    assert "Dropped: 3." in applied("refused", "drop", "--route", "other", "--yes").stdout
    unknown = applied("refused", "drop", "unknown", "--yes", expect=1)
    assert "unknown is not in the queue. An id of delayer's" in unknown.stderr
    assert ids(applied, "refused", "list") == [f"id:delayer.in-{n}" for n in range(5)]
    assert "Dropped: 5." in applied("refused", "drop", "--all", "--yes").stdout
    assert "Matched: 0 of 0." in applied("refused", "drop", "--reason", "x", "--yes", expect=1).stdout
    assert await take(vhost, "delays.refused") == []
    assert await take(vhost, "delays") == []
