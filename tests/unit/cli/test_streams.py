"""Standard streams that are closed from the start, or full: a message and an exit code, no traceback."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from delayer.cli.errors import ExitCode
from tests.support.daemon import EXECUTABLE

NOWHERE = ("--broker-url", "amqp://127.0.0.1:1", "--store-url", "postgresql://127.0.0.1:1/nothing")
HELP, STATUS, WRONG = ("--help",), (*NOWHERE, "status"), ("--set", "nonsense=1", "status")


def shell(redirected: str, *arguments: str, unbuffered: bool = False) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONUNBUFFERED", "DELAYER_CONFIG")}
    environ = kept | ({"PYTHONUNBUFFERED": "1"} if unbuffered else {})
    line = f'exec "$0" "$@" {redirected}'
    return subprocess.run(
        ["sh", "-c", line, str(EXECUTABLE), *arguments],
        capture_output=True, text=True, timeout=60, check=False, env=environ,
    )  # fmt: skip


@pytest.mark.parametrize("unbuffered", [False, True], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("arguments", [HELP, STATUS], ids=lambda value: value[-1])
def test_a_full_disk_gives_one_line(arguments: tuple[str, ...], unbuffered: bool) -> None:
    done = shell(">/dev/full", *arguments, unbuffered=unbuffered)
    assert done.returncode == ExitCode.OUT_OF_REACH
    assert done.stderr.splitlines()[-1].startswith("delayer: nothing more can be written: No space left on device")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("redirected", ["2>/dev/full", ">/dev/full 2>/dev/full"])
def test_a_full_disk_without_stderr_gives_an_exit_code(redirected: str) -> None:
    assert shell(redirected, *WRONG).returncode == ExitCode.OUT_OF_REACH


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(HELP, ExitCode.DONE), (WRONG, ExitCode.USAGE), (STATUS, ExitCode.OUT_OF_REACH)],
    ids=lambda value: str(value[-1]) if isinstance(value, tuple) else "",
)
@pytest.mark.parametrize("redirected", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_does_not_change_the_exit_code(arguments: tuple[str, ...], code: int, redirected: str) -> None:
    done = shell(redirected, *arguments)
    assert done.returncode == code
    assert "Traceback" not in done.stderr + done.stdout


def test_a_closed_pipe_gives_no_traceback() -> None:
    done = subprocess.run(
        ["sh", "-c", '{ "$0" --help; echo $? >&2; } | true', str(EXECUTABLE)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stderr in (f"{ExitCode.DONE}\n", f"{ExitCode.FOUND}\n"), "the pipe may close before or after the write"


UNFLUSHED = """
import sys
from delayer.cli import main as cli
@cli.cli.command()
def leaves(): sys.stdout.buffer.write(b"x")
cli.VERBS["leaves"] = ""
sys.argv[1:] = ["leaves"]
cli.main()
"""


@pytest.mark.parametrize(("redirected", "code"), [("", ExitCode.DONE), (">/dev/full", ExitCode.OUT_OF_REACH)])
def test_a_failed_last_write_is_reported(redirected: str, code: int) -> None:
    line = f'PYTHONUNBUFFERED= "$0" -c "$1" {redirected}'
    done = subprocess.run(
        ["sh", "-c", line, sys.executable, UNFLUSHED], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code
    assert done.stdout == ("x" if code == ExitCode.DONE else "")
    assert "Exception" not in done.stderr
    assert ("nothing more can be written" in done.stderr) == (code == ExitCode.OUT_OF_REACH)


def led_nowhere(pid: int) -> tuple[int, ...]:
    """The standard streams of a process that point to /dev/null."""
    streams = [(number, Path(f"/proc/{pid}/fd/{number}").readlink()) for number in range(3)]
    return tuple(number for number, leads in streams if leads == Path(os.devnull))


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)], ids=str)
async def test_a_daemon_runs_and_stops_without_standard_streams(closed: tuple[int, ...]) -> None:
    """None of its files gets the number of a standard stream."""
    connected = asyncio.Event()

    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1") as broker:
        url = "amqp://{}:{}/".format(*broker.sockets[0].getsockname())
        line = f'exec "$0" "$@" {" ".join(f"{number}>&-" for number in closed)}'
        flags = ("--mode", "native", "--broker-url", url, "--set", "http.listen=", "run")
        daemon = await asyncio.create_subprocess_exec(
            "sh", "-c", line, str(EXECUTABLE), *flags,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            await asyncio.wait_for(connected.wait(), 30)
            assert led_nowhere(daemon.pid) == closed
            daemon.terminate()
            assert await asyncio.wait_for(daemon.wait(), 15) == 0
        finally:
            if daemon.returncode is None:
                daemon.kill()
                await daemon.wait()
