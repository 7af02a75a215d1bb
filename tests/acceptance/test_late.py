"""late_limit and late_action on real servers: useless messages do not go out by themselves after an outage.

And no decision reads a reason: with every reason reworded, the daemon and its commands do the same.
"""

from __future__ import annotations

import json
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

import asyncpg
import pytest

from tests.acceptance.own_vhost import OwnVhost, cancel, delayed, unreadable
from tests.faults.features.rates import RATE, excess
from tests.support import reworded
from tests.support.daemon import DaemonProcess, answered, command
from tests.support.place import eventually
from tests.support.raw import Inbox, Message, Props, Raw, number

ROUTES = [
    {"from": "in", "to": "out"},
    {"from": "in.strict", "to": "out", "late_limit": "1s", "late_action": "hold"},
    {"from": "in.kind", "to": "out", "late_limit": "1s", "late_action": "deliver"},
    {"from": "in.queue", "to": ""},
]


def environ(place: OwnVhost, mode: str, store: str = "") -> dict[str, str]:
    return place.environ(mode, store) | {"ROUTE": json.dumps(ROUTES)}


def due_at(body: str, at_ms: int, through: str) -> Message:
    props = Props(headers=((b"x-deliver-at", number("l", at_ms)),), delivery_mode=2)
    return Message(through, b"inbox", props, body.encode())


async def aside(config: Path, kind: str) -> list[dict[str, Any]]:
    """The held messages, the refused ones, or the strays."""
    return list((await answered(config, kind, "list"))["messages"])


async def test_messages_late_after_an_outage_are_held_by_late_limit(place: OwnVhost, store: str, tmp_path: Any) -> None:
    config = tmp_path / "delayer.toml"
    place.write(config, "store", {"store": {"url": store}})
    async with await place.raw() as raw:
        inbox = await raw.inbox("inbox")
        async with DaemonProcess(environ(place, "store", store)) as daemon:
            await daemon.ready()
            waiting = [delayed(f"strict {n}", 6000, through="in.strict") for n in range(5)]
            others = [delayed(f"kind {n}", 6000, through="in.kind") for n in range(3)] + [delayed("plain", 6000)]
            await raw.publish(*waiting, *others)
            await eventually(lambda: answered(config, "status"), lambda seen: seen["store"]["waiting"] == 9)
            assert await daemon.stop() == 0
        # The outage: the waiting messages are overdue by more than their limit, and new messages arrive late.
        now_ms = time.time_ns() // 1_000_000
        await raw.publish(
            due_at("late from the queue", now_ms - 60_000, "in.strict"),
            due_at("a kind one", now_ms - 60_000, "in.kind"),
        )
        await eventually(lambda: _overdue_ms(config), lambda late_ms: late_ms > 1500)
        async with DaemonProcess(environ(place, "store", store)) as daemon:
            await inbox.got([*(message.body for message in others), b"a kind one"])
            found = await eventually(lambda: aside(config, "held"), lambda rows: len(rows) == 6)
            assert {row["held"]["kind"] for row in found} == {"late"}
            assert not [arrival for arrival in inbox.arrivals if arrival.delivery.body.startswith((b"strict", b"late"))]
            # An operator may retry one of them, and drop the rest.
            await command(config, "held", "retry", found[0]["id"])
            await eventually(lambda: aside(config, "held"), lambda rows: len(rows) == 5)
            await command(config, "held", "drop", "--all", "--yes")
            assert await aside(config, "held") == []
            assert await daemon.stop() == 0
        await raw.round_trip()
        assert len(inbox.arrivals) == 6
        assert set(inbox.counts.values()) == {1}


async def _overdue_ms(config: Path) -> int:
    found = (await answered(config, "status"))["store"]
    assert found["next_due_ms"] is not None, "it went out before the outage began"
    return int(found["store_now_ms"] - found["next_due_ms"])


LIMITED = [{"from": "in.slow", "to": "out", "max_rate": RATE}, {"from": "in", "to": "out"}]


async def test_a_limited_route_keeps_its_rate_and_does_not_delay_other_routes(place: OwnVhost, store: str) -> None:
    """At the start 600 messages are overdue on a route of 100 a second; another route's messages pass them."""
    limited = place.environ("store", store) | {"ROUTE": json.dumps(LIMITED)}
    async with await place.raw() as raw:
        inbox = await raw.inbox("inbox")
        async with DaemonProcess(limited) as daemon:
            await daemon.ready()
            assert await daemon.stop() == 0
        slow = [delayed(f"slow {n}", 0, through="in.slow") for n in range(600)]
        await raw.publish(*slow, *(delayed(f"quick {n}", 0) for n in range(50)))
        async with DaemonProcess(limited) as daemon:
            await inbox.got(message.body for message in slow)
            assert await daemon.stop() == 0
        at = sorted(arrival.at_ms for arrival in inbox.arrivals if arrival.delivery.body.startswith(b"slow"))
        quick = [arrival.at_ms for arrival in inbox.arrivals if arrival.delivery.body.startswith(b"quick")]
        assert len(quick) == 50
        assert set(inbox.counts.values()) == {1}
        for begin in range(0, 500, 50):
            assert at[begin + 99] - at[begin] > 500, "never much more than a hundred in a second"
        assert at[-1] - at[0] < 12_000, "and nearly that"
        assert max(quick) < at[300], "the others did not wait for them"


