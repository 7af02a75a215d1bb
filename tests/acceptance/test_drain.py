"""delayer drain, there and back: each message keeps due instant, bytes and destination, and is delivered once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.own_vhost import OwnVhost
from tests.support.daemon import answered, command
from tests.support.place import eventually
from tests.support.raw import Message, Props, number, text

COUNT = 700
HOUR = 3_600_000
SAME = ("due_ms", "route", "exchange", "routing_key", "to_exchange", "to_key", "headers", "properties")


def letter(n: int) -> Message:
    headers = ((b"x-delay", number("l", HOUR + n * 40_000)), (b"n", number("s", n)), (b"odd", text(b"\xff\xfe")))
    props = Props(headers=headers, delivery_mode=2, message_id=b"m-%d" % n, expiration=b"7200000")
    return Message("in", b"inbox", props, b"letter %d" % n)


async def listed(config: Path) -> dict[str, Any]:
    rows = (await answered(config, "list", "--limit", "2000"))["messages"]
    return {row["properties"]["message_id"]: row for row in rows}


@pytest.mark.deadline(150)
async def test_into_the_cascade_and_back(place: OwnVhost, store: str, tmp_path: Path) -> None:
    config = tmp_path / "delayer.toml"
    place.write(config, "store", {"store": {"url": store}})
    async with place.working(config=config) as (daemon, raw, inbox):
        keyed = Props(headers=((b"x-delay", number("l", HOUR)), (b"x-delay-key", text("k"))), message_id=b"keyed")
        await raw.publish(*map(letter, range(COUNT)), Message("in", b"inbox", keyed, b"keyed"))
        before = await eventually(lambda: listed(config), lambda rows: len(rows) == COUNT + 1)
        with pytest.raises(RuntimeError, match="Set mode = "):
            await command(config, "drain", "--to", "native", "--yes")

        place.write(config, "native", {"store": {"url": store}})
        daemon.reload()
        await daemon.event("mode switched")
        told = await command(config, "drain", "--to", "native", "--dry-run")
        assert f"{COUNT} messages into the cascade" in told
        assert "1  store  they have a key" in told
        assert len(await listed(config)) == COUNT + 1
        told = await command(config, "drain", "--to", "native", "--yes")  # 0: the rest is published in due course
        assert f"Moved into the cascade: {COUNT}" in told
        assert "1  store  they have a key" in told
        assert set(await listed(config)) == {"keyed"}, "the cascade knows no keys"
        # An operator who abandons the store also moves messages with keys; the keys then have no effect.
        told = await command(config, "drain", "--to", "native", "--keys-too", "--yes")
        assert "Moved into the cascade: 1." in told
        assert "Nothing is left in the store." in told
        assert await listed(config) == {}
        levels = (await answered(config, "status"))["broker"]["cascade"]
        assert sum(level["depth"] for level in levels) == COUNT + 1

        seen = len(daemon.events)
        place.write(config, "store", {"store": {"url": store}})
        daemon.reload()
        await daemon.event("mode switched", after=seen)
        told = await command(config, "drain", "--to", "store", "--yes")
        assert f"Moved into the store: {COUNT + 1}" in told
        assert "the broker may delay or forward some itself: broker.management_url is not set" in told
        after = await eventually(lambda: listed(config), lambda rows: len(rows) == COUNT + 1)
        for name, row in before.items():
            assert {what: after[name][what] for what in SAME} == {what: row[what] for what in SAME}, name
        levels = (await answered(config, "status"))["broker"]["cascade"]
        assert sum(level["depth"] for level in levels) == 0

        trail = [(one["verb"], one["messages"]) for one in await answered(config, "audit-log")]
        assert trail == [("drain to store", COUNT + 1), ("drain to native", 1), ("drain to native", COUNT)]
        await command(config, "reschedule", "--all", "--at", "0s", "--yes")
        await inbox.got([letter(n).body for n in range(COUNT)])
        await inbox.got([b"keyed"])
        assert set(inbox.counts.values()) == {1}
        first = next(one for one in inbox.arrivals if one.delivery.body == b"letter 0")
        assert first.props.one(b"odd") == text(b"\xff\xfe")
        assert first.props.expiration == b"7200000"
        assert await daemon.stop() == 0
        assert not [one for one in daemon.events if one["level"] == "error"]
