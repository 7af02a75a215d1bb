"""`delayer status` beside a running daemon: rates and lateness of the last minutes, and again and again."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from pathlib import Path
from typing import Any

from tests.acceptance.place import Place, delayed
from tests.faults.place import eventually
from tests.support.daemon import EXECUTABLE, DaemonProcess, command
from tests.support.web import Web


async def test_rates_and_lateness_and_watching(place: Place, store: str, tmp_path: Path) -> None:
    config = tmp_path / "delayer.toml"
    environ = place.environ("store", store) | {"HTTP__LISTEN": "127.0.0.1:0"}
    async with DaemonProcess(environ) as daemon, await place.raw() as raw:
        inbox = await raw.inbox("inbox")
        web = await Web.of(await daemon.ready())
        place.write(config, "store", {"store": {"url": store}, "http": {"listen": web.address}})
        messages = [delayed(f"soon {n}", n) for n in range(200)]
        await raw.publish(*messages, delayed("later", 3_600_000))
        await inbox.got(message.body for message in messages)

        async def live() -> dict[str, Any]:
            return dict(json.loads(await command(config, "status", "--json"))["live"])

        found = await eventually(live, lambda seen: seen["last"]["60"]["rates"]["released"] > 0)
        last = found["last"]["60"]
        assert found["error"] is None
        assert last["rates"]["parked"] > 0
        assert 0 <= last["p50"] <= last["p99"] <= last["worst"] < 60
        text = await command(config, "status")
        assert re.search(r"1 min +\d+\.\d +\d+\.\d +\d+ ms", text), text

        process = await asyncio.create_subprocess_exec(
            str(EXECUTABLE), "--config", str(config), "status", "--watch", "--json",
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        looks = [json.loads(await process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0
        assert [look["store"]["waiting"] for look in looks] == [1, 1, 1]
        assert await daemon.stop() == 0
    assert "no daemon answers" in await command(config, "status")
