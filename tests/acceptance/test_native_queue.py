"""Native mode in one hop: the broker itself delays envelopes in the due queue, where it can (RabbitMQ 4.4)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.acceptance.own_vhost import OwnVhost, delayed
from tests.support.daemon import DaemonProcess, answered
from tests.support.place import eventually
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
    delaying: RabbitMQ, place: OwnVhost, tmp_path: Path
) -> None:
    config = file(place, tmp_path, "queue")
    place.things.exchange("missing")
    async with DaemonProcess({}, config=config) as daemon, await place.raw() as raw:
        await daemon.ready()
        await raw.publish(*(delayed(f"{n}", HOUR_MS + n) for n in range(20)))

        async def counted() -> int:
            found: int = (await answered(config, "status"))["broker"]["delayed"]["messages"]
            return found

        assert await eventually(counted, lambda count: count == 20)
        rows = (await answered(config, "check"))["checks"]
        (row,) = [row for row in rows if row["what"] == "broker's delays"]
        assert row["result"] == "ok" and row["found"].startswith('20 wait in "delays.due"; the broker')
        assert await daemon.stop() == 0


def ready(place: OwnVhost, queue: str) -> int:
    """The number of ready messages, asked from the broker."""
    listed = place.rabbitmq.ctl("list_queues", "-p", place.vhost, "name", "messages")
    return next(int(line.split()[1]) for line in listed.splitlines() if line.split()[:1] == [queue])
