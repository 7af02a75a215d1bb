"""Filters of the command line that match nothing, and those by the kind of a hold."""

from __future__ import annotations

import json

import pytest

from delayer.broker.admin import Admin
from delayer.cli.hints import near_misses
from delayer.core.filters import Filter
from delayer.core.hold import Hold, HoldKind
from delayer.core.units import DAY_MS
from delayer.store.admin.listing import Entry, Place
from tests.integration.cli import Run, ids
from tests.integration.test_cli_looking import QUEUE, envelope, refused_ones
from tests.support.place import eventually
from tests.support.raw import Message, Props, Raw, text
from tests.support.rows import waiting
from tests.support.store import opened, owned, parcel, sql

PROPERTIES = Props(headers=((b"Customer", text("4711")),), message_id=b"m-1").encode()
ENTRY = Entry(Place(0, 1, 1), 0, b"orders.in", b"orders.in", b"k", b"orders.out", b"Orders.Eu", b"o-1", 4, PROPERTIES)


@pytest.mark.parametrize(
    ("wanted", "near"),
    [
        (Filter(message_id=b"o-1"), ["--delay-key o-1"]),
        (Filter(key=b"m-1"), ["--message-id m-1"]),
        (Filter(to_key=b"orders.eu"), ["--routing-key Orders.Eu"]),
        (Filter(to_exchange=b"orders.in"), ["--route orders.in"]),
        (Filter(headers=((b"customer", "4711"),)), ["--header Customer=4711"]),
        (Filter(to_key=b"Orders.Eu", key=b"other"), []),
        (Filter(to_key=b"orders.us"), []),
    ],
)
def test_near_misses(wanted: Filter, near: list[str]) -> None:
    assert near_misses(wanted, [ENTRY, ENTRY]) == near


async def test_a_filter_that_matches_nothing_gets_a_hint(delayer: Run, database: str) -> None:
    async with opened(database) as place, owned(place) as [lane]:
        now = place.now_upper_ms()
        soon = [parcel(now + DAY_MS, b"soon")] * 1_001  # A hint reads 1,000 of these. The key has an index.
        await place.park(lane, [*soon, parcel(now + 2 * DAY_MS, b"keyed", key=b"order-1")], [])
        await place.hold(lane, [(parcel(now, b"held", key=b"order-2"), Hold(HoldKind.RETURNED, "no queue"))])
    assert "Did you mean --delay-key order-1?" in delayer("list", "--message-id", "order-1").stderr
    assert "Did you mean" in delayer("cancel", "--routing-key", "order-1", "--yes", expect=1).stderr
    assert (
        "Next: `delayer held list`." in delayer("reschedule", "--by", "1h", "--delay-key", "order-2", expect=1).stderr
    )
    assert "Did you mean --delay-key order-2?" in delayer("held", "list", "--message-id", "order-2").stderr
    assert "Next: `delayer list`." in delayer("held", "drop", "--delay-key", "order-1", "--yes", expect=1).stderr
    for verb in (["list", "--delay-key", "order-3"], ["held", "list", "--delay-key", "order-3"]):
        assert delayer(*verb).stderr == ""
    async with sql(database) as admin:
        assert len(await waiting(admin)) == 1_002


async def test_the_kind_of_a_hold_selects_held_messages(delayer: Run, database: str) -> None:
    async with opened(database) as place, owned(place) as [lane]:
        now = place.now_upper_ms()
        holds = [Hold(HoldKind.LATE, "late"), Hold(HoldKind.RETURNED, "no queue")]
        await place.hold(lane, [(parcel(now, str(one.kind).encode()), one) for one in holds])
    assert ids(delayer, "held", "list", "--kind", "late") == [f"id:1@{now}"]
    assert "Dropped: 1." in delayer("held", "drop", "--kind", "late", "--yes").stdout
    assert ids(delayer, "held", "list") == [f"id:2@{now}"]
    assert "'closed_channel'" in delayer("held", "list", "--kind", "lost", expect=2).stderr
    assert json.loads(json.loads(delayer("audit-log", "--json").stdout)[0]["asked"]) == {"kind": "late"}


async def returned(vhost: str, count: int, queue: str = QUEUE.decode()) -> None:
    """Wait until so many messages are ready: the broker returns what a command has read after the command has ended."""
    async with await Admin.connect(vhost) as admin:
        await eventually(lambda: admin.depths([queue]), lambda depths: depths[queue] == count)


async def test_the_kind_of_a_hold_selects_strays(delayer: Run, vhost: str) -> None:
    delayer("--mode", "native", "topology", "apply")
    async with await Raw.connect(vhost) as raw:
        await raw.publish(Message("", QUEUE, envelope(1, "312")[1], b"body"), Message("", QUEUE, Props(), b"none"))
    told = json.loads(delayer("--mode", "native", "strays", "list", "--kind", "returned", "--json").stdout)
    assert [one["id"] for one in told["messages"]] == [f"id:{1:032x}"]
    await returned(vhost, 2)
    assert "Dropped: 1." in delayer("--mode", "native", "strays", "drop", "--kind", "unfit", "--yes").stdout
    await returned(vhost, 1)
    assert json.loads(delayer("--mode", "native", "strays", "list", "--json").stdout)["depth"] == 1


async def test_a_filter_of_refused_messages_or_strays_gets_a_hint(delayer: Run, vhost: str) -> None:
    native = ("--mode", "native")
    delayer(*native, "topology", "apply")
    delayer("topology", "apply")
    async with await Raw.connect(vhost) as raw:
        await raw.publish(*refused_ones(2), Message("", QUEUE, envelope(1, "312 NO_ROUTE")[1], b"body"))

    async def hint(*command: str) -> str:
        await returned(vhost, 2, "delays.refused")
        await returned(vhost, 1)
        return str(delayer(*command, expect=0 if "list" in command else 1).stderr)

    assert "Did you mean --reason 'too long'?\n" in await hint("refused", "list", "--reason", "Too Long")
    assert "Did you mean --route delayer.in?" in await hint("refused", "retry", "--route", "Delayer.In", "--yes")
    assert "Did you mean --route delayer.in?" in await hint("refused", "drop", "DELAYER.IN", "--yes")
    assert "Did you mean id:delayer.in-1?" in await hint("refused", "retry", "Delayer.in-1")
    bare = await hint(*native, "strays", "drop", f"{1:032x}")
    assert f"Did you mean id:{1:032x}?" in bare and "is written with id: before it" in bare
    assert "Did you mean --reason NO_ROUTE?" in await hint(*native, "strays", "list", "--reason", "no_route")
    assert "Did you mean --route in?" in await hint(*native, "strays", "drop", "--route", "IN", "--yes")
    assert "Did you" not in await hint("refused", "list", "--reason", "too short")
    assert "Did you" not in await hint(*native, "strays", "list", "--kind", "late", "--reason", "312")


def test_the_audit_log_names_messages_that_a_cancel_did_not_find(delayer: Run) -> None:
    delayer("cancel", "order-1", "48213", "id:48213", expect=1)
    (entry,) = json.loads(delayer("audit-log", "--json").stdout)
    assert (json.loads(entry["asked"]), entry["messages"]) == ({"ids": ["order-1", "48213", "id:48213"]}, 0)
