"""Server processes that cannot outlive us: start, signal and end a whole family of processes."""

from __future__ import annotations

import asyncio
import atexit
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tests.support import reaper

T = TypeVar("T")

# A server starts only after the reaper has been told of it: the shell waits for a line, and exits if we die first.
_WAIT_FOR_LEAVE = 'read -r leave && exec "$@" </dev/null'


class StartFailed(RuntimeError):
    """A server did not start; the message ends with the tail of its log."""


class _Reaper:
    """Our end of the pipe to `reaper.py`; started with the first server."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-E", reaper.__file__], stdin=subprocess.PIPE, start_new_session=True, text=True
        )
        atexit.register(self._leave)

    def tell(self, *words: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def _leave(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


_the_reaper: _Reaper | None = None


def _reaper() -> _Reaper:
    global _the_reaper  # noqa: PLW0603 - one pipe for the life of this process is the point
    if _the_reaper is None:
        _the_reaper = _Reaper()
    return _the_reaper


def make_directory(parent: Path | None = None) -> Path:
    """A temporary directory that other users may pass through (Postgres runs as one when we are root)."""
    directory = Path(tempfile.mkdtemp(prefix="delayer-", dir=parent))
    _reaper().tell("remove", directory)
    directory.chmod(0o711)
    return directory


def remove_directory(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    _reaper().tell("forget", directory)


def mount_disk(directory: Path, megabytes: int) -> None:
    """Mount a small file system on that directory, which exists and is empty. Raises StartFailed with the reason where
    the mount fails: usually because we are not root."""
    _reaper().tell("unmount", directory)
    options = f"size={megabytes}m,mode=0755"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        _reaper().tell("forget", directory)
        raise StartFailed(f"no disk of its own, for which one has to be root: {done.stderr.partition(chr(10))[0]}")


def unmount_disk(directory: Path) -> None:
    subprocess.run(["umount", "--lazy", directory], check=True)
    _reaper().tell("forget", directory)


class Family:
    """A server process and every process it starts.

    `user` is the account to run as (ours if None). The reaper sends `farewell` if we die before stopping the family.
    Standard output and error go to the end of the file `log`.
    """

    def __init__(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str],
        cwd: Path,
        log: Path,
        user: str | None = None,
        farewell: signal.Signals = signal.SIGKILL,
    ) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _WAIT_FOR_LEAVE, "sh", *map(str, argv)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
                user=user,
                group=user and pwd.getpwnam(user).pw_gid,
                extra_groups=[] if user else None,
            )
        _reaper().tell("watch", self.pid, int(farewell))
        assert self._process.stdin is not None
        self._process.stdin.write(b"leave\n")
        self._process.stdin.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def pids(self) -> list[int]:
        return [process.pid for process in reaper.family(self.pid)]

    def wait_ready(self, probe: Callable[[], bool], what: str, timeout: float = 60.0) -> None:
        """Return when the probe returns true. Raise StartFailed if the process exits before that, or at the timeout."""
        deadline = time.monotonic() + timeout
        while not probe():
            if not self.running:
                raise StartFailed(f"{what} ended with {self._process.returncode} instead of starting\n{tail(self.log)}")
            if time.monotonic() > deadline:
                raise StartFailed(f"{what} was not ready within {timeout:.0f} s\n{tail(self.log)}")
            time.sleep(0.02)

    def signal(self, sig: signal.Signals) -> None:
        """Send a signal to the first process alone."""
        self._process.send_signal(sig)

    def pause(self) -> None:
        """Stop all processes, parents first, so that none can start another."""
        reaper.send(reaper.family(self.pid), signal.SIGSTOP)

    def resume(self) -> None:
        reaper.send(reaper.family(self.pid), signal.SIGCONT)

    def stop(self, sig: signal.Signals, grace: float) -> None:
        """Ask the first process to exit; kill the remaining processes after `grace` seconds."""
        reaper.end(self.pid, sig, grace)
        self._buried()

    def kill(self) -> None:
        """Send SIGKILL to all processes, like a power cut; returns when all are gone."""
        reaper.end(self.pid, signal.SIGKILL)
        self._buried()

    def wait(self, timeout: float) -> int:
        """Wait for a process that exits by itself; return its exit code."""
        code = self._process.wait(timeout)
        _reaper().tell("forget", self.pid)
        return code

    def _buried(self) -> None:
        self._process.wait(timeout=10)
        _reaper().tell("forget", self.pid)


class Server(ABC):
    """A private server: `with` starts it, and in the end removes its processes and files.

    kill() and stop() keep the data and the ports, and start() continues with them. pause() and resume() stop and
    continue all its processes. All methods block: from a coroutine, `await asyncio.to_thread(server.start)`.
    """

    _family: Family | None = None

    @abstractmethod
    def start(self) -> Self:
        """Start it, or start it again on the same ports and data; returns when it answers."""

    @abstractmethod
    def stop(self) -> None:
        """An orderly shutdown."""

    @abstractmethod
    def close(self) -> None:
        """End it and delete its data."""

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def kill(self) -> None:
        """Pull the plug: SIGKILL to every process of the server."""
        if self._family:
            self._family.kill()
            self._family = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def pause(self) -> None:
        """Connections stay open, and the server does not answer."""
        assert self._family, "not running"
        self._family.pause()

    def resume(self) -> None:
        assert self._family, "not running"
        self._family.resume()

    def pids(self) -> list[int]:
        return self._family.pids() if self._family else []

    def _end(self, sig: signal.Signals, grace: float) -> None:
        """Ask it to end; kill the remaining processes after `grace` seconds."""
        if self._family:
            self._family.stop(sig, grace)
            self._family = None


def tail(log: Path, lines: int = 40) -> str:
    """The tail of a server's log, for error messages."""
    try:
        text = log.read_text(errors="replace")
    except FileNotFoundError:
        return f"(no {log})"
    return "\n".join([f"---- the end of {log.name}:", *text.splitlines()[-lines:]])


def clean_environment(*prefixes: str) -> dict[str, str]:
    """Our environment without the variables that would override our configuration of the server."""
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


def run_apart(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a separate thread, so that it works with or without a running loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def find_program(name: str, *directories: str, of: str) -> Path:
    """A program in one of these directories, or on PATH. ``of``: the product to install if it is missing."""
    for path in (*(Path(directory) / name for directory in directories), Path(shutil.which(name) or "/nowhere")):
        if path.exists():
            return path
    raise StartFailed(f"{of} is not installed: there is no {name}; .ci/setup installs it")
