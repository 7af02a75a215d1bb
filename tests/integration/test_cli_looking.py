"""Looking at messages and acting on them, by the command line, on a real store and a real broker."""

from __future__ import annotations

import json
import pickle
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from delayer.amqp.values import Delivery
from delayer.broker.pipelined_admin import DELAYS_FROM, pipelined_admin
from delayer.config.loading import load
from delayer.core.filters import read_token
from delayer.core.hold import Hold, HoldKind
from delayer.core.message import Parcel, Target
from delayer.core.readable import instant
from delayer.core.units import DAY_MS
from delayer.daemon.set_aside import SetAsideChange, queue_of
from delayer.format import reading
from delayer.format.envelope import HoldNote, envelope_properties
from delayer.intake import set_aside
from delayer.intake.set_aside import Selection
from delayer.store.admin import detail
from tests.integration.cli import Run, channel_to, ids, said, take
from tests.support.place import counted
from tests.support.raw import Message, Props, Raw, number, text
from tests.support.rows import compact, conserved, waiting
from tests.support.servers import RabbitMQ
from tests.support.store import opened, owned, parcel, sql
from tests.unit.cli.test_start import STATUS, STORE, loaded

HEADERS = Props(headers=((b"x-delay", number("l", 5)), (b"customer", text("7"))), delivery_mode=2, message_id=b"m-1")

UNBOUND = Hold(HoldKind.RETURNED, "no queue is bound")


def order(due_ms: int, body: bytes, **more: object) -> Parcel:
    return parcel(due_ms, body, properties=HEADERS.encode(), **more)


async def filled(database: str) -> tuple[int, dict[bytes, str]]:
    """Five messages: one soon, one with a key, one in a segment, one far away, one held. Returns now, and their ids."""
    async with opened(database) as place, owned(place) as [lane], sql(database) as admin:
        now = place.now_upper_ms()
        await place.park(lane, [parcel(now + 20 * DAY_MS, b"packed")], [])
        assert len(await compact(admin)) == 1
        parcels = [order(now + DAY_MS, b"soon"), parcel(now + 2 * DAY_MS, b"keyed", key=b"order-1")]
        await place.park(lane, [*parcels, parcel(now + 500 * DAY_MS, b"far")], [])
        await place.hold(lane, [(parcel(now, b"held"), UNBOUND)])
        names = {one.body: f"id:{one.id}@{one.due_us // 1000}" for one in (await waiting(admin)).values()}
        names |= {body: f"id:{id_}@{now}" for body, id_ in await admin.fetch("SELECT body, id FROM held")}
        names[b"packed"] = f"id:1@{now + 20 * DAY_MS}"
        return now, names


async def test_list(delayer: Run, database: str) -> None:
    assert delayer("list").stdout == "No messages wait.\n"
    assert delayer("list", "--route", "x").stdout.startswith("No messages match.\n")
    _, of = await filled(database)
    whole = [of[b"soon"], of[b"keyed"], of[b"packed"], of[b"far"]]
    assert ids(delayer, "list") == whole
    assert ids(delayer, "list", "--header", "customer=7") == [of[b"soon"]]
    assert ids(delayer, "list", "--delay-key", "order-1") == [of[b"keyed"]]
    assert ids(delayer, "list", "--due-before", "36h") == [of[b"soon"]]
    tomorrow = (datetime.now(UTC) + timedelta(hours=36)).isoformat()
    assert ids(delayer, "list", "--due-after", tomorrow, "--limit", "2") == whole[1:3]
    assert ids(delayer, "list", "--route", "nobody's") == []
    named = delayer("list", of[b"packed"], of[b"soon"].partition("@")[0], of[b"held"], "--json")
    assert [one["id"] for one in json.loads(named.stdout)["messages"]] == [of[b"soon"], of[b"packed"]]
    assert f"{of[b'held']} is not waiting" in named.stderr
    delayer("list", of[b"soon"], "--route", "r", expect=2)
    seen, after = [], None
    while after is not None or not seen:
        page = json.loads(delayer("list", "--limit", "1", "--json", *(["--after", after] if after else [])).stdout)
        seen += [one["id"] for one in page["messages"]]
        after = page["after"]
    assert seen == whole
    table = delayer("list").stdout.splitlines()
    assert [line.split()[0] for line in table[1:]] == whole
    assert table[3].split()[-1] == "1", "the segment"
    due = instant(read_token(of[b"soon"]).due_ms)
    assert table[1].split()[1] == due
    assert re.search(rf"^due +{due}, in", delayer("show", of[b"soon"]).stdout, re.MULTILINE)
    assert f"next due in the store: {due} (in" in delayer("status").stdout


