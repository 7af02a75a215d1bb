"""docs/publishers.md: its Python examples run against a daemon, and work as described."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

from tests.acceptance.own_vhost import OwnVhost
from tests.integration.cli import Run
from tests.support.daemon import DaemonProcess
from tests.support.place import eventually

PAGE = Path(__file__).parents[2] / "docs" / "publishers.md"
PIKA, AIO_PIKA = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S)


async def run(example: str, url: str) -> str:
    """Run an example as a separate program, and return its output."""
    program = f"AMQP_URL = {url!r}\n{example}"
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    output, _ = await child.communicate()
    assert child.returncode == 0
    return output.decode()


async def test_the_python_examples_send_replace_keep_debounce_and_cancel(
    place: OwnVhost, store: str, delayer: Run
) -> None:
    environ = place.environ("store", store) | {"ROUTE": json.dumps([{"from": "delayer.in", "to": "delayer.out"}])}
    async with DaemonProcess(environ) as daemon:
        await daemon.ready()
        url = place.rabbitmq.url(place.vhost)
        await run(PIKA, url)

        def waiting() -> list[dict[str, Any]]:
            return json.loads(delayer("list", "--json", DELAYER_STORE__URL=store).stdout)["messages"]

        left = [len(body) for body in ("in ten minutes", "three", "one", "in 2030")]
        await eventually(lambda: [message["body_bytes"] for message in waiting()], lambda found: found == left)
        _, debounced, _, last = waiting()
        assert last["due_ms"] == 1_893_488_400_000
        assert (debounced["key"], debounced["due_ms"] - debounced["parked_ms"]) == ("index", 1_800_000)
        assert await run(AIO_PIKA, url) == "cancelled\n"
        assert len(waiting()) == 4
        assert await daemon.stop() == 0
