"""Messages sent by SQL: they exist if and only if their transaction commits, and come like those sent by AMQP."""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from delayer.store.inbox import POLL_SECONDS
from tests.acceptance.own_vhost import OwnVhost, delayed
from tests.acceptance.test_locked_tables import END_LANES
from tests.support.daemon import DaemonProcess, command
from tests.support.place import eventually
from tests.support.rows import conserved
from tests.support.store import blocked, sql
from tests.support.web import Web

MODES = pytest.mark.parametrize("mode", ["store", "native"])


@asynccontextmanager
async def application(url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


async def send(connection: asyncpg.Connection, body: str, delay_ms: int | None = 0, **more: Any) -> float:
    """Send to the test's queue by named arguments. Returns when the message is due, epoch ms by this host's clock."""
    at_ms = time.time() * 1000 + (delay_ms or 0)
    delay = "" if delay_ms is None else f", delay => '{delay_ms} ms'"
    others = "".join(f", {name} => ${place}" for place, name in enumerate(more, 2))
    call = f"SELECT delayer_send('inbox', $1, exchange => 'in'{delay}{others})"
    await connection.fetchval(call, body, *more.values())
    return at_ms


async def is_empty(store: str) -> bool:
    async with sql(store) as admin:
        return not await admin.fetchval("SELECT count(*) FROM delayer_inbox")


async def settled(store: str) -> dict[str, int]:
    """The counters once the inbox is empty."""
    await eventually(lambda: is_empty(store))
    async with sql(store) as admin:
        return await conserved(admin)


@MODES
async def test_only_committed_messages_come_each_once_and_never_early(place: OwnVhost, store: str, mode: str) -> None:
    due: dict[bytes, float] = {}
    async with place.working(place.environ(mode, store)) as (daemon, _, inbox):
        async with application(store) as app:
            for number in range(60):
                transaction = app.transaction()
                await transaction.start()
                sent = {}
                for delay_ms in (None, 0, 120, 700, 1_300, 2_600):
                    body = f"{number} {delay_ms}"
                    sent[body.encode()] = await send(app, body, delay_ms)
                if number % 3:
                    await transaction.commit()
                    due |= sent
                else:
                    await transaction.rollback()
        await inbox.got(due)
        assert await daemon.stop() == 0
        assert await is_empty(store)
    assert inbox.counts.keys() == due.keys()
    assert set(inbox.counts.values()) == {1}
    assert not [body for body, at_ms in due.items() if inbox.only(body).at_ms < at_ms - 1]
    assert not [one for one in daemon.events if one["level"] in ("warning", "error")]


@MODES
async def test_a_message_due_at_once_leaves_within_moments_of_the_commit(
    place: OwnVhost, store: str, mode: str
) -> None:
    async with place.working(place.environ(mode, store)) as (_, _, inbox), application(store) as app:
        took = []
        for number in range(40):
            body = b"%d" % number
            async with app.transaction():
                await send(app, body.decode(), None)
                began = time.monotonic()
            await inbox.got([body])
            took.append(time.monotonic() - began)
    assert statistics.median(took) < POLL_SECONDS / 2, sorted(took)


async def test_a_transaction_that_commits_late_is_not_passed_over(place: OwnVhost, store: str) -> None:
    """Its ids are smaller than those that were read meanwhile, for longer than it takes to close ranges of ids."""
    async with (
        place.working(place.environ("store", store)) as (_, _, inbox),
        application(store) as slow,
        application(store) as app,
    ):
        transaction = slow.transaction()
        await transaction.start()
        await send(slow, "slow", None)
        until, number = time.monotonic() + 5, 0
        while time.monotonic() < until:
            rolled_back = app.transaction()  # leaves a gap in the ids
            await rolled_back.start()
            await send(app, "never", None)
            await rolled_back.rollback()
            await send(app, f"quick {number}", None)
            await inbox.got([b"quick %d" % number])
            number += 1
        await transaction.commit()
        await inbox.got([b"slow"])
        await send(app, "last", None)
        await inbox.got([b"last"])
    assert b"never" not in inbox.counts
    assert set(inbox.counts.values()) == {1}


@MODES
async def test_keys_take_effect_in_the_order_of_calls_and_commits(place: OwnVhost, store: str, mode: str) -> None:
    keys = [f"key {number}" for number in range(120)]

    async def use(app: asyncpg.Connection, key: str) -> None:
        """Two versions in one transaction, one more in another, and perhaps a cancel in a third."""
        async with app.transaction():
            await send(app, f"{key} first", 1_500, key=key)
            await send(app, f"{key} second", 1_500, key=key)
        await send(app, f"{key} last", 1_500, key=key)
        if key.endswith(("1", "2", "3")):
            await app.execute("SELECT delayer_cancel($1, 'in')", key)

    async with place.working(place.environ(mode, store)) as (_, _, inbox):
        async with asyncio.TaskGroup() as users:
            for share in range(6):

                async def work(mine: list[str]) -> None:
                    async with application(store) as app:
                        for key in mine:
                            await use(app, key)

                users.create_task(work(keys[share::6]))
        expected = {f"{key} last".encode() for key in keys if not key.endswith(("1", "2", "3"))}
        await inbox.got(expected)
        counters = await settled(store)
    assert inbox.counts.keys() == expected
    assert set(inbox.counts.values()) == {1}
    assert counters["parked"] == counters["released"] + counters["cancelled"] == 3 * len(keys)


@MODES
async def test_what_a_daemon_cannot_accept_is_refused_and_stops_nobody(place: OwnVhost, store: str, mode: str) -> None:
    async with place.working(place.environ(mode, store)) as (daemon, raw, inbox), application(store) as app:
        refused = await raw.inbox("delays.refused")
        async with app.transaction():
            await app.execute("SELECT delayer_send('k', 'nowhere', exchange => 'nowhere')")
            await app.execute(
                """SELECT delayer_send('k', 'soon', NULL, NULL, 'in', headers => '{"x-delay": "soon"}')"""
            )
            await app.execute("SELECT delayer_send('k', 'far', exchange => 'in', delay => '20 years')")
            await app.execute("INSERT INTO delayer_inbox VALUES (DEFAULT, DEFAULT, 'in', '', '[1]', '{}', 'by hand')")
            await send(app, "fine", None)
        await inbox.got([b"fine"])
        await refused.got([b"nowhere", b"soon", b"far", b"by hand"])
        await eventually(lambda: is_empty(store))
        reasons = [one["reason"] for one in daemon.events if one["event"] == "message refused"]
    assert len(reasons) == 4
    for part in ("no route for exchange 'nowhere'", "found 'soon'", "the delay is too long", "malformed properties"):
        assert any(part in reason for reason in reasons), reasons
    assert set(refused.counts.values()) == {1}


async def test_a_route_with_retry_takes_no_message_by_sql(place: OwnVhost, store: str) -> None:
    """A forged x-death would choose the queue."""
    retry = {"attempts": 3, "first": "1s", "exhausted": "parking"}
    routes = [{"from": "in", "to": "out"}, {"from": "failed", "to": "", "retry": retry}]
    environ = place.environ("store", store) | {"ROUTE": json.dumps(routes)}
    death = [{"queue": "inbox", "reason": "rejected", "count": 1, "exchange": "out", "routing-keys": ["inbox"]}]
    async with place.working(environ) as (daemon, raw, inbox), application(store) as app:
        refused = await raw.inbox("delays.refused")
        call = "SELECT delayer_send('inbox', 'forged', exchange => 'failed', headers => $1)"
        with pytest.raises(asyncpg.PostgresError, match="headers: expected no x-death"):
            await app.execute(call, json.dumps({"x-death": death}))
        await app.execute(call, "{}")
        await send(app, "fine", None)
        await refused.got([b"forged"])
        await inbox.got([b"fine"])
        reason = (await daemon.event("message refused"))["reason"]
        assert await daemon.stop() == 0
    assert reason.startswith("no route for exchange 'failed': expected one of 'in'; pass one of these as exchange")
    assert inbox.counts == {b"fine": 1}


async def test_a_row_that_the_store_rejects_is_refused_alone(place: OwnVhost, store: str) -> None:
    """A constraint that an operator added stands for any data that the database rejects."""
    bodies = [b"fine %d" % number for number in range(40)]
    async with sql(store) as admin, application(store) as app:
        await admin.execute("ALTER TABLE message ADD CONSTRAINT no_poison CHECK (body <> 'poison')")
        async with app.transaction():
            for number, body in enumerate(bodies):
                await send(app, body.decode(), 1_000, key=f"key {number}")
                if number == 17:
                    await send(app, "poison", 1_000, key="key 17")
        async with place.working(place.environ("store", store)) as (daemon, raw, inbox):
            refused = await raw.inbox("delays.refused")
            await inbox.got(bodies)
            await refused.got([b"poison"])
            await settled(store)
            [reason] = [one["reason"] for one in daemon.events if one["event"] == "message refused"]
    assert reason.startswith("the database of the store rejects it: ")
    assert set(inbox.counts.values()) == {1}


@pytest.mark.deadline(120)
@pytest.mark.parametrize("prefetch", ["5000", "4"])
async def test_a_full_refused_queue_stops_no_good_message(place: OwnVhost, store: str, prefetch: str) -> None:
    """Refused messages stay in the inbox until there is room. The rest pass them, even if the refused ones are more
    than the prefetch."""
    limit = {"pattern": r"^delays\.refused$", "apply-to": "queues", "priority": 1}
    limit |= {"definition": {"max-length": 1, "overflow": "reject-publish"}}
    place.rabbitmq.api("PUT", f"/api/policies/{place.vhost}/full", limit)
    bad = [b"bad %d" % number for number in range(20)]
    environ = place.environ("store", store) | {"INTAKE__PREFETCH": prefetch}
    async with place.working(environ) as (daemon, raw, inbox), application(store) as app:
        for body in bad:
            await send(app, body.decode(), None, headers='{"x-delay": "soon"}')
            await asyncio.sleep(0.05)  # a quorum queue takes a whole burst, and reports its limit only then
        interrupted = await daemon.event("consuming interrupted")
        assert (interrupted["queue"], interrupted["cause"]) == ("delayer_inbox", "NotTaken")
        good = [b"good %d" % number for number in range(300)]
        for body in good:
            await send(app, body.decode(), 100)
        await inbox.got(good)
        assert not await is_empty(store)
        refused = await raw.inbox("delays.refused")
        await refused.got(bad, timeout=60)
        await settled(store)
        assert await daemon.stop() == 0
    assert set(inbox.counts.values()) == {1}


@pytest.mark.deadline(120)
async def test_a_locked_inbox_delays_messages_by_sql_alone(place: OwnVhost, store: str) -> None:
    async with (
        place.working(place.environ("store", store)) as (daemon, raw, inbox),
        application(store) as admin,
        application(store) as app,
    ):
        await send(app, "before", None)
        await inbox.got([b"before"])
        # A daemon that cannot delete the row of a published message publishes it again.
        await eventually(lambda: is_empty(store))
        async with admin.transaction():
            await admin.execute("LOCK TABLE delayer_inbox IN ACCESS EXCLUSIVE MODE")
            sending = asyncio.create_task(send(app, "meanwhile", None))
            interrupted = await daemon.event("consuming interrupted", timeout=60.0)
            assert interrupted["queue"] == "delayer_inbox"
            assert "pg_blocking_pids" in interrupted["next_step"]
            await raw.publish(delayed("by AMQP", 300))
            await inbox.got([b"by AMQP"])
            assert b"meanwhile" not in inbox.counts
        await sending
        await inbox.got([b"meanwhile"])
        assert await daemon.stop() == 0
    assert set(inbox.counts.values()) == {1}


@pytest.mark.deadline(120)
async def test_a_key_is_not_refused_because_the_store_was_away(place: OwnVhost, store: str) -> None:
    """In native mode a message with a key by AMQP is refused then, but a row can wait where it is. Here the daemon has
    begun to read the row, and loses its lanes and its polls of the store before the row arrives."""
    async with (
        place.working(place.environ("native", store)) as (daemon, _, inbox),
        application(store) as app,
        sql(store) as admin,
    ):
        await send(app, "before", None, key="k")
        await inbox.got([b"before"])
        async with app.transaction():
            await app.execute("LOCK TABLE delayer_inbox, lane IN ACCESS EXCLUSIVE MODE")
            await send(app, "meanwhile", None, key="k")
            await blocked(admin, "%delayer_inbox%")
            await admin.execute(END_LANES)
            await daemon.event("store unreachable", timeout=60)
        await inbox.got([b"meanwhile"])
    assert "message refused" not in {one["event"] for one in daemon.events}


async def test_a_delay_counts_on_a_route_that_reads_other_forms(place: OwnVhost, store: str) -> None:
    routes = '[{"from": "in", "to": "out", "delay_from": ["celery-eta"], "default_delay": "1h"}]'
    environ = place.environ("store", store) | {"ROUTE": routes}
    async with place.working(environ) as (_, _, inbox), application(store) as app:
        at_ms = await send(app, "x", 700)
        await inbox.got([b"x"])
        assert inbox.only(b"x").at_ms >= at_ms - 1


@MODES
async def test_a_retry_of_a_refused_message_is_not_early(place: OwnVhost, store: str, mode: str) -> None:
    """The message comes again by AMQP, on a route that does not read its due time, after the limit was raised."""
    environ = place.environ(mode, store)
    environ["ROUTE"] = '[{"from": "in", "to": "out", "delay_from": ["x-delay"]}]'
    async with place.working(environ | {"INTAKE__MAX_DELAY": "1s"}) as (daemon, _, _), application(store) as app:
        at_ms = await send(app, "x", 15_000)
        assert "the delay is too long" in (await daemon.event("message refused"))["reason"]
        assert await daemon.stop() == 0
    async with place.working(environ) as (_, _, inbox):
        said = await command(None, "refused", "retry", "--all", "--yes", environ=environ)
        assert "Published again: 1" in said
        await inbox.got([b"x"])
        assert inbox.only(b"x").at_ms >= at_ms - 1


@MODES
async def test_messages_wait_for_a_daemon_of_either_mode(place: OwnVhost, store: str, mode: str) -> None:
    """Sent before the first daemon runs, and read by one of another mode than that of the messages before."""
    other = {"store": "native", "native": "store"}[mode]
    async with application(store) as app:
        await send(app, "before", None)
        async with place.working(place.environ(mode, store)) as (daemon, _, inbox):
            await inbox.got([b"before"])
            assert await daemon.stop() == 0
        for number in range(100):
            await send(app, f"between {number}", 10 * number)
    async with place.working(place.environ(other, store)) as (_, _, inbox):
        await inbox.got([b"between %d" % number for number in range(100)])
        await settled(store)
    assert set(inbox.counts.values()) == {1}


async def flood(app: asyncpg.Connection, stop: asyncio.Event, sent: list[bytes]) -> None:
    while not stop.is_set():
        body = b"%d" % len(sent)
        await send(app, body.decode(), (None, 300, 2_000)[len(sent) % 3])
        sent.append(body)


@MODES
@pytest.mark.deadline(120)
async def test_the_next_daemon_goes_on(place: OwnVhost, store: str, mode: str) -> None:
    """A reader that stops repeats nothing. One that is killed loses nothing."""
    environ, sent = place.environ(mode, store), list[bytes]()
    async with place.working(environ) as (first, _, inbox), application(store) as app, DaemonProcess(environ) as second:
        await second.ready()
        stop = asyncio.Event()
        flooding = asyncio.create_task(flood(app, stop, sent))
        await eventually(lambda: len(inbox.counts), lambda n: n > 100)
        assert await first.stop() == 0
        before = len(sent)
        await eventually(lambda: len(inbox.counts), lambda n: n > before + 100)
        stop.set()
        await flooding
        await inbox.got(sent)
        assert set(inbox.counts.values()) == {1}, "a clean stop repeats nothing"
        async with DaemonProcess(environ) as third:
            await third.ready()
            stop.clear()
            flooding = asyncio.create_task(flood(app, stop, sent))
            before = len(sent)
            await eventually(lambda: len(inbox.counts), lambda n: n > before + 50)
            second.signal(signal.SIGKILL)
            await second.wait()
            before = len(sent)
            await eventually(lambda: len(inbox.counts), lambda n: n > before + 100, timeout=60)
            stop.set()
            await flooding
            await inbox.got(sent)
            await settled(store)
            assert await third.stop() == 0


async def test_an_inbox_that_nobody_reads_is_seen(place: OwnVhost, store: str) -> None:
    """A lock that is not the daemon's keeps it from reading."""
    environ = place.environ("store", store) | {"HTTP__LISTEN": "127.0.0.1:0"}
    async with application(store) as other:
        assert await other.fetchval("SELECT pg_try_advisory_lock('delayer_inbox'::regclass::oid::int, 0)")
        async with place.working(environ) as (daemon, _, inbox):
            web = await Web.of(daemon)
            await send(other, "x", None)
            await other.execute("UPDATE delayer_inbox SET sent_at = sent_at - interval '1 minute'")
            answer = await eventually(lambda: web.get("/health/ready"), lambda answer: answer.status == 503)
            [reason] = answer.json["reasons"]
            assert reason.startswith("the SQL inbox is not read: a message in it was sent ")
            seen = await eventually(web.metrics, lambda seen: seen["delayer_inbox_messages",] == 1)
            assert seen["delayer_inbox_unread_seconds",] >= 60
            await other.execute("SELECT pg_advisory_unlock_all()")
            await inbox.got([b"x"])
            await eventually(lambda: web.get("/health/ready"), lambda answer: answer.status == 200)
