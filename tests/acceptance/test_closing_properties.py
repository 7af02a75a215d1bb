"""Properties over which the broker closes a channel, by every way in. A message with one does no harm to others: no
channel of the daemon closes, and its neighbors come exactly once."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from delayer.core.message import DIRECT_REPLY, Parcel, Target
from delayer.format.lines import Line, format_line
from tests.acceptance.own_vhost import OwnVhost, delayed
from tests.integration.cli import Run
from tests.support.daemon import DaemonProcess
from tests.support.place import eventually
from tests.support.raw import Props, Raw, now_ms, text
from tests.support.store import sql
from tests.support.web import Web, tokens_file

TOKEN = "a-token-for-this-test-alone"
ELEVEN_YEARS = "346896000000"
BAD: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "reply_to": ({"reply_to": DIRECT_REPLY.decode()}, {}),
    "expiration": ({"expiration": "soon"}, {}),
    "expiration too long": ({"expiration": ELEVEN_YEARS}, {}),
    "CC": ({}, {"CC": "elsewhere"}),
    "BCC": ({}, {"BCC": "elsewhere"}),
}
"""The properties and the headers of each message."""
INSERT = """
INSERT INTO delayer_inbox (exchange, routing_key, headers, properties, body)
VALUES ('in', 'inbox', $1, $2, convert_to($3, 'UTF8'))
"""
MODES = pytest.mark.parametrize("mode", ["store", "native"])


def closings(place: OwnVhost) -> int:
    """How many channels the broker has closed in this vhost because of a publish."""
    where = re.escape(f"vhost: '{place.vhost}'")
    return len(re.findall(rf"Channel error .*{where}.*\n.*operation basic\.publish", place.rabbitmq.log()))


async def neighbors(raw: Raw, name: str) -> set[bytes]:
    """Messages that the daemon publishes at the same time."""
    bodies = [f"{name} {number}" for number in range(100)]
    await raw.publish(*(delayed(body, 0) for body in bodies))
    return {body.encode() for body in bodies}


def reasons(daemon: DaemonProcess) -> list[str]:
    return [one["reason"] for one in daemon.events if one["event"] == "message refused"]


def assert_unharmed(place: OwnVhost, daemon: DaemonProcess) -> None:
    assert closings(place) == 0, place.rabbitmq.log()[-2_000:]
    assert not {"publish channel closed", "isolation interrupted"} & {one["event"] for one in daemon.events}


async def test_the_broker_turns_a_publisher_away(place: OwnVhost) -> None:
    """So none comes in by AMQP; and this is how a closing is seen."""
    for number, (properties, headers) in enumerate(BAD.values(), 1):
        props = Props(
            headers=tuple((name.encode(), text(value)) for name, value in headers.items()),
            **{name: value.encode() for name, value in properties.items()},  # type: ignore[arg-type]
        )
        async with await place.raw() as raw:
            with pytest.raises(Exception, match="PRECONDITION_FAILED"):
                await raw.publish(delayed("x", 0, through="out")._replace(props=props))
        await eventually(lambda: closings(place), lambda found, number=number: found == number)


@MODES
async def test_rows_of_the_sql_inbox_are_refused(place: OwnVhost, store: str, mode: str, delayer: Run) -> None:
    """delayer_send refuses these at once; a program may still write them into the table."""
    async with place.working(place.environ(mode, store)) as (daemon, raw, inbox), sql(store) as app:
        sent = await neighbors(raw, "before")
        async with app.transaction():
            for delay in ({}, {"x-delay": 700}, {"x-delay": 60_000, "x-delay-key": "k"}):
                for name, (properties, headers) in BAD.items():
                    values = json.dumps({**headers, **delay}), json.dumps(properties), f"{name} {len(delay)}"
                    await app.execute(INSERT, *values)
                await app.execute(INSERT, json.dumps(delay), "{}", f"good {len(delay)}")
        sent |= {b"good 0", b"good 1"} | await neighbors(raw, "behind")
        await inbox.got(sent)
        await eventually(lambda: place.things.depth("delays.refused"), lambda found: found == 3 * len(BAD))
        retried = delayer("refused", "retry", "--all", "--yes", "--json", expect=1, **commands(place, store))
        # They go back without an expiration, because theirs was none.
        sent |= {b"expiration 0", b"expiration too long 0", b"expiration 1", b"expiration too long 1"}
        await inbox.got(await neighbors(raw, "last") | sent)
        assert await daemon.stop() == 0
        assert_unharmed(place, daemon)
        assert "unpublishable" in retried.stdout
        assert {one.split(":")[0] for one in reasons(daemon)} == {"reply_to", "expiration", "CC", "BCC"}
        assert set(inbox.counts.values()) == {1}


def commands(place: OwnVhost, store: str) -> dict[str, str]:
    return {f"DELAYER_{name}": value for name, value in place.environ("store", store).items()}


@MODES
async def test_http_and_schedules_say_no(place: OwnVhost, store: str, mode: str, delayer: Run) -> None:
    web_of = {"HTTP__LISTEN": "127.0.0.1:0", "HTTP__TOKENS_FILE": tokens_file(TOKEN)}
    allowed = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    async with place.working(place.environ(mode, store) | web_of) as (daemon, raw, inbox):
        web = await Web.of(daemon)
        sent = await neighbors(raw, "by AMQP")
        for number, (properties, headers) in enumerate(BAD.values()):
            message: dict[str, Any] = {"exchange": "in", "routing_key": "inbox", **properties}
            for more in ({}, {"x-delay": 500}, {"x-delay-cancel": "k"}):
                answer = await web.ask(
                    "POST", "/api/messages", json.dumps({**message, "headers": {**headers, **more}}).encode(), allowed
                )
                assert (answer.status, "would refuse it" in answer.json["detail"]) == (422, True), answer.text
            said = {"every": "1s", "to": "out", "routing_key": "inbox", "headers": headers, "properties": properties}
            answer = await web.ask("PUT", f"/api/schedules/s{number}", json.dumps(said).encode(), allowed)
            assert answer.status == 422, answer.text
            options = [f"--header={name}={value}" for name, value in headers.items()]
            options += [f"--property={name}={value}" for name, value in properties.items()]
            done = delayer(
                *("schedule", "add", "bad", "--every=1s", "--to=out", "--routing-key=inbox", *options),
                expect=2, **commands(place, store),
            )  # fmt: skip
            assert "expected" in done.stderr
        body = {"exchange": "in", "routing_key": "inbox", "body": "fine", "expiration": "3600000"}
        assert (await web.ask("POST", "/api/messages", json.dumps(body).encode(), allowed)).status == 202
        await inbox.got(sent | {b"fine"})
        assert await daemon.stop() == 0
        assert_unharmed(place, daemon)
        assert set(inbox.counts.values()) == {1}


async def test_imported_messages_are_held(place: OwnVhost, store: str, delayer: Run, tmp_path: Path) -> None:
    """They may come from another store, into which an older daemon parked them."""
    lines: list[bytes] = []
    at_ms = now_ms() - 1_000
    for n in range(60):
        lines.append(line(f"good {n}", Props(delivery_mode=2), at_ms))
        if n % 10 == 5 and n // 10 < len(BAD):
            name = list(BAD)[n // 10]
            properties, headers = BAD[name]
            values: Any = {key: value.encode() for key, value in properties.items()}
            lines.append(
                line(name, Props(headers=tuple((k.encode(), text(v)) for k, v in headers.items()), **values), at_ms)
            )
    file = tmp_path / "lines.jsonl"
    file.write_bytes(b"".join(lines))
    async with place.working(place.environ("store", store)) as (daemon, _, inbox), sql(store) as admin:
        delayer("import", "jsonl", "run", str(file), "--unverified", "--yes", **commands(place, store))
        await inbox.got({b"good %d" % n for n in range(60)})

        async def held() -> dict[str, str]:
            return {bytes(body).decode(): reason for body, reason in await admin.fetch("SELECT body, reason FROM held")}

        found = await eventually(held, lambda found: found.keys() == BAD.keys())
        assert all(reason.startswith("unfit: the broker would close the channel: ") for reason in found.values()), found
        assert await daemon.stop() == 0
        assert_unharmed(place, daemon)
        assert set(inbox.counts.values()) == {1}


def line(body: str, props: Props, due_ms: int) -> bytes:
    target = Target(b"out", b"inbox")
    return format_line(Line(Parcel(due_ms, b"in", b"in", b"inbox", target, props.encode(), body.encode())))
