"""Native mode in one hop: the broker itself delays envelopes in the due queue, where it can (RabbitMQ 4.4)."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.acceptance.own_vhost import OwnVhost, cancel, delayed
from tests.support.daemon import DaemonProcess, answered, command
from tests.support.place import eventually
from tests.support.raw import Message, Props, Value, number, text
from tests.support.servers import RabbitMQ

HOUR_MS = 3_600_000


def file(place: OwnVhost, path: Path, strategy: str) -> Path:
    sections: Mapping[str, Mapping[str, str]] = {
        "native": {"strategy": strategy},
        "broker": {"url": place.url, "management_url": place.rabbitmq.management_url},
    }
    place.write(path / f"{strategy}.toml", "native", sections)
    return path / f"{strategy}.toml"


async def test_auto_chooses_the_strategy_that_the_broker_supports(place: OwnVhost, tmp_path: Path) -> None:
    config = file(place, tmp_path, "auto")
    async with place.working(config=config) as (daemon, raw, inbox):
        chosen = await daemon.event("native strategy")
        assert chosen["strategy"] == ("queue" if place.rabbitmq.delays_messages else "cascade")
        assert bool(chosen["reason"]) is not place.rabbitmq.delays_messages
        due_ms = time.time() * 1000 + 1_200
        await raw.publish(delayed("soon", 1_200), delayed("late", HOUR_MS))
        await inbox.got([b"soon"])
        assert time.time() * 1000 >= due_ms
        status = (await answered(config, "status"))["broker"]
        in_levels = sum(level["depth"] for level in status["cascade"])
        assert in_levels == (0 if place.rabbitmq.delays_messages else 1)
        assert await daemon.stop() == 0


async def test_the_strategy_queue_says_why_it_cannot_start(place: OwnVhost, tmp_path: Path) -> None:
    if place.rabbitmq.delays_messages:
        pytest.skip("this broker can")
    async with DaemonProcess({}, config=file(place, tmp_path, "queue")) as daemon:
        said = await daemon.event("consuming interrupted", where=lambda one: "native.strategy" in str(one))
        assert "delays no messages" in str(said)
        assert not [one for one in daemon.events if one["event"] == "ready"]


@pytest.mark.parametrize(("before", "after"), [("cascade", "queue"), ("queue", "cascade")])
async def test_a_change_of_the_strategy_loses_nothing_and_nothing_is_early(
    delaying: RabbitMQ, place: OwnVhost, tmp_path: Path, before: str, after: str
) -> None:
    async with await place.raw() as raw:
        inbox = await raw.inbox("inbox")
        async with DaemonProcess({}, config=file(place, tmp_path, before)) as daemon:
            await daemon.ready()
            due_ms = time.time() * 1000 + 6_000
            await raw.publish(*(delayed(f"{n}", 6_000) for n in range(50)))
            await eventually(lambda: asyncio.to_thread(ready, place, "delays"), lambda depth: depth == 0)
            assert await daemon.stop() == 0
            first = await daemon.event("stopped")
            assert first["cascaded"] == 50
        async with DaemonProcess({}, config=file(place, tmp_path, after)) as daemon:
            await daemon.ready()
            await raw.publish(*(delayed(f"{n}", 1_000) for n in range(50, 100)))
            await inbox.got([b"%d" % n for n in range(100)])
            assert time.time() * 1000 >= due_ms
            assert await daemon.stop() == 0
            assert (await daemon.event("stopped"))["released"] + first["released"] == 100


async def test_messages_waiting_in_the_due_queue_are_counted(
    delaying: RabbitMQ, place: OwnVhost, store: str, tmp_path: Path
) -> None:
    config = file(place, tmp_path, "queue")
    place.things.exchange("missing")
    async with DaemonProcess({}, config=config) as daemon, await place.raw() as raw:
        await daemon.ready()
        await raw.publish(*(delayed(f"{n}", HOUR_MS + n) for n in range(20)))

        async def counted() -> int:
            found: int = (await answered(config, "status"))["broker"]["delayed"]["delays.due"]
            return found

        assert await eventually(counted, lambda count: count == 20)
        rows = (await answered(config, "check"))["checks"]
        (row,) = [row for row in rows if row["what"] == "broker's delays"]
        assert row["result"] == "ok" and row["found"].startswith('20 wait in "delays.due"; the broker')
        assert await daemon.stop() == 0
        # In store mode too, where the daemon no longer puts messages there.
        shown = await command(config, "topology", "show", environ={"MODE": "store", "STORE__URL": store})
        assert re.search(r"delays\.due, delayed or forwarded by RabbitMQ itself +20\n", shown)


def timed(body: str, when: Value, key: str = "") -> Message:
    """A message with x-opt-delivery-time, and with this x-delay-key."""
    headers = ((b"x-opt-delivery-time", when), *(((b"x-delay-key", text(key)),) if key else ()))
    return Message("in", b"inbox", Props(headers=headers, delivery_mode=2), body.encode())


async def test_a_classic_intake_queue_does_not_hide_messages_and_survives_every_instant(
    place: OwnVhost, store: str, tmp_path: Path
) -> None:
    """In a quorum queue RabbitMQ 4.4 hides such messages, and instants beyond the year 2262 crash the queue."""
    config, now_ms = tmp_path / "classic.toml", time.time_ns() // 1_000_000
    sections = {
        "store": {"url": store},
        "intake": {"queue_type": "classic", "max_delay": "1d"},
        "broker": {"url": place.url, "management_url": place.rabbitmq.management_url},
    }
    place.write(config, "store", sections)
    place.things.queue("answers")
    place.things.exchange("missing")
    async with place.working(config=config) as (daemon, raw, inbox):
        answers = await raw.inbox("answers")
        await raw.publish(
            timed("in an hour", number("l", now_ms + HOUR_MS)),
            timed("cancelled", number("l", now_ms + HOUR_MS), key="taken back"),
            cancel("taken back"),
            timed("in two days", number("l", now_ms + 48 * HOUR_MS)),
            timed("microseconds", number("l", now_ms * 1000)),
            timed("nanoseconds", number("l", now_ms * 1_000_000)),
            timed("milliseconds in a timestamp", number("T", now_ms)),
            timed("in two seconds", number("l", now_ms + 2_000)),
        )
        await inbox.got([b"in two seconds"])
        assert await answers.until(lambda: len(answers.arrivals) == 1, 10)
        assert json.loads(answers.arrivals[0].delivery.body)["outcome"] == "cancelled"
        (waiting,) = (await answered(config, "list"))["messages"]
        assert waiting["due_ms"] == now_ms + HOUR_MS
        assert await eventually(lambda: place.things.depth("delays.refused"), lambda depth: depth == 4)
        assert await daemon.stop() == 0
        rows = (await answered(config, "check"))["checks"]
        assert not [row for row in rows if row["what"] in ("broker's delays", "topology") and row["result"] != "ok"]


def ready(place: OwnVhost, queue: str) -> int:
    """The number of ready messages, asked from the broker."""
    listed = place.rabbitmq.ctl("list_queues", "-p", place.vhost, "name", "messages")
    return next(int(line.split()[1]) for line in listed.splitlines() if line.split()[:1] == [queue])
