"""A daemon whose log nobody reads goes on, and stops in order."""

from __future__ import annotations

import asyncio
import os
import select
import time
from urllib.parse import quote

from tests.acceptance.place import Place, delayed
from tests.faults.place import eventually
from tests.support.daemon import EXECUTABLE
from tests.support.raw import Message, Props, text

REFUSED = 400
"""Messages, each with a line of its own in the log: three times what a pipe takes."""


async def bound(place: Place) -> bool:
    bindings = await asyncio.to_thread(place.rabbitmq.api, "GET", f"/api/bindings/{quote(place.vhost, safe='')}")
    return any(one["source"] == "in" for one in bindings)


async def test_a_log_that_nobody_reads(place: Place) -> None:
    outlet, inlet = os.pipe()

    async def full() -> bool:
        return not select.select([], [inlet], [], 0)[1]

    environ = {"HTTP__LISTEN": "", "LOG__FORMAT": "json"} | place.environ("native")
    daemon = await asyncio.create_subprocess_exec(
        str(EXECUTABLE), "run", stdin=asyncio.subprocess.DEVNULL, stderr=inlet,
        env=os.environ | {f"DELAYER_{name}": value for name, value in environ.items()},
    )  # fmt: skip
    try:
        await eventually(lambda: bound(place), bool)
        async with await place.raw() as raw:
            inbox = await raw.inbox("inbox")
            wrong = Props(headers=((b"x-delay", text(b"some day " * 40)),), delivery_mode=2)
            await raw.publish(*(Message("in", b"inbox", wrong, b"bad") for _ in range(REFUSED)))
            await eventually(full, bool)
            await raw.publish(delayed("soon", 1_000))
            await inbox.got([b"soon"])
        began = time.monotonic()
        daemon.terminate()
        assert await asyncio.wait_for(daemon.wait(), 15) == 0
        assert time.monotonic() - began < 10
        assert os.read(outlet, 5) == b'{"tim'
    finally:
        if daemon.returncode is None:
            daemon.kill()
            await daemon.wait()
        os.close(outlet)
        os.close(inlet)
