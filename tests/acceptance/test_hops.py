"""The modules that one plain message crosses, from the socket to the commit and out again, in one process."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import delayer
from delayer.config.loading import load
from delayer.daemon.systemd import Notifier
from delayer.daemon.wiring import Daemon
from tests.acceptance.own_vhost import OwnVhost, delayed
from tests.support.place import eventually
from tests.support.raw import Raw
from tests.support.servers import Postgres, RabbitMQ

PACKAGE = str(Path(delayer.__file__).parent) + os.sep
MOST = {"store": 22, "native": 18}
WINDOW = 4.0
"""Seconds of each recording: of an idle daemon, and of the same daemon with one message."""


@contextmanager
def recorded(found: Counter[tuple[str, str]]) -> Iterator[None]:
    """Count the calls of each function of the package in this thread."""

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            found[code.co_filename[len(PACKAGE) : -3], code.co_qualname] += 1

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def published_and_received(url: str) -> None:
    """Send one message there and back, in its own thread and event loop."""

    async def go() -> None:
        async with await Raw.connect(url) as raw:
            inbox = await raw.inbox("inbox")
            await raw.publish(delayed("plain", 1_200))
            await inbox.got([b"plain"])

    asyncio.run(go())


@pytest.mark.parametrize("mode", MOST)
async def test_a_plain_message_crosses_few_modules(
    rabbitmq: RabbitMQ, postgres: Postgres, schema: str, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    vhost = rabbitmq.add_vhost()
    place = OwnVhost.furnished(rabbitmq, vhost)
    environ = place.environ(mode, postgres.url(schema) if mode == "store" else "")
    settings = load(None, {f"DELAYER_{name}": value for name, value in environ.items()}, {})
    daemon = Daemon(settings, Notifier())
    queues = 2 if mode == "native" else 1
    running = asyncio.create_task(daemon.run())
    try:
        await eventually(daemon.consuming, lambda seen: all(seen.values()) and len(seen) == queues)
        if mode == "store":  # Another lane, taken meanwhile, would look like work for the message.
            await eventually(lambda: len(daemon.store.numbers) == settings.store.lanes)
        # The first message of a connection and of a store pays for one-time work: statements, partitions, channels, and
        # the isolation connection.
        await asyncio.to_thread(published_and_received, place.url)
        idle: Counter[tuple[str, str]] = Counter()
        with recorded(idle):
            await asyncio.sleep(WINDOW)
        busy: Counter[tuple[str, str]] = Counter()
        with recorded(busy):
            began = time.monotonic()
            await asyncio.to_thread(published_and_received, place.url)
            await asyncio.sleep(WINDOW - (time.monotonic() - began))
    finally:
        daemon.stop()
        await running
        rabbitmq.drop_vhost(vhost)
    crossed: dict[str, list[str]] = defaultdict(list)
    for (module, name), calls in busy.items():
        # The daemon reads the clock and feeds the watchdog every second, even without messages.
        if calls > (1.5 * idle[module, name] + 1 if idle[module, name] else 0):
            crossed[module].append(name)
    with capsys.disabled():
        print(f"\n{mode}: {len(crossed)} modules")
        for module, names in sorted(crossed.items()):
            print(f"  {module}: {', '.join(sorted(names))}")
    assert len(crossed) <= MOST[mode]
