"""Beside a shared cascade, without a store: what its destination does not take stands in the refused queue, with its
reason, and goes back from there: by the command, and by the README's recipe."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import pytest

from tests.faults.place import Place, eventually
from tests.rig.daemon import DaemonProcess
from tests.rig.raw import Message, Props, Raw, content, number, text
from tests.rig.servers import RabbitMQ

ROUTES = [{"from": "delayer.in", "to": "late.out"}]


async def command(environ: dict[str, str], *arguments: str) -> tuple[int | None, str]:
    environ = {**os.environ, **{f"DELAYER_{name}": value for name, value in environ.items()}}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from delayer.cli import main; main()",
        *arguments,
        env=environ,
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await process.communicate()
    return process.returncode, said.decode()


def reasons(daemon: DaemonProcess) -> list[str]:
    return [event["reason"] for event in daemon.events if event["event"] == "message refused"]


@pytest.mark.deadline(60)
async def test_it_is_listed_with_its_reason_and_goes_back(rabbitmq: RabbitMQ) -> None:
    vhost = rabbitmq.add_vhost()
    try:
        rabbitmq.api("PUT", f"/api/exchanges/{vhost}/late.out", {"type": "topic", "durable": True})
        place = await Place("native", rabbitmq.url(vhost)).declare()
        environ: dict[str, Any] = place.environ | {"ROUTE": json.dumps(ROUTES), "NATIVE__CASCADE": "nservicebus-v2"}
        async with DaemonProcess(environ) as daemon, await Raw.connect(place.broker) as raw:
            await daemon.ready()
            for body in (b"by the command", b"by hand"):
                headers = ((b"x-delay", number("l", 1_000)), (b"who", text("me")))
                props = Props(headers=headers, delivery_mode=2, expiration=b"600000", message_id=body)
                await raw.publish(Message("delayer.in", b"k", props, body))
            await eventually(lambda: asyncio.sleep(0, reasons(daemon)), lambda found: len(found) == 2, timeout=20)
            [reason] = set(reasons(daemon))
            assert reason.startswith("returned: 312")
            rabbitmq.api("PUT", f"/api/queues/{vhost}/late", {"durable": True})
            rabbitmq.api("POST", f"/api/bindings/{vhost}/e/late.out/q/late", {"routing_key": "#"})
            code, said = await command(environ, "refused", "list", "--json")
            assert code == 0
            found = {one["message_id"]: one for one in json.loads(said)["messages"]}
            assert {(one["reason"], one["exchange"], one["routing_key"]) for one in found.values()} == {
                (reason, "delayer.in", "k")
            }
            code, said = await command(environ, "refused", "retry", found["by the command"]["id"])
            assert code == 0, said
            inbox = await raw.inbox("late")
            await inbox.got([b"by the command"], timeout=10)
            left = await raw.inbox("delays.refused")
            await eventually(lambda: asyncio.sleep(0, len(left.arrivals)), lambda count: count > 0, timeout=10)
            by_hand = left.arrivals[0]
            where = [content(by_hand.props.one(name)) for name in (b"x-delayer-exchange", b"x-delayer-routing-key")]
            await raw.publish(Message(where[0].decode(), where[1], by_hand.props, by_hand.delivery.body))
            await inbox.got([b"by hand"], timeout=10)
            for arrival in inbox.arrivals:
                names = {name for name, _ in arrival.props.headers or ()} - {b"x-delayer-expiration"}
                assert names == {b"x-delay", b"who", b"x-delayer-id", b"x-delayer-due"}
            assert await daemon.stop() == 0, daemon.tail()
    finally:
        rabbitmq.drop_vhost(vhost)
