"""A route with ``key_from``: publishers replace and cancel messages by the ids that these have already."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.own_vhost import OwnVhost, cancel
from tests.support.daemon import answered, command
from tests.support.place import eventually
from tests.support.raw import Inbox, Message, Props, Raw, Value, number, text
from tests.support.web import Web, tokens_file

HOUR = 3_600_000
ROUTES = [
    {"from": "in", "to": "out", "key_from": "message_id"},
    {"from": "in.header", "to": "", "key_from": "header:order"},
]
TOKEN = "a-token-for-this-test-alone"


def called(message_id: str, milliseconds: int, body: str = "") -> Message:
    props = Props(headers=((b"x-delay", number("I", milliseconds)),), delivery_mode=2, message_id=message_id.encode())
    return Message("in", b"inbox", props, (body or message_id).encode())


def ordered(order: Value, milliseconds: int, body: bytes) -> Message:
    headers = ((b"x-delay", number("I", milliseconds)), (b"order", order))
    return Message("in.header", b"inbox", Props(headers=headers, delivery_mode=2), body)


async def outcome(raw: Raw, answers: Inbox, key: str) -> str:
    """Publish a cancel of this key, and return the answer to it."""
    before = len(answers.arrivals)
    await raw.publish(cancel(key))
    assert await answers.until(lambda: len(answers.arrivals) > before)
    return str(json.loads(answers.arrivals[-1].delivery.body)["outcome"])


@pytest.mark.parametrize("mode", ["store", "native"])
async def test_publishers_cancel_and_replace_by_their_own_ids(
    place: OwnVhost, store: str, tmp_path: Path, mode: str
) -> None:
    place.things.queue("answers")
    config = tmp_path / "delayer.toml"
    place.write(config, mode, {"store": {"url": store}})
    environ = place.environ(mode, store) | {"ROUTE": json.dumps(ROUTES)}

    async def waiting() -> list[dict[str, Any]]:
        return list((await answered(config, "list"))["messages"])

    async with place.working(environ) as (daemon, raw, inbox):
        answers = await raw.inbox("answers")
        await raw.publish(called("order-7", HOUR), called("order-8", HOUR))
        rows = await eventually(waiting, lambda rows: len(rows) == 2)
        assert {row["key"]: row["message_id"] for row in rows} == {"order-7": "order-7", "order-8": "order-8"}
        assert await outcome(raw, answers, "order-7") == "cancelled"
        assert [row["key"] for row in await waiting()] == ["order-8"]
        assert await outcome(raw, answers, "order-7") == "too late"
        assert "Cancelled: 1." in await command(config, "cancel", "--delay-key", "order-8", "--yes")
        assert await waiting() == []

        # Of two messages with one id, only the newest is delivered, so a message repeated by a fault is delivered once.
        await raw.publish(called("order-9", 3_000, "old"), called("order-9", 3_000, "new"))
        await raw.publish(called("order-10", 0, "at once"))
        await inbox.got([b"new", b"at once"])
        assert inbox.only(b"new").props.message_id == b"order-9"

        # A header: an integer is its decimal text, and the header stays in the message.
        await raw.publish(ordered(number("l", 4711), HOUR, b"cancelled"), ordered(text("o-1"), 3_000, b"replaced"))
        await raw.publish(ordered(text("o-1"), 1_000, b"newest"), ordered(number("d", 1), 0, b"no key"))
        assert await outcome(raw, answers, "4711") == "cancelled"
        await inbox.got([b"newest"])
        assert inbox.only(b"newest").props.one(b"order") == text("o-1")
        refused = await eventually(lambda: answered(config, "refused", "list"), lambda it: it["depth"] == 1)
        assert refused["messages"][0]["reason"].startswith("key_from header:order: expected a string, found")
        assert await waiting() == []
        assert await daemon.stop() == 0
        assert inbox.counts == dict.fromkeys([b"new", b"at once", b"newest"], 1)


async def test_the_page_and_programs_cancel_by_a_publishers_id(place: OwnVhost, store: str) -> None:
    environ = place.environ("store", store) | {"HTTP__LISTEN": "127.0.0.1:0", "HTTP__TOKENS_FILE": tokens_file(TOKEN)}
    async with place.working(environ | {"ROUTE": json.dumps(ROUTES)}) as (daemon, raw, _):
        web = await Web.of(daemon)
        allowed = {"Authorization": f"Bearer {TOKEN}", "Accept": "application/json"}
        await raw.publish(*(called(f"order-{n}", HOUR) for n in range(3)))
        await raw.publish(ordered(text("lost"), 0, b"lost")._replace(routing_key=b"no queue"))
        found = await eventually(
            lambda: web.get("/api/messages?key=order-1", **allowed), lambda answer: bool(answer.json["messages"])
        )
        (row,) = found.json["messages"]
        page = (await web.get("/waiting?key=order-1")).text
        assert page.count('href="/message/') == 1
        assert f'<a href="/message/{row["id"]}">{row["id"].partition("@")[0]}</a>' in page
        form = {"verb": "cancel", "key": "order-1", "confirmed": "yes"}
        assert (await web.post("/actions/messages", form, **allowed)).json["done"] == 1
        left = (await web.get("/api/messages", **allowed)).json["messages"]
        assert [one["key"] for one in left] == ["order-0", "order-2"]

        # delayer's own id is distinguished from a message_id here, too.
        by_name = (await web.get("/api/messages/order-2", **allowed)).json
        assert by_name["id"] == left[1]["id"]
        number_alone = left[0]["id"].partition("@")[0].removeprefix("id:")
        assert (await web.get(f"/api/messages/{number_alone}", **allowed)).status == 404
        wrong = await web.post("/actions/messages", {"verb": "cancel", "id": number_alone}, **allowed)
        assert (wrong.status, "such as id:48213@1795291200000" in wrong.text) == (400, True)
        done = await web.post("/actions/messages", {"verb": "cancel", "id": f"id:{number_alone}"}, **allowed)
        assert done.json["done"] == 1
        held = await eventually(lambda: web.get("/api/held", **allowed), lambda answer: bool(answer.json["messages"]))
        (lost,) = held.json["messages"]
        dropped = await web.post("/actions/messages", {"verb": "drop", "id": lost["id"]}, **allowed)
        assert (dropped.json["done"], lost["key"]) == (1, "lost")
        assert f'"ids": ["{lost["id"]}"]' in html.unescape((await web.get("/audit-log")).text)
        assert f'"ids": ["id:{number_alone}"]' in html.unescape((await web.get("/audit-log")).text)
        assert await daemon.stop() == 0


async def test_a_reload_sets_key_from(place: OwnVhost, store: str, tmp_path: Path) -> None:
    config = tmp_path / "delayer.toml"
    place.write(config, "store", {"store": {"url": store}})
    async with place.working(config=config) as (daemon, raw, _):
        await raw.publish(called("order-1", HOUR))
        config.write_text(config.read_text().replace('to = "out"', 'to = "out"\nkey_from = "message_id"'))
        seen = len(daemon.events)
        daemon.reload()
        await daemon.event("reloaded", after=seen)
        await raw.publish(called("order-1", HOUR), called("order-2", HOUR))
        rows = await eventually(lambda: answered(config, "list"), lambda it: len(it["messages"]) == 3)
        assert [row["key"] for row in rows["messages"]] == [None, "order-1", "order-2"]
        assert await daemon.stop() == 0
