"""late_limit and late_action on real servers: what is useless after an outage does not come out by itself."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tests.acceptance.place import Place, delayed
from tests.faults.place import eventually
from tests.support.daemon import DaemonProcess, command
from tests.support.raw import Message, Props, number

ROUTES = [
    {"from": "in", "to": "out"},
    {"from": "in.strict", "to": "out", "late_limit": "1s", "late_action": "hold"},
    {"from": "in.kind", "to": "out", "late_limit": "1s", "late_action": "deliver"},
]


def environ(place: Place, mode: str, store: str = "") -> dict[str, str]:
    return place.environ(mode, store) | {"ROUTE": json.dumps(ROUTES)}


def due_at(body: str, at_ms: int, through: str) -> Message:
    props = Props(headers=((b"x-deliver-at", number("l", at_ms)),), delivery_mode=2)
    return Message(through, b"inbox", props, body.encode())


async def held(config: Any) -> list[dict[str, Any]]:
    return list(json.loads(await command(config, "held", "list", "--json"))["messages"])


async def test_messages_late_after_an_outage_are_held_by_late_limit(place: Place, store: str, tmp_path: Any) -> None:
    config = tmp_path / "delayer.toml"
    place.write(config, "store", {"store": {"url": store}})
    async with await place.raw() as raw:
        inbox = await raw.inbox("inbox")
        async with DaemonProcess(environ(place, "store", store)) as daemon:
            await daemon.ready()
            waiting = [delayed(f"strict {n}", 6000, through="in.strict") for n in range(5)]
            others = [delayed(f"kind {n}", 6000, through="in.kind") for n in range(3)] + [delayed("plain", 6000)]
            await raw.publish(*waiting, *others)
            await eventually(lambda: _waiting(config), lambda count: count == 9)
            assert await daemon.stop() == 0
        # The outage: what was to come out is overdue by more than its limit, and something comes in late besides.
        now_ms = time.time_ns() // 1_000_000
        await raw.publish(
            due_at("late from the queue", now_ms - 60_000, "in.strict"),
            due_at("a kind one", now_ms - 60_000, "in.kind"),
        )
        await eventually(lambda: _overdue_ms(config), lambda late_ms: late_ms > 1500)
        async with DaemonProcess(environ(place, "store", store)) as daemon:
            await inbox.got([*(message.body for message in others), b"a kind one"])
            found = await eventually(lambda: held(config), lambda rows: len(rows) == 6)
            assert {row["held"]["reason"].split(":")[0] for row in found} == {"late"}
            assert not [arrival for arrival in inbox.arrivals if arrival.delivery.body.startswith((b"strict", b"late"))]
            # A person may want one of them all the same, and drop the others.
            await command(config, "held", "retry", found[0]["id"])
            await eventually(lambda: held(config), lambda rows: len(rows) == 5)
            await command(config, "held", "drop", "--all", "--yes")
            assert await held(config) == []
            assert await daemon.stop() == 0
        await raw.round_trip()
        assert len(inbox.arrivals) == 6
        assert set(inbox.counts.values()) == {1}


async def test_in_native_mode_what_is_late_waits_among_the_strays(place: Place) -> None:
    async with DaemonProcess(environ(place, "native")) as daemon, await place.raw() as raw:
        inbox = await raw.inbox("inbox")
        await daemon.ready()
        now_ms = time.time_ns() // 1_000_000
        await raw.publish(due_at("late", now_ms - 60_000, "in.strict"), due_at("kind", now_ms - 60_000, "in.kind"))
        told = await daemon.event("message held")
        assert told["reason"].startswith("late: ")
        await inbox.got([b"kind"])
        assert await daemon.stop() == 0
        await raw.round_trip()
        assert [arrival.delivery.body for arrival in inbox.arrivals] == [b"kind"]


async def test_in_native_mode_a_person_has_what_is_late_delivered_or_dropped(place: Place, tmp_path: Path) -> None:
    config = tmp_path / "delayer.toml"
    place.write(config, "native", {})

    async def found() -> list[dict[str, Any]]:
        return list(json.loads(await command(config, "strays", "list", "--json"))["messages"])

    async with DaemonProcess(environ(place, "native")) as daemon, await place.raw() as raw:
        inbox = await raw.inbox("inbox")
        await daemon.ready()
        now_ms = time.time_ns() // 1_000_000
        await raw.publish(*(due_at(f"late {n}", now_ms - 60_000, "in.strict") for n in range(3)))
        rows = await eventually(found, lambda rows: len(rows) == 3)
        assert {row["reason"].split(":")[0] for row in rows} == {"late"}
        wanted = next(row for row in rows if row["body"] == "late 1")
        await command(config, "strays", "retry", wanted["id"])
        await inbox.got([b"late 1"])
        assert await command(config, "strays", "drop", "--reason", "late:", "--yes") == "Dropped: 2.\n"
        assert await found() == []
        assert await daemon.stop() == 0
        await raw.round_trip()
        assert [arrival.delivery.body for arrival in inbox.arrivals] == [b"late 1"]


async def _status(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await command(config, "status", "--json"))["store"]
    return found


async def _waiting(config: Any) -> int:
    return int((await _status(config))["waiting"])


async def _overdue_ms(config: Any) -> int:
    found = await _status(config)
    assert found["next_due_ms"] is not None, "it went out before the outage began"
    return int(found["store_now_ms"] - found["next_due_ms"])


async def test_a_limited_route_stampedes_nobody_and_nobody_waits_for_it(place: Place, store: str) -> None:
    """600 messages are overdue when the daemon comes back, at 100 a second at most; another route's pass them."""
    routes = [{"from": "in.slow", "to": "out", "max_rate": 100}, {"from": "in", "to": "out"}]
    limited = place.environ("store", store) | {"ROUTE": json.dumps(routes)}
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
