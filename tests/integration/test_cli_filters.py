"""Command line filters that match nothing, and filters by kind of hold."""

from __future__ import annotations

import json

from delayer.broker.admin import Admin
from delayer.core.hold import Hold, HoldKind
from delayer.core.units import DAY_MS
from tests.integration.cli import Run, ids
from tests.integration.test_cli_set_aside import QUEUE, envelope
from tests.support.place import eventually
from tests.support.raw import Message, Props, Raw
from tests.support.store import opened, owned, parcel


async def test_a_filter_without_a_match_names_the_other_list(delayer: Run, database: str) -> None:
    async with opened(database) as place, owned(place) as [lane]:
        now = place.now_upper_ms()
        await place.park(lane, [parcel(now + DAY_MS, b"keyed", key=b"order-1")], [])
        await place.hold(lane, [(parcel(now, b"held", key=b"order-2"), Hold(HoldKind.RETURNED, "no queue"))])
    waiting_too, held_too = (f"may match: `delayer {verb}`." for verb in ("list", "held list"))
    for verb in (["list"], ["reschedule", "--by", "1h"], ["cancel", "--yes"]):
        assert held_too in delayer(*verb, "--delay-key", "order-2", expect=verb != ["list"]).stderr
    for verb in (["held", "list"], ["held", "drop", "--yes"]):
        assert waiting_too in delayer(*verb, "--delay-key", "order-1", expect="drop" in verb).stderr
    assert delayer("list", "--delay-key", "order-1").stderr == delayer("held", "list").stderr == ""


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


async def returned(vhost: str, count: int) -> None:
    """Wait until this many messages are ready: messages a command has read return only after it exits."""
    async with await Admin.connect(vhost) as admin:
        await eventually(lambda: admin.depths([QUEUE.decode()]), lambda depths: depths[QUEUE.decode()] == count)


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


def test_the_audit_log_names_messages_that_a_cancel_did_not_find(delayer: Run) -> None:
    delayer("cancel", "order-1", "48213", "id:48213", expect=1)
    (entry,) = json.loads(delayer("audit-log", "--json").stdout)
    assert (json.loads(entry["asked"]), entry["messages"]) == ({"ids": ["order-1", "48213", "id:48213"]}, 0)