@pytest.mark.words
async def test_show(delayer: Run, database: str, tmp_path: Path) -> None:
    _, of = await filled(database)
    shown = delayer("show", of[b"soon"]).stdout
    for piece in ("waiting", "customer", "string", "x-delay", "int64", "m-1", "body: 4 bytes", "soon", "published to"):
        assert piece in shown
    for body, where in ((b"keyed", "waiting"), (b"packed", "segment"), (b"held", "held"), (b"far", "waiting")):
        for name in (of[body], of[body].partition("@")[0]):
            found = json.loads(delayer("show", name, "--json").stdout)
            assert (found["where"], found["body"], found["id"]) == (where, body.decode(), of[body])
            assert (found["parked_ms"] is None) == (where == "held")
    assert delayer("show", of[b"far"], "--body").stdout_bytes == b"far"
    assert "no queue is bound" in delayer("show", of[b"held"]).stdout
    absent = delayer("show", "999", expect=1).stderr
    assert "message_id 999 is not in the store" in absent and "such as id:48213." in absent
    assert "`delayer list --delay-key 999`" in absent
    assert "the part before the @" in delayer("show", of[b"far"].partition("@")[0] + "@5", expect=1).stderr
    delayer("show", "", expect=1)
    for name in ("m-9", "999", "id:999"):
        assert f"`delayer refused list {name}` shows it" in delayer("show", name, expect=1).stderr


async def test_cancel(delayer: Run, database: str) -> None:
    _, of = await filled(database)
    for wrong in ([], ["1", "--all"], ["1", "--delay-key", "k"]):
        delayer("cancel", *wrong, expect=2)
    assert "no terminal to ask at" in delayer("cancel", "--all", expect=2).stderr
    assert "Matched: 1." in delayer("cancel", "--delay-key", "order-1", "--dry-run").stdout
    assert "Cancelled: 1." in delayer("cancel", "--delay-key", "order-1", "--yes").stdout
    assert "Matched: 0." in delayer("cancel", "--delay-key", "order-1", "--yes", expect=1).stdout
    names = (of[b"packed"], of[b"held"], of[b"soon"], "id:4711")
    asked = delayer("cancel", *names, "--dry-run", expect=1)
    assert "Matched: 3 of 4." in asked.stdout
    assert "id:4711 is not in the store" in asked.stderr
    where = json.loads(delayer("reschedule", *names[:3], "--by", "1h", "--dry-run", "--json").stdout)
    assert where["found"] == {of[b"packed"]: "segment", of[b"held"]: "held", of[b"soon"]: "waiting"}
    assert "Cancelled: 2 of 2." in delayer("cancel", of[b"packed"], of[b"held"]).stdout
    late = delayer("cancel", of[b"packed"], of[b"soon"], expect=1)
    assert "Cancelled: 1 of 2." in late.stdout
    assert f"{of[b'packed']} is not in the store" in late.stderr
    assert "or never parked" in delayer("cancel", "id:777777", expect=1).stderr
    found = json.loads(delayer("cancel", "--all", "--yes", "--json").stdout)
    assert found == {"heading": "Cancelled: 1", "done": 1, "lines": [], "found": {}}
    assert ids(delayer, "list") == []
    async with sql(database) as admin:
        assert (await conserved(admin))["cancelled"] == 5
    told = json.loads(delayer("audit-log", "--json").stdout)
    assert [one["messages"] for one in told] == [1, 0, 1, 2, 1]
    assert {one["verb"] for one in told} == {"cancel"}
    assert json.loads(told[-1]["asked"]) == {"key": "order-1"}
    assert "@" in told[0]["who"]
    assert "order-1" in delayer("audit-log").stdout


