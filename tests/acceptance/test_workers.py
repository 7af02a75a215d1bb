"""Several workers under one ``delayer run``: the work shared, the dead and the hung replaced, stopped as one."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.place import Place, delayed
from tests.acceptance.test_daemon_reload import by_store
from tests.acceptance.world import assert_no_secret, secret_store_url, wait_for
from tests.rig.daemon import EXECUTABLE, DaemonProcess
from tests.rig.servers import Postgres

STOP_SECONDS = 10.0
ADOPTION_SECONDS = 5.0
WATCHDOG_SECONDS = 10.0
LONG = 60.0
"""Seconds for what takes two interpreters on a busy machine a few."""

pytestmark = pytest.mark.deadline(150)


class Service(DaemonProcess):
    """``delayer run`` with two workers."""

    async def ready(self) -> Service:
        await self.event("workers ready", timeout=LONG)
        return self

    async def of(self, worker: int, name: str, *, after: int = 0) -> dict[str, Any]:
        """The first event of that name that a worker logged, or the supervisor about it."""
        return await self.event(name, where=lambda one: one.get("worker") == worker, after=after, timeout=LONG)

    async def pid_of(self, worker: int, *, after: int = 0) -> int:
        return int((await self.of(worker, "worker started", after=after))["pid"])

    def errors(self) -> list[dict[str, Any]]:
        return [one for one in self.events if one["level"] in ("error", "critical")]


def service(place: Place, path: Path, mode: str, store: str, **sections: dict[str, Any]) -> Service:
    """Its file, as :func:`written` writes it, and the daemon that reads it."""
    written(place, path, mode, store, **sections)
    return Service({"WORKERS": "2"}, config=path)


def written(place: Place, path: Path, mode: str, store: str, **sections: dict[str, Any]) -> None:
    place.write(path, mode, {"store": {"url": store, "lanes": 1}, **sections})


@pytest.fixture
def store(postgres: Postgres, schema: str) -> str:
    return secret_store_url(postgres, schema)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "delayer.toml"


@pytest.mark.parametrize("order", [signal.SIGTERM, signal.SIGINT])
async def test_two_workers_share_the_work_and_stop_as_one(
    place: Place, store: str, config: Path, order: signal.Signals
) -> None:
    """Both park and release, neither starves; the stop is in time, and no fault: nothing lost, nothing twice."""
    async with service(place, config, "store", store) as daemon, await place.raw() as raw:
        inbox = await raw.inbox("inbox")
        await daemon.ready()
        first = [delayed(f"first {n}", n % 5 * 300) for n in range(3000)]
        await raw.publish(*first)
        await inbox.got(message.body for message in first)
        later = [delayed(f"in flight {n}", n % 3 * 500) for n in range(1000)]
        publishing = asyncio.create_task(raw.publish(*later))
        assert await inbox.until(lambda: len(inbox.arrivals) > len(first))
        began = time.monotonic()
        daemon.signal(order)
        assert await daemon.wait() == 0
        assert time.monotonic() - began < STOP_SECONDS
        await publishing
        counts = [await daemon.of(worker, "stopped") for worker in (1, 2)]
        for kind in ("parked", "released"):
            shares = [one[kind] for one in counts]
            assert min(shares) > len(first) / 10, f"{kind}: {shares}"
        assert not daemon.errors()
        assert not daemon.stray_lines
        assert {one.get("worker") for one in daemon.events} == {None, 1, 2}
        assert_no_secret(daemon)
        async with Service({}, config=config) as alone:  # one process, as without workers
            await alone.event("ready")
            await inbox.got(message.body for message in (*first, *later))
            assert await alone.stop() == 0
            assert not [one for one in alone.events if "worker" in one or "workers" in one["event"]]
        await raw.round_trip()
        assert set(inbox.counts.values()) == {1}
        assert all(arrival.at_ms >= arrival.due_ms for arrival in inbox.arrivals)


async def test_a_dead_workers_lanes_are_adopted_and_it_is_started_again(
    place: Place, postgres: Postgres, schema: str, store: str, config: Path
) -> None:
    async with service(place, config, "store", store) as daemon, await place.raw() as raw:
        inbox = await raw.inbox("inbox")
        await daemon.ready()
        messages = [delayed(f"orphan {n}", 8000 + n) for n in range(400)]
        await raw.publish(*messages)
        in_two_lanes = "SELECT lane FROM message GROUP BY lane HAVING count(*) > 20"
        await wait_for(lambda: postgres.execute("SELECT FROM message", database=schema) == f"SELECT {len(messages)}")
        assert postgres.execute(in_two_lanes, database=schema) == "SELECT 2"

        # A file that cannot be read keeps the successor away, or it would take the lane back as quickly; and it is no
        # reason to stop the others. Nor is one that leads elsewhere.
        await asyncio.to_thread(config.write_text, "half a fi")
        seen = len(daemon.events)
        began = time.monotonic()
        os.kill(await daemon.pid_of(1), signal.SIGKILL)
        await daemon.of(2, "lane adopted", after=seen)
        assert time.monotonic() - began < ADOPTION_SECONDS
        assert (await daemon.of(1, "worker died", after=seen))["signal"] == "SIGKILL"
        assert "half a fi" not in (await daemon.of(1, "worker not started", after=seen))["reason"]
        await inbox.got(message.body for message in messages)

        written(place, config, "store", store, intake={"queue": "elsewhere"})
        elsewhere = await daemon.of(1, "worker not started", after=len(daemon.events))
        assert "intake.queue" in elsewhere["reason"]
        written(place, config, "store", store)
        await daemon.of(1, "worker started", after=seen)
        await daemon.of(1, "ready", after=seen)
        more = [delayed(f"after {n}", 300) for n in range(400)]
        await raw.publish(*more)
        await inbox.got(message.body for message in more)
        assert await daemon.stop() == 0
        assert (await daemon.of(1, "stopped"))["parked"] > 0
        assert_no_secret(daemon)


async def test_a_killed_supervisor_leaves_nobody(place: Place, store: str, config: Path) -> None:
    """The workers stop in order, also one that hung: what they had parked they gave back, and what was in flight comes
    once."""
    async with service(place, config, "store", store) as daemon:
        await daemon.ready()
        os.kill(await daemon.pid_of(2), signal.SIGSTOP)
        daemon.signal(signal.SIGKILL)
        # Returns at the end of the log, which is when the last worker has closed it.
        assert await daemon.wait(LONG) == -signal.SIGKILL
        for worker in (1, 2):
            await daemon.of(worker, "supervisor gone")
            await daemon.of(worker, "stopped")


async def test_a_worker_that_hangs_does_not_delay_the_stop(place: Place, store: str, config: Path) -> None:
    async with service(place, config, "store", store) as daemon:
        await daemon.ready()
        os.kill(await daemon.pid_of(2), signal.SIGSTOP)
        began = time.monotonic()
        assert await daemon.stop() == 0
        assert time.monotonic() - began < STOP_SECONDS
        assert (await daemon.event("stop forced"))["part"] == "worker 2"
        await daemon.of(1, "stopped")


async def test_sighup_reaches_every_worker(place: Place, store: str, config: Path) -> None:
    async with service(place, config, "store", store) as daemon, await place.raw() as raw:
        inbox = await raw.inbox("inbox")
        await daemon.ready()
        written(place, config, "nativ", store)
        daemon.reload()
        assert "worker" not in await daemon.event("reload refused")

        seen = len(daemon.events)
        written(place, config, "native", store, intake={"prefetch": 77})
        daemon.reload()
        for worker in (1, 2):
            assert (await daemon.of(worker, "mode switched", after=seen))["now"] == "native"
            assert (await daemon.of(worker, "restart needed", after=seen))["keys"] == ["intake.prefetch"]
        messages = [delayed(f"native {n}", 300) for n in range(200)]
        await raw.publish(*messages)
        await inbox.got(message.body for message in messages)
        assert not [one for one in inbox.arrivals if by_store(one)]
        assert await daemon.stop() == 0
        for worker in (1, 2):
            assert (await daemon.of(worker, "stopped"))["cascaded"] > 0
        assert [one["event"] for one in daemon.errors()] == ["reload refused"]


async def test_a_program_that_is_away_for_a_moment_stops_nobody(
    place: Place, store: str, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As during an upgrade in place: the interpreter ends with the exit code of a wrong configuration."""
    program = tmp_path / "delayer"
    shutil.copy(EXECUTABLE, program)
    monkeypatch.setattr("tests.rig.daemon.EXECUTABLE", program)
    async with service(place, config, "store", store) as daemon:
        await daemon.ready()
        program.rename(tmp_path / "away")
        seen = len(daemon.events)
        os.kill(await daemon.pid_of(1), signal.SIGKILL)
        await daemon.event("worker died", where=lambda one: one.get("exit_code") == 2, after=seen)
        (tmp_path / "away").rename(program)
        await daemon.of(1, "ready", after=seen)
        assert not [one for one in daemon.events if one.get("worker") == 2 and one["event"] in ("stopping", "stopped")]
        assert await daemon.stop() == 0


