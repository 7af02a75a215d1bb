"""Waiting and held messages by the command line: listed, shown and changed, on a real store."""

from __future__ import annotations

import json
import re
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from delayer.core.filters import read_token
from delayer.core.hold import Hold, HoldKind
from delayer.core.message import Parcel
from delayer.core.readable import instant
from delayer.core.units import DAY_MS
from delayer.store.admin import detail
from tests.integration.cli import Run, ids
from tests.support.raw import Props, number, text
from tests.support.rows import compact, conserved, waiting
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


async def test_an_instant_from_now_counts_from_the_stores_clock(
    delayer: Run, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, of = await filled(database)
    monkeypatch.setattr(time, "time_ns", lambda: (now - 3_600_000) * 1_000_000)
    delayer("reschedule", of[b"soon"], "--at", "2h")
    [moved] = [one for one in ids(delayer, "list") if one.startswith(of[b"soon"].partition("@")[0] + "@")]
    assert int(moved.partition("@")[2]) >= now + 2 * 3_600_000


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


async def test_many_held_messages_are_changed_page_by_page(delayer: Run, database: str) -> None:
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


# delayer strays and delayer refused: more messages than one read returns, and reads that change nothing.


async def test_show_reads_the_beginning_of_a_large_body(
    delayer: Run, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(database) as place, owned(place) as [lane]:
        await place.park(lane, [parcel(place.now_upper_ms() + DAY_MS, b"x" * 3_000_000)], [])
    read: list[int] = []
    show = detail.find_message

    async def spy(*given: Any, **more: Any) -> Any:
        found = await show(*given, **more)
        read.append(len(found.entry.body))
        return found

    monkeypatch.setattr(detail, "find_message", spy)
    assert "body: 3000000 bytes, the first 400" in delayer("show", "id:1").stdout
    assert len(delayer("show", "id:1", "--body").stdout) == 3_000_000
    assert read == [1 << 20, 3_000_000]