async def test_reschedule(delayer: Run, database: str) -> None:
    now, of = await filled(database)
    delayer("reschedule", of[b"soon"], expect=2)
    delayer("reschedule", of[b"soon"], "--at", "1h", "--by", "1h", expect=2)
    at = datetime.fromtimestamp(now // 1000, UTC) + timedelta(days=3)
    at_ms = int(at.timestamp()) * 1000
    told = delayer("reschedule", of[b"soon"], of[b"packed"], "--at", at.isoformat()).stdout
    assert "Rescheduled: 2 of 2." in told
    name = of[b"soon"].partition("@")[0]
    delayer("reschedule", f"{name}@{at_ms}", "--by", "1h")
    assert f"{name}@{at_ms + 3_600_000}" in ids(delayer, "list")
    delayer("reschedule", name, "--by", "-1h")
    assert "Matched: 1." in delayer("reschedule", "--delay-key", "order-1", "--by", "-1d", "--dry-run").stdout
    assert "Rescheduled: 1." in delayer("reschedule", "--delay-key", "order-1", "--by", "-1d", "--yes").stdout
    moved = {one.partition("@")[0]: int(one.partition("@")[2]) for one in ids(delayer, "list")}
    assert moved == {
        of[b"soon"].partition("@")[0]: at_ms,
        "id:1": at_ms,
        of[b"keyed"].partition("@")[0]: now + DAY_MS,
        of[b"far"].partition("@")[0]: now + 500 * DAY_MS,
    }
    assert "try the part before the @" in delayer("reschedule", of[b"soon"], "--by", "1h", expect=1).stderr
    async with sql(database) as admin:
        await conserved(admin)


@pytest.mark.words
async def test_held(delayer: Run, database: str) -> None:
    assert "No messages are held." in delayer("held", "list").stdout
    _, of = await filled(database)
    assert "no queue is bound" in delayer("held", "list").stdout
    assert ids(delayer, "held", "list") == [of[b"held"]]
    assert ids(delayer, "held", "list", "--route", "unknown") == []
    async with sql(database) as admin:
        await admin.execute("UPDATE held SET attempts = 3")
    assert "To be tried again now: 1." in delayer("held", "retry", "--all", "--yes").stdout
    async with sql(database) as admin:
        assert await admin.fetchval("SELECT retry_at < now() + interval '1 second' FROM held")
        assert await admin.fetchval("SELECT attempts FROM held") == 1, "the count begins anew"
    assert "Matched: 1." in delayer("held", "drop", "--all", "--dry-run").stdout
    missing = delayer("held", "drop", of[b"held"], "id:999", expect=1)
    assert "Dropped: 1 of 2." in missing.stdout
    assert "id:999 is not held.\n" in missing.stderr
    assert ids(delayer, "held", "list") == []
    told = json.loads(delayer("audit-log", "--json").stdout)
    assert [(one["verb"], one["messages"]) for one in told] == [("held drop", 1), ("held retry", 1)]
    async with sql(database) as admin:
        assert (await conserved(admin))["cancelled"] == 1


async def test_many_held_ones_are_acted_on_page_by_page(delayer: Run, database: str) -> None:
    """There may be millions, so at most one page of them is in memory; each is handled once."""
    async with opened(database) as place, owned(place) as [lane]:
        now = place.now_upper_ms()
        await place.hold(lane, [(parcel(now, b"%d" % n), UNBOUND) for n in range(2_500)])
    assert "To be tried again now: 2,500." in delayer("held", "retry", "--all", "--yes").stdout
    assert "Dropped: 2,500." in delayer("held", "drop", "--all", "--yes").stdout


def test_native_mode_names_its_limits(delayer: Run) -> None:
    nothing = delayer("--mode", "native", "list", DELAYER_STORE__URL=None, expect=2)
    assert "no store is configured" in nothing.stderr
    assert "cascade" in delayer("--mode", "native", "list").stderr


async def test_quick_commands_load_few_modules(vhost: str, database: str, tmp_path: Path) -> None:
    async with opened(database) as place, owned(place) as [lane]:
        due_ms = place.now_upper_ms() + 86_400_000
        await place.park(lane, [parcel(due_ms, b"one"), parcel(due_ms, b"two")], [])
    there = ("--broker-url", vhost, "--store-url", database)
    for verb in (("list",), ("show", f"id:1@{due_ms}"), ("reschedule", f"id:2@{due_ms}", "--by", "1h"),
                 ("cancel", "id:2")):  # fmt: skip
        modules = loaded(tmp_path, *there, *verb, expect=0)
        assert "asyncpg" in modules
        assert not modules & STORE, verb
    modules = loaded(tmp_path, *there, "status", expect=0)
    assert "delayer.broker.pipelined_admin" in modules
    assert not modules & STATUS


# delayer strays and delayer refused: more messages than one look reads, and looks that change nothing.


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
    monkeypatch.setattr(set_aside, "MAX_LISTED", 6)
    monkeypatch.setattr(set_aside, "PORTION", 4)
    monkeypatch.setattr(set_aside, "MAX_NAMED", 3)


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
        monkeypatch.setattr(set_aside, "MAX_LISTED", 100)
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
        done = await queue_of(load(None, {}, {"broker.url": vhost}), "refused").change("retry", set_aside.ANY, add)
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
    read = set_aside.read_stray(delivery, b"delayer.delay-delivery", b"delays.due", 10_000)
    shown = set_aside.SetAsideMessage.stray(delivery, read)
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
async def test_looks_neither_delete_nor_reorder(
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


async def test_refused_ones_are_listed_and_published_again(applied: Run, vhost: str, rabbitmq: RabbitMQ) -> None:
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


async def test_a_look_ends_when_its_messages_are_back_in_their_places(applied: Run, vhost: str) -> None:
    """RabbitMQ returns them a moment after it has closed the channel."""
    async with await Raw.connect(vhost) as raw, pipelined_admin(vhost, "test") as admin:
        await raw.publish(*refused_ones(MANY))
        refused = queue_of(load(None, {}, {"broker.url": vhost}), "refused")
        for _ in range(LOOKS):
            found = (await refused.find()).found
            assert [one.id for one in found] == [f"id:delayer.in-{n}" for n in range(MANY)]
            assert await admin.depths([refused.queue]) == {refused.queue: MANY}


async def test_a_retry_mends_headers_and_says_how_many_came_back(applied: Run, vhost: str) -> None:
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
    for header, why in ((f"n:int={1 << 63}", "a value of type int"), ("n" * 129 + "=", "128 bytes, found 129")):
        assert why in applied("refused", "retry", "id:delayer.in-0", "--set-header", header, expect=2).stderr
    one = json.loads(applied("audit-log", "--json").stdout)[-1]
    assert json.loads(one["asked"])["mended"] == {"delay_ms": 10_000, "headers": {"tries": 3}, "dropped": ["who"]}


async def test_large_ones_are_looked_at_without_being_kept(applied: Run, vhost: str) -> None:
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


async def test_refused_ones_are_dropped(applied: Run, vhost: str) -> None:
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


async def test_show_reads_the_beginning_of_a_large_body(
    delayer: Run, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(database) as place, owned(place) as [lane]:
        await place.park(lane, [parcel(place.now_upper_ms() + DAY_MS, b"x" * 3_000_000)], [])
    read: list[int] = []
    show = detail.show

    async def spy(*given: Any, **more: Any) -> Any:
        found = await show(*given, **more)
        read.append(len(found.entry.body))
        return found

    monkeypatch.setattr(detail, "show", spy)
    assert "body: 3000000 bytes, the first 400" in delayer("show", "id:1").stdout
    assert len(delayer("show", "id:1", "--body").stdout) == 3_000_000
    assert read == [1 << 20, 3_000_000]
