"""Messages that make the broker close the whole connection: they are held with its reason, and do not block other
messages, even when retried."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from delayer.core.message import Parcel, Target
from delayer.core.topology import Queue, Topology, arguments
from delayer.format.lines import Line, format_line
from tests.integration.cli import Run
from tests.support.daemon import DaemonProcess
from tests.support.place import eventually
from tests.support.raw import Message, Props, Raw, array, number, text
from tests.support.store import sql
from tests.support.topology import declare

GOOD = 60
TOKEN = b"amq.rabbitmq.reply-to.g2EF.k"
"""Not a token of the broker: it reads a number where it expects a process."""
NUMBER, REPLY, COPY = b"a number that Erlang does not have", b"a direct reply without a consumer", b"a copy to one"
BAD = {
    NUMBER: (b"inbox", (b"rate", number("d", math.nan))),
    REPLY: (TOKEN, (b"kept", text("1"))),
    COPY: (b"inbox", (b"CC", array(text(TOKEN)))),
}
"""They cannot arrive through a broker; an import, or an older daemon that did not refuse them yet, may have parked
them."""
NOW_MS = 1_700_000_000_000


def lines() -> bytes:
    """The bad ones are between the good ones, and all were due long ago."""
    made = []
    for n in range(GOOD):
        made.append((b"good %d" % n, b"inbox", (b"n", number("I", n))))
        if n % 20 == 10:
            body = list(BAD)[n // 20]
            made.append((body, *BAD[body]))
    return b"".join(
        format_line(Line(Parcel(NOW_MS + at, b"a", b"a", b"k", Target(b"", key), Props(headers=(one,)).encode(), body)))
        for at, (body, key, one) in enumerate(made)
    )


@pytest.mark.words
@pytest.mark.deadline(120)
async def test_messages_that_end_connections_are_held_and_do_not_stop_the_rest(
    delayer: Run, vhost: str, database: str, tmp_path: Path
) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_bytes(lines())
    routes = '[{"from": "in", "to": ""}]'
    await declare(vhost, Topology(queues=(Queue("inbox", arguments({"x-queue-type": "quorum"})),)))
    settings = {"BROKER__URL": vhost, "STORE__URL": database, "ROUTE": routes}
    async with DaemonProcess(settings) as daemon:
        await daemon.ready()
        async with await Raw.connect(vhost) as raw:
            inbox = await raw.inbox("inbox")
            delayer("import", "jsonl", "run", str(file), "--unverified", "--yes")
            await inbox.got([b"good %d" % n for n in range(GOOD)], timeout=60)
            async with sql(database) as admin:

                async def ends() -> dict[bytes, str]:
                    arrived = {body: "delivered" for body in BAD if inbox.counts[body]}
                    held = await admin.fetch("SELECT body, reason FROM held")
                    return arrived | {bytes(row["body"]): row["reason"] for row in held}

                found = await eventually(ends, lambda ends: ends.keys() == BAD.keys())
            assert found[NUMBER] == "the broker closed the connection: 541 INTERNAL_ERROR"
            # RabbitMQ 4.3 reads a foreign token without an error.
            assert found[REPLY] in (found[NUMBER], "returned: 312 NO_ROUTE")
            assert found[COPY] in (found[NUMBER], "delivered")
            lost = connections_lost(daemon)
            cancel = Props(headers=((b"x-delay-cancel", text("unknown")),), reply_to=TOKEN, delivery_mode=2)
            delayed = Props(headers=((b"x-delay", number("I", 1000)),), delivery_mode=2)
            for n in range(10):
                await raw.publish(
                    Message("in", b"inbox", cancel, b""), Message("in", b"inbox", delayed, b"later %d" % n)
                )
            await inbox.got([b"later %d" % n for n in range(10)])
            assert all(inbox.counts[b"later %d" % n] == 1 for n in range(10))
        assert await daemon.stop() == 0, daemon.tail()
        assert 1 <= lost <= len(BAD)
        assert connections_lost(daemon) == lost
        assert not [event for event in daemon.events if event["level"] == "error"]
    # Another daemon has not seen these messages, so it does not know the bad destinations yet.
    async with DaemonProcess(settings) as daemon:
        await daemon.ready()
        delayer("held", "retry", "--all", "--yes")
        await daemon.event("message held", where=lambda event: event["kind"] == "closed_connection")
        assert await daemon.stop() == 0, daemon.tail()
        assert connections_lost(daemon) == 0


def connections_lost(daemon: DaemonProcess) -> int:
    return sum(event["event"] == "broker connection lost" for event in daemon.events)
