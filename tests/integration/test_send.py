"""`delayer send --file` and errors before sending, against a broker."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli import Run, channel_to, said, take
from tests.support.servers import RabbitMQ


def text_of(*lines: dict[str, Any] | str) -> bytes:
    return "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines).encode()


@pytest.fixture
def ready(delayer: Run) -> Run:
    delayer("topology", "apply")
    return delayer


async def test_each_line_is_a_message(ready: Run, vhost: str, tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_bytes(
        text_of(
            {"routing_key": "a", "delay": "1h", "message_id": "one", "body": "é", "headers": {"n": 3, "t": True}},
            "",
            {"due": "2031-01-31T08:00:00Z", "body_b64": "AP8=", "key": "k", "headers": {"f": 1.5, "s": "x"}},
            {"key": "k", "key_mode": "debounce", "key_ceiling": "1m", "headers": {"s": "y"}},
            {},
        )
    )
    sent = ready("send", "--file", str(file), "--delay", "5m", "--routing-key", "d", "--header", "s=default")
    assert sent.stdout == "Sent: 4. Not taken: 0.\n"
    first, second, fourth, third = await take(vhost, "delays")
    assert (first.message_id, first.routing_key, first.body) == ("one", "a", "é".encode())
    assert said(first) == {"n": 3, "t": True, "s": "default", "x-delay": 3_600_000}
    assert (second.routing_key, second.body) == ("d", b"\0\xff")
    assert said(second) == {"f": 1.5, "s": "x", "x-delay-key": "k", "x-deliver-at": 1_927_612_800_000}
    mode = {"x-delay-key": "k", "x-delay-key-mode": "debounce", "x-delay-key-ceiling": 60_000}
    assert said(fourth) == {"s": "y", "x-delay": 300_000} | mode
    assert (third.body, said(third)) == (b"", {"s": "default", "x-delay": 300_000})
    assert third.message_id and third.message_id != second.message_id


async def test_many_lines_from_stdin(ready: Run, vhost: str) -> None:
    """More than one portion, with a large body that is sent alone."""
    lines = text_of(*({"message_id": str(n), "body": "x" * (5 << 20 if n == 1_700 else 9)} for n in range(2_500)))
    sent = ready("send", "--file", "-", "--delay", "1h", stdin=lines)
    assert sent.stdout == "Sent: 2,500. Not taken: 0.\n"
    assert [one.message_id for one in await take(vhost, "delays")] == [str(n) for n in range(2_500)]


async def test_a_wrong_line_stops_its_whole_portion(ready: Run, vhost: str) -> None:
    lines = text_of(*({"message_id": str(n)} for n in range(1_500)), {"message_id": "x" * 256}, {})
    told = ready("send", "--file", "-", stdin=lines, expect=2)
    assert "line 1501: message_id: expected at most 255 bytes, found 256" in told.stderr
    assert "Sent: 1,000. Next: correct the error below, and send the lines from 1001 on." in told.stderr
    assert len(await take(vhost, "delays")) == 1_000
    told = ready("send", "--file", "-", stdin=text_of("{}", "nonsense"), expect=2)
    assert "Sent: 0. Next: correct the error below, and send the lines from 1 on." in told.stderr
    assert await take(vhost, "delays") == []


async def test_lines_that_the_broker_does_not_take_are_named(delayer: Run, vhost: str) -> None:
    async with channel_to(vhost) as channel:
        full: Any = {"x-max-length": 2, "x-overflow": "reject-publish"}
        await channel.declare_queue("full", durable=True, arguments=full)
        exchange = await channel.declare_exchange("delayer.in", "topic", durable=True)
        await (await channel.get_queue("full")).bind(exchange, "full")
    keys = ["full", "nowhere", "full", "full", "nowhere"]
    lines = text_of(*({"routing_key": key, "message_id": f"m{n}"} for n, key in enumerate(keys)))
    told = delayer("send", "--file", "-", "--delay", "1s", stdin=lines, expect=1)
    assert told.stdout == "Sent: 2. Not taken: 3.\n"
    errors = [
        (2, "m1", "nothing is bound for it"),
        (4, "m3", "a queue refused it"),
        (5, "m4", "nothing is bound for it"),
    ]
    for line, name, reason in errors:
        assert f'line {line}: the broker did not take "{name}": {reason}.' in told.stderr
    assert "delayer topology apply" in told.stderr and "those from 6 on" in told.stderr


async def test_repeated_ids_in_a_file_are_separate_messages(delayer: Run, vhost: str) -> None:
    """Also where the broker returns one of them."""
    async with channel_to(vhost) as channel:
        await channel.declare_exchange("delayer.in", "topic", durable=True)
    told = delayer(
        "send", "--file", "-", "--delay", "1s", stdin=text_of({"message_id": "a"}, {"message_id": "a"}), expect=1
    )
    assert "line 1: the broker did not take" in told.stderr and "Not taken: 1" in told.stdout


async def test_json_names_the_message_and_where_it_goes(ready: Run, tmp_path: Path) -> None:
    told = json.loads(ready("send", "--message-id", "m-1", "--delay", "1h", "--json").stdout)
    assert (told["message_id"], told["exchange"], told["where"]) == ("m-1", "delayer.in", "store")
    assert abs(told["due_ms"] - time.time() * 1000 - 3_600_000) < 60_000
    cancel = json.loads(ready("send", "--header", "x-delay-cancel=k", "--json").stdout)
    assert (cancel["cancels"], cancel["due_ms"], cancel["where"]) == ("k", None, None)
    native = json.loads(ready("send", "--delay", "1h", "--json", DELAYER_MODE="native").stdout)
    assert native["where"] == "broker"
    (lines := tmp_path / "lines").write_bytes(text_of({"body": "a"}, {"body": "b"}))
    assert json.loads(ready("send", "--file", str(lines), "--json").stdout) == {"sent": 2, "failed": [], "next_line": 3}


def test_a_missing_exchange_is_named(delayer: Run) -> None:
    told = delayer("send", "--file", "-", "--delay", "1s", stdin=text_of({}, {}), expect=1)
    assert "lines 1 to 2: the broker did not take them: NOT_FOUND - no exchange 'delayer.in'" in told.stderr
    assert "Sent: 0. " in told.stderr and "from 1 on" in told.stderr


async def test_a_message_that_is_too_large_is_not_sent(
    ready: Run, rabbitmq: RabbitMQ, vhost: str, tmp_path: Path
) -> None:
    too_long = ("--header", "h=" + "x" * 131_000)
    assert "properties are too long to carry" in ready("send", "--delay", "1s", *too_long, expect=2).stderr
    body = tmp_path / "body"
    with body.open("wb") as file:
        file.truncate(rabbitmq.largest_body + 1)
    told = ready("send", "--delay", "1s", "--body-file", str(body), expect=1).stderr
    assert "the broker did not take it: PRECONDITION_FAILED" in told and "larger than" in told
    assert await take(vhost, "delays") == []


@pytest.mark.parametrize("option", ["--routing-key", "--message-id", "--delay-key"])
def test_an_argument_that_is_not_utf_8_is_rejected(ready: Run, option: str) -> None:
    assert f"{option}: expected UTF-8" in ready("send", "--delay", "1s", option, "a\udcff", expect=2).stderr
