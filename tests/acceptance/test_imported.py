"""What is imported beside a running daemon comes out of it: everything once, nothing early, bytes equal."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from delayer.broker.admin import Admin
from delayer.core import lines
from delayer.core.lines import Line
from delayer.core.message import Parcel, Target
from delayer.core.topology import Binding, Exchange, Queue, Topology, arguments
from delayer.store import upgrades
from tests.rig.daemon import EXECUTABLE, DaemonProcess
from tests.rig.raw import Props, Raw, number, text

COUNT = 300
QUEUE = "imported.inbox"
PLUGIN = Props(headers=((b"x-delay", number("I", 5_000)), (b"tenant", text("acme"))), delivery_mode=2)


def dump(dues: list[tuple[int, bytes]], name: str) -> bytes:
    """As the delayed-message plugin's tables are dumped; the exchange leads to our queue."""
    said = []
    for due_ms, body in dues:
        fields = (name.encode(), b"held", b"k", PLUGIN.encode(), body)
        said.append(b" ".join([b"%d" % due_ms, *map(base64.b64encode, fields)]))
    return b"\n".join([*said, b"%d" % len(dues), b""])


def raven(dues: list[tuple[int, bytes]], _name: str) -> bytes:
    def document(due_ms: int, body: bytes) -> str:
        moment = datetime.fromtimestamp(due_ms / 1000, UTC)
        return json.dumps(
            {
                "Id": f"TimeoutDatas/{due_ms}",
                "Destination": {"Queue": QUEUE, "Machine": "SERVER7"},
                "State": base64.b64encode(body).decode(),
                "Time": f"{moment:%Y-%m-%dT%H:%M:%S}.{due_ms % 1000:03d}0000Z",
                "OwningTimeoutManager": "Sales",
                "Headers": {"tenant": "acme"},
            }
        )

    return "\n".join(document(*one) for one in dues).encode()


def jsonl(dues: list[tuple[int, bytes]], _name: str) -> bytes:
    written = [
        lines.write(Line(Parcel(due_ms, b"r", b"", b"", Target(b"", QUEUE.encode()), PLUGIN.encode(), body)))
        for due_ms, body in dues
    ]
    return b"".join(written) + lines.write_end(len(dues))


SOURCES: dict[str, tuple[Callable[[list[tuple[int, bytes]], str], bytes], tuple[str, ...]]] = {
    "delayed-exchange": (dump, ("--exchange", "held=held.out")),
    "nservicebus-raven": (raven, ("--rewrite-destination", "s/@.*//")),
    "jsonl": (jsonl, ()),
}


@pytest.mark.parametrize("source", SOURCES)
async def test_imported_beside_a_running_daemon(source: str, vhost: str, database: str, tmp_path: Path) -> None:
    write, more = SOURCES[source]
    environ = {"MODE": "store", "BROKER__URL": vhost, "STORE__URL": database}
    await upgrades.upgrade(database)
    queue = Queue(QUEUE, arguments({"x-queue-type": "quorum"}))

    out = Topology((Exchange("held.out", "topic"),), (queue,), (Binding("held.out", QUEUE, "queue", "#"),))
    async with await Admin.connect(vhost) as admin:
        await admin.declare(out)
    chance = random.Random(6)
    async with DaemonProcess(environ) as daemon, await Raw.connect(vhost) as raw:
        await daemon.ready()
        inbox = await raw.inbox(QUEUE)
        began = time.time_ns() // 1_000_000
        dues = [(began + chance.randrange(-1_000, 7_000), b"%d \xff\0" % n) for n in range(COUNT)]
        file = tmp_path / "held"
        file.write_bytes(write(dues, vhost.rpartition("/")[2]))
        process = await asyncio.create_subprocess_exec(
            EXECUTABLE, "import", source, "run", str(file), *more, "--yes", "--json",
            env={f"DELAYER_{name}": value for name, value in environ.items()} | {"DELAYER_CONFIG": "/dev/null"},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        told, said = await process.communicate()
        assert process.returncode == 0, said.decode()
        assert json.loads(told)["parked"] == COUNT
        await inbox.got(body for _, body in dues)
        await raw.round_trip()
    for due_ms, body in dues:
        arrival = inbox.only(body)
        assert arrival.at_ms >= due_ms
        assert arrival.due_ms == due_ms
        headers = dict(arrival.props.headers or ())
        assert headers[b"tenant"] == text("acme")
        if source != "nservicebus-raven":
            # As the plugin would have left it: the sign turned.
            assert headers[b"x-delay"] == number("I", -5_000)
    assert inbox.counts.total() == COUNT
