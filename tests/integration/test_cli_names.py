"""The names of messages on the command line: delayer's ids begin with id:, and all other names are a publisher's."""

from __future__ import annotations

import json

from delayer.core.message import Parcel
from delayer.core.units import DAY_MS
from tests.integration.cli import Run, ids
from tests.integration.test_cli_looking import UNBOUND, filled
from tests.support.raw import Props
from tests.support.rows import compact, waiting
from tests.support.store import opened, owned, parcel, sql


async def test_a_number_alone_is_never_an_id_of_delayer(delayer: Run, database: str) -> None:
    """Row 1 and a message that its publisher called 1: each verb acts on the one it was given."""
    async with opened(database) as place, owned(place) as [lane], sql(database) as admin:
        now = place.now_upper_ms()
        called = parcel(now + DAY_MS, b"called 1", properties=Props(message_id=b"1").encode())
        await place.park(lane, [parcel(now + DAY_MS, b"row 1", key=b"1"), called], [])

        async def left() -> set[bytes]:
            return {row.body for row in (await waiting(admin)).values()}

        for name, body in (("1", "called 1"), ("id:1", "row 1")):
            assert json.loads(delayer("show", name, "--json").stdout)["body"] == body
        assert ids(delayer, "list", "1") == [f"id:2@{now + DAY_MS}"]
        delayer("reschedule", "1", "--by", "1h")
        assert ids(delayer, "list") == [f"id:1@{now + DAY_MS}", f"id:2@{now + DAY_MS + 3_600_000}"]
        assert "Cancelled: 1 of 1." in delayer("cancel", "1").stdout
        assert await left() == {b"row 1"}
        for verb in (["cancel"], ["reschedule", "--by", "1h"], ["held", "drop"], ["held", "retry"], ["show"]):
            assert "such as id:48213." in delayer(*verb, "1", expect=1).stderr
        assert await left() == {b"row 1"}
        assert "Cancelled: 1 of 1." in delayer("cancel", "id:1").stdout
        assert await left() == set()


async def test_the_audit_log_names_a_message_as_the_operator_did(delayer: Run, database: str) -> None:
    _, of = await filled(database)
    delayer("cancel", "m-1")
    (entry,) = json.loads(delayer("audit-log", "--json").stdout)
    assert json.loads(entry["asked"]) == {"ids": [f"m-1 ({of[b'soon']})"]}


async def test_a_message_is_found_by_its_message_id_or_its_delayer_id(delayer: Run, database: str) -> None:
    async with opened(database) as place, owned(place) as [lane], sql(database) as admin:
        now = place.now_upper_ms()

        def named(body: bytes, **more: object) -> Parcel:
            return parcel(now + DAY_MS, body, properties=Props(message_id=b"m@" + body).encode(), **more)

        forged = parcel(now + DAY_MS, b"forged", properties=Props(message_id=b"id:lost").encode())
        await place.park(lane, [named(b"packed"), forged], [])
        assert len(await compact(admin)) == 1
        twins = [named(b"twin")] * 12
        await place.park(lane, [named(b"row", key=b"order-1"), *twins, parcel(now, b"none")], [])
        await place.hold(lane, [(named(b"held", token=b"c0ffee"), UNBOUND)])
    for name, body in (("m@packed", "packed"), ("m@row", "row"), ("m@held", "held"), ("id:c0ffee", "held")):
        found = json.loads(delayer("show", name, "--json").stdout)
        assert (found["body"], found["message_id"]) == (body, f"m@{body}")
    (row,) = ids(delayer, "list", "--message-id", "m@row")
    assert ids(delayer, "list", "m@row") == [row]
    for other in ("order-1", "c0ffee", "id:c0ffe", "id:m@row", "id:order-1"):
        delayer("show", other, expect=1)
    both = delayer("list", "m@row", "id:lost")
    assert "m@row" in both.stdout and "forged" not in both.stdout and "id:lost is not waiting" in both.stderr
    assert "id:lost" in delayer("list", "--message-id", "id:lost").stdout
    listed = delayer("list", "m@row", "m@held")
    assert "m@row" in listed.stdout and "m@held is not waiting" in listed.stderr
    assert "names 10 or more messages: give an id of id:4@" in delayer("cancel", "m@twin", "m@row", expect=2).stderr
    some = delayer("cancel", "m@row", "m@lost", expect=1)
    assert "Cancelled: 1 of 2." in some.stdout and "m@lost is not in the store" in some.stderr
    assert "Cancelled: 12." in delayer("cancel", "--message-id", "m@twin", "--yes").stdout
    assert "m@lost is not held." in delayer("held", "drop", "m@lost", expect=1).stderr
    assert "m@held" in delayer("held", "list").stdout
    assert "To be tried again now: 1 of 1." in delayer("held", "retry", "m@held").stdout