async def test_orders_that_come_again_do_not_change_the_end(place: Place, store: str, config: Path) -> None:
    async with service(place, config, "store", store) as daemon:
        await daemon.ready()
        assert await daemon.stop_insisting() == 0


class Systemd:
    """The other end of NOTIFY_SOCKET."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self.heard: list[str] = []

    def hear(self) -> list[str]:
        """Everything so far, a datagram an entry."""
        try:
            while True:
                self.heard.append(self._line.recv(4096).decode())
        except BlockingIOError:
            return self.heard

    async def hears(self, *words: str, after: int = 0) -> int:
        """Wait for a datagram with all these words in it; its place among all."""

        def found() -> list[int]:
            places = enumerate(self.hear())
            return [at for at, one in places if at >= after and all(word in one for word in words)]

        return (await wait_for(found, LONG))[0]


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Systemd]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(str(tmp_path / "notify"))
        line.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", str(int(WATCHDOG_SECONDS * 1e6)))
        yield Systemd(line)


async def test_what_systemd_hears_and_a_worker_that_hangs(
    place: Place, store: str, config: Path, systemd: Systemd
) -> None:
    async with service(place, config, "store", store) as daemon, await place.raw() as raw:
        await daemon.ready()
        at = await systemd.hears("READY=1", "STATUS=2 workers ready: mode store")
        assert not [one for one in systemd.heard[:at] if "READY=1" in one]

        written(place, config, "native", store)
        daemon.reload()
        reloading = await systemd.hears("RELOADING=1", after=at)
        await systemd.hears("READY=1", "STATUS=2 workers ready: mode native", after=reloading)
        for worker in (1, 2):
            await daemon.of(worker, "reloaded")

        seen, at = len(daemon.events), len(systemd.hear())
        hung = await daemon.pid_of(2)
        os.kill(hung, signal.SIGSTOP)
        assert (await daemon.of(2, "worker silent", after=seen))["pid"] == hung
        await daemon.of(2, "worker died", after=seen)
        at = await systemd.hears("STATUS=1 of 2 workers ready: mode native; waiting for 2", after=at)
        assert await daemon.pid_of(2, after=seen) != hung
        await daemon.of(2, "ready", after=seen)
        back = await systemd.hears("STATUS=2 workers ready: mode native", after=at)
        await systemd.hears("WATCHDOG=1", after=back)
        assert not [one for one in systemd.heard[at:] if one.startswith("READY=1")], "said once, and repeated beside"

        inbox = await raw.inbox("inbox")
        messages = [delayed(f"after {n}", 0) for n in range(200)]
        await raw.publish(*messages)
        await inbox.got(message.body for message in messages)
        assert await daemon.stop() == 0
        await systemd.hears("STOPPING=1", after=back)
        for worker in (1, 2):
            await daemon.of(worker, "stopped")


@pytest.mark.parametrize(("fault", "code"), [("schema", 1), ("topology", 1)])
async def test_a_start_that_waiting_does_not_mend(
    place: Place, store: str, database: str, config: Path, fault: str, code: int
) -> None:
    """The exit code of one process alone, and no loop of restarts."""
    if fault == "topology":
        place.things.queue("delays")
    url = {"schema": database, "topology": store}[fault]
    async with service(place, config, "store", url) as daemon:
        assert await daemon.wait(LONG) == code
        await daemon.event("start refused")
        assert (await daemon.event("worker refused"))["code"] == code
        assert not [one for one in daemon.events if one["event"] == "worker died"]
        assert len([one for one in daemon.events if one["event"] == "worker started"]) == 2
        assert not daemon.stray_lines
        assert_no_secret(daemon)