ORDINARY_LANES = 4
TAKEN = "limited lanes taken"


async def test_three_daemons_together_keep_the_rate_limit(place: OwnVhost, store: str) -> None:
    """The owner of the route's lane is killed halfway, and another daemon continues with its own token bucket."""
    limited = place.environ("store", store) | {"ROUTE": json.dumps(LIMITED)}
    async with await place.raw() as raw, AsyncExitStack() as stack:
        inbox = await raw.inbox("inbox")
        daemons = [await stack.enter_async_context(DaemonProcess(limited)) for _ in range(3)]

        def said(daemon: DaemonProcess, event: str) -> int:
            return sum(one["event"] == event and ORDINARY_LANES + 1 in one["lanes"] for one in daemon.events)

        def slow_ones() -> list[float]:
            return [arrival.at_ms for arrival in inbox.arrivals if arrival.delivery.body.startswith(b"slow")]

        for daemon in daemons:
            await daemon.ready()
        slow = [delayed(f"slow {n}", 0, through="in.slow") for n in range(1200)]
        quick = [delayed(f"quick {n}", 0) for n in range(300)]
        await raw.publish(*slow, *quick)
        assert await inbox.until(lambda: len(slow_ones()) > 400)
        [owner] = [daemon for daemon in daemons if said(daemon, TAKEN) > said(daemon, "limited lanes dropped")]
        owner.signal(signal.SIGKILL)
        await owner.wait()
        await inbox.got(message.body for message in slow + quick)
        daemons.remove(owner)
        for daemon in daemons:
            assert await daemon.stop() == 0
        owners = sum(said(daemon, TAKEN) for daemon in [owner, *daemons])
        assert owners > 1
        assert excess(slow_ones(), owners) is None
        passed = sorted(slow_ones())[len(slow) // 2]
        quick_ones = [arrival.at_ms for arrival in inbox.arrivals if arrival.delivery.body.startswith(b"quick")]
        assert sorted(quick_ones)[len(quick) // 2] < passed, "the others did not wait for them"


MILLION = 1_000_000
REST = "checksum, lane, format, route, exchange, routing_key, to_exchange, to_key, properties, body"
COPY = f"""
INSERT INTO message (due_at, {REST})
SELECT now() - interval '1 minute', {REST} FROM message, generate_series(1, $1::int) WHERE route = 'in.slow'
"""


@pytest.mark.long
@pytest.mark.deadline(300)
async def test_a_million_overdue_messages_of_a_limited_route_do_not_delay_other_routes(
    place: OwnVhost, store: str
) -> None:
    limited = place.environ("store", store) | {"ROUTE": json.dumps(LIMITED)}

    async def lateness_ms(raw: Raw, inbox: Inbox) -> float:
        """The median of 500 messages that are due within five seconds."""
        now_ms = time.time_ns() // 1_000_000
        due_ms = {f"quick {n}": now_ms + 500 + 10 * n for n in range(500)}
        await raw.publish(*(due_at(body, at_ms, "in") for body, at_ms in due_ms.items()))
        await inbox.got(body.encode() for body in due_ms)
        return median(inbox.only(body.encode()).at_ms - at_ms for body, at_ms in due_ms.items())

    connection = await asyncpg.connect(store)
    try:
        async with place.working(limited) as (daemon, raw, inbox):
            alone = await lateness_ms(raw, inbox)
            await raw.publish(delayed("slow", 86_400_000, through="in.slow"))
            await eventually(lambda: connection.fetchval("SELECT count(*) FROM message"), lambda count: count == 1)
            assert await daemon.stop() == 0
        await connection.execute(COPY, MILLION, timeout=200)
        await connection.execute("UPDATE lane SET watermark = '-infinity'")  # The copies are due before it.
        async with place.working(limited) as (daemon, raw, inbox):
            assert await inbox.until(lambda: inbox.counts[b"slow"] > RATE)
            beside = await lateness_ms(raw, inbox)
            assert await daemon.stop() == 0
        print(f"median lateness: alone {alone:.0f} ms, beside a million {beside:.0f} ms")
        assert beside < alone + 500
        assert await connection.fetchval("SELECT count(*) FROM message") > 0.99 * MILLION
    finally:
        await connection.close()


REWORDED = [True] if reworded.EVERYWHERE else [False, True]


async def come_back(config: Path, *, rewording: bool) -> None:
    """A refused message names its exchange and key, and a retry publishes it there; it is refused again."""
    [one] = await eventually(lambda: aside(config, "refused"), lambda rows: len(rows) == 1)
    assert (one["exchange"], one["routing_key"], one["message_id"]) == ("in", "inbox", "unreadable")
    assert (one["reason"] == reworded.TEXT) == rewording
    with pytest.raises(RuntimeError, match=r"exit 1\n(?:.*\n)*Published again: 1\.\nRefused again within 2 s: 1\."):
        await command(config, "refused", "retry", "--all", "--yes")
    [again] = await eventually(lambda: aside(config, "refused"), lambda rows: bool(rows) and rows[0]["id"] != one["id"])
    assert (again["exchange"], again["message_id"]) == ("in", "unreadable")
    assert "Dropped: 1." in await command(config, "refused", "drop", "--all", "--yes")


@pytest.mark.parametrize("rewording", REWORDED)
async def test_with_a_store(place: OwnVhost, store: str, tmp_path: Path, rewording: bool) -> None:
    config = tmp_path / "delayer.toml"
    place.write(config, "store", {"store": {"url": store}})
    place.things.queue("answers")
    program = reworded.PROGRAM if rewording else None
    async with place.working(environ(place, "store", store), program=program) as (daemon, raw, inbox):
        answers = await raw.inbox("answers")
        now_ms = time.time_ns() // 1_000_000
        await raw.publish(
            due_at("late", now_ms - 60_000, "in.strict"), due_at("late too", now_ms - 60_000, "in.strict"),
            delayed("gone", 100, through="in.queue", key="nowhere"), unreadable("unreadable"),
            *(delayed(key, 100, through="in.queue", key="nowhere", under=key) for key in "ab"),
        )  # fmt: skip
        rows = await eventually(lambda: aside(config, "held"), lambda rows: len(rows) == 5)
        assert [_hold(row) for row in sorted(rows, key=lambda row: (row["route"], row["key"] or ""))] == [
            *[("in.queue", "returned", False, False, True)] * 3, *[("in.strict", "late", False, False, False)] * 2,
        ]  # fmt: skip
        assert {row["held"]["reason"] == reworded.TEXT for row in rows} == {rewording}
        await raw.publish(cancel("a"), cancel("b"), cancel("c"))
        await answers.until(lambda: len(answers.arrivals) == 3, 30)
        heard = [(one.props.correlation_id, json.loads(one.delivery.body)["outcome"]) for one in answers.arrivals]
        assert dict(heard) == {b"a": "cancelled", b"b": "cancelled", b"c": "too late"}
        # An operator retries one of the late messages, and the undeliverable one.
        first = min((row for row in rows if row["route"] == "in.strict"), key=lambda row: row["id"])
        await command(config, "held", "retry", first["id"])
        await inbox.got([b"late"])
        assert "To be tried again now: 1." in await command(config, "held", "retry", "--route", "in.queue", "--yes")
        rows = await eventually(
            lambda: aside(config, "held"), lambda rows: any(row["held"]["attempts"] == 2 for row in rows)
        )
        [row] = [row for row in rows if row["route"] == "in.queue"]
        assert _hold(row) == ("in.queue", "returned", False, False, True)
        assert await command(config, "held", "drop", "--all", "--yes") == "Dropped: 2.\n"
        await come_back(config, rewording=rewording)
        assert await daemon.stop() == 0


@pytest.mark.parametrize("rewording", REWORDED)
async def test_in_native_mode(place: OwnVhost, tmp_path: Path, rewording: bool) -> None:
    config = tmp_path / "delayer.toml"
    place.write(config, "native", {})
    program = reworded.PROGRAM if rewording else None
    async with place.working(environ(place, "native"), program=program) as (daemon, raw, inbox):
        now_ms = time.time_ns() // 1_000_000
        await raw.publish(
            *(due_at(f"late {n}", now_ms - 60_000, "in.strict") for n in range(2)), unreadable("unreadable")
        )
        await raw.publish(due_at("kind", now_ms - 60_000, "in.kind"))
        await inbox.got([b"kind"])
        rows = await eventually(lambda: aside(config, "strays"), lambda rows: len(rows) == 2)
        assert {(row["kind"], row["may_be_delivered"], row["isolated"]) for row in rows} == {("late", False, False)}
        assert {row["reason"] == reworded.TEXT for row in rows} == {rewording}
        await command(config, "strays", "retry", rows[0]["id"])
        await inbox.got([b"kind", rows[0]["body"].encode()])
        await eventually(lambda: aside(config, "strays"), lambda rows: len(rows) == 1)
        await eventually(
            lambda: command(config, "strays", "drop", "--all", "--yes"), lambda said: "Dropped: 1." in said
        )
        await come_back(config, rewording=rewording)
        assert await daemon.stop() == 0


def _hold(row: dict[str, Any]) -> tuple[str, str, bool, bool, bool]:
    """Route, kind and flags of a held message, and whether the daemon retries it."""
    said = row["held"]
    return row["route"], said["kind"], said["may_be_delivered"], said["isolated"], said["retry_ms"] is not None
