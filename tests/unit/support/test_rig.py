"""The rig without servers: ports, processes that end with us, the proxy."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.support import ports
from tests.support.processes import Family
from tests.support.proxy import Proxy

ROOT = Path(__file__).parents[3]


def _family(tmp_path: Path, script: str) -> Family:
    return Family(["/bin/sh", "-c", script], env=os.environ, cwd=tmp_path, log=tmp_path / "log")


def _alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("end", [Family.kill, lambda family: family.stop(signal.SIGTERM, grace=0.2)])
def test_a_family_ends_as_a_whole(tmp_path: Path, end: Callable[[Family], None]) -> None:
    """Also the member that ignores the signal, and one that is paused."""
    family = _family(tmp_path, "trap '' TERM; sleep 60 & sleep 60; wait")
    family.wait_ready(lambda: len(family.pids()) == 3, "it")
    pids = family.pids()
    family.pause()
    end(family)
    assert _alive(pids) == []


def test_families_end_when_their_owner_is_killed(tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import os, pathlib, time
        from tests.support.processes import Family, make_directory
        at = pathlib.Path({str(tmp_path)!r})
        family = Family(["sleep", "60"], env=os.environ, cwd=at, log=at / "log")
        family.wait_ready(lambda: any("sleep" in open(f"/proc/{{p}}/cmdline").read()[:6] for p in family.pids()), "it")
        print(family.pid, make_directory(), flush=True)
        time.sleep(60)
    """)
    owner = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid, directory = owner.stdout.readline().split()
    (reaper,) = [child for child in psutil.Process(owner.pid).children() if child.pid != int(pid)]
    assert Path(directory).is_dir()
    owner.kill()
    owner.wait()
    owner.stdout.close()
    psutil.wait_procs([reaper], timeout=10)
    assert _alive([int(pid)]) == []
    assert not Path(directory).exists()


@asynccontextmanager
async def _echo_server() -> AsyncIterator[int]:
    """The port of a server that says everything back; leaves when all its clients have."""
    tasks = set()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        with suppress(ConnectionResetError):
            while data := await reader.read(1024):
                writer.write(data)
        writer.close()
        with suppress(ConnectionResetError):
            await writer.wait_closed()

    server = await asyncio.start_server(echo, ports.HOST, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()  # uvloop closes no loop while somebody listens: a test that failed would hang
    await asyncio.gather(*tasks)


async def test_proxy_forwards_stalls_and_cuts() -> None:
    async with _echo_server() as port, Proxy(port) as proxy:
        reader, writer = await asyncio.open_connection(ports.HOST, proxy.port)
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"

        proxy.stall()
        writer.write(b"two")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(3), 0.1)
        proxy.resume()
        assert await reader.readexactly(3) == b"two"

        proxy.stall(to_server=False)
        writer.write(b"three")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(5), 0.1)
        proxy.resume()
        assert await reader.readexactly(5) == b"three"

        proxy.cut()
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        writer.close()


async def test_proxy_slows_down() -> None:
    async with _echo_server() as port, Proxy(port) as proxy:
        reader, writer = await asyncio.open_connection(ports.HOST, proxy.port)
        loop = asyncio.get_running_loop()

        async def seconds_for(size: int) -> float:
            began = loop.time()
            writer.write(bytes(size))
            await reader.readexactly(size)
            return loop.time() - began

        proxy.slow(delay=0.05)
        assert await seconds_for(1) >= 0.098  # the loop counts in whole milliseconds
        proxy.slow(bytes_per_second=100_000)
        assert await seconds_for(10_000) >= 0.198
        proxy.resume()
        await seconds_for(1_000_000)  # ten seconds, if it were slow still
        writer.close()
