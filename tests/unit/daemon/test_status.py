"""What `systemctl status` says while something keeps the daemon from its work."""

from __future__ import annotations

import asyncio
import doctest
import socket
from pathlib import Path

import pytest

from delayer.daemon import systemd
from delayer.daemon.systemd import Condition, Notifier, StatusReporter, trouble

WELL = Condition(connected=True, blocked=False, store=True, usable=True, consuming=True)


def test_examples() -> None:
    assert doctest.testmod(systemd).failed == 0


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (WELL, ""),
        (WELL._replace(store=False, usable=False), ""),
        (WELL._replace(connected=False), "the broker is out of reach"),
        (WELL._replace(connected=False, blocked=True), "the broker is out of reach"),
        (WELL._replace(blocked=True), "the broker takes no publishes (a resource alarm)"),
        (WELL._replace(usable=False, consuming=False), "the store is out of reach, or gives us no lane"),
        (WELL._replace(consuming=False), "nothing is consumed yet"),
    ],
)
def test_words(seen: Condition, words: str) -> None:
    assert trouble(seen) == words


async def test_systemd_hears_what_changes_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(str(path))
        line.setblocking(False)
        notifier = Notifier({"NOTIFY_SOCKET": str(path)})
        notifier.status("starting")
        now, looks = [WELL._replace(connected=False)], asyncio.Semaphore(0)

        def look() -> Condition:
            looks.release()
            return now[0]

        async def looked(times: int = 3) -> str:
            for _ in range(times):
                await looks.acquire()
            heard = []
            while True:
                try:
                    heard.append(line.recv(4096).decode())
                except BlockingIOError:
                    return " | ".join(heard)

        stopping = asyncio.Event()
        running = asyncio.create_task(StatusReporter(notifier, look, every=0.001).run(stopping))
        assert await looked() == "STATUS=starting | STATUS=starting; the broker is out of reach"
        now[0] = WELL
        assert await looked() == "STATUS=starting"
        notifier.ready("mode store")
        assert await looked() == "READY=1\nSTATUS=mode store"
        now[0] = WELL._replace(usable=False)
        assert await looked() == "STATUS=mode store; the store is out of reach, or gives us no lane"
        notifier.ready("mode native; the last reload was refused: because")
        assert (await looked()).endswith("refused: because; the store is out of reach, or gives us no lane")
        stopping.set()
        await running
