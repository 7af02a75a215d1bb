"""The daemon as its users run it: a process, a configuration, signals, and a log to read."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from tests.support import reworded

EXECUTABLE = Path(sys.executable).with_name("delayer")
PROGRAM: Sequence[str] = reworded.PROGRAM if reworded.EVERYWHERE else (str(EXECUTABLE),)
_SET_PARENT_DEATH_SIGNAL = 1


def _in_our_hands() -> None:
    """Tie the daemon to this process: it dies with us, and Ctrl-C in a terminal reaches only us."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


async def command(config: Path | None, *arguments: str, environ: Mapping[str, str] | None = None) -> str:
    """Run a command of the command line to its end; return its output. Raises RuntimeError with that output when it
    fails. ``environ``: as for the daemon."""
    process = await asyncio.create_subprocess_exec(
        *PROGRAM, *(("--config", str(config)) if config else ()), *arguments,
        env={**os.environ, **{f"DELAYER_{name}": value for name, value in (environ or {}).items()}},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"delayer {' '.join(arguments)}: exit {process.returncode}\n{output.decode()}")
    return output.decode()


async def answered(config: Path, *arguments: str) -> Any:
    """The decoded output of a command with --json."""
    return json.loads(await command(config, *arguments, "--json"))


class DaemonProcess:
    """One ``delayer run``. ``async with`` kills it at the end if it still runs; a test that wants a clean stop must
    request it.

    ``environ`` are DELAYER_… variables: ``{"MODE": "native", "BROKER__URL": url}``. ``program`` replaces ``delayer``.
    ``serving``: serve HTTP at the address in the file.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        config: Path | None = None,
        program: Sequence[str] | None = None,
        serving: bool = False,
    ) -> None:
        self._program = program or PROGRAM
        self._arguments = ["--config", str(config)] if config else []
        ours = {name: value for name, value in os.environ.items() if not name.startswith("DELAYER_")}
        # No HTTP unless a test asks for it: daemons of several tests run at the same time.
        fixed = {"DELAYER_LOG__FORMAT": "json", "DELAYER_HTTP__LISTEN": ""}
        if serving:
            del fixed["DELAYER_HTTP__LISTEN"]
        self._environ = ours | fixed | {f"DELAYER_{k}": v for k, v in environ.items()}
        self.events: list[dict[str, Any]] = []
        self.stray_lines: list[str] = []
        # Called with each line as it arrives.
        self.told: Callable[[dict[str, Any] | str], object] = lambda _: None
        self._news = asyncio.Condition()
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> Self:
        """Start the process, or another one after it has ended; does not wait for anything."""
        self._process = await asyncio.create_subprocess_exec(
            *self._program,
            *self._arguments,
            "run",
            env=self._environ,
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            limit=1 << 20,
            preexec_fn=_in_our_hands,
        )
        self._reader = asyncio.create_task(self._read(self._process))
        return self

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.running:
            self.signal(signal.SIGKILL)
        await self.wait()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def wait(self, timeout: float = 60.0) -> int:
        """The exit code (negative: the signal), after the log is read to its end."""
        assert self._process is not None and self._reader is not None
        async with asyncio.timeout(timeout):
            code = await self._process.wait()
            await asyncio.shield(self._reader)
        return code

    async def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.signal(signal.SIGTERM)
        return await self.wait()

    async def stop_insisting(self) -> int:
        """Send SIGTERM, and then keep sending every signal that a daemon handles until it is gone. Returns the exit
        code."""
        ended = asyncio.create_task(self.stop())
        while not ended.done():
            await asyncio.wait([ended], timeout=0.002)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                with suppress(ProcessLookupError):
                    os.kill(self.pid, number)  # send_signal may take the exit code from wait()
        return await ended

    def reload(self) -> None:
        """Send SIGHUP; the daemon answers with the event "reloaded" or "reload refused"."""
        self.signal(signal.SIGHUP)

    async def event(
        self,
        name: str,
        *,
        where: Callable[[dict[str, Any]], bool] = lambda _: True,
        after: int = 0,
        timeout: float = 60.0,
    ) -> dict[str, Any]:
        """The first event of that name from position ``after`` of :attr:`events` on; waits for it.

        Fails with the tail of the log if the process exits first, or at the timeout.
        """

        def found() -> dict[str, Any] | None:
            return next((one for one in self.events[after:] if one.get("event") == name and where(one)), None)

        try:
            async with asyncio.timeout(timeout), self._news:
                await self._news.wait_for(lambda: found() is not None or not self.running)
        except TimeoutError:
            raise AssertionError(f"no event {name!r} within {timeout:g} s; the log ends:\n{self.tail()}") from None
        event = found()
        if event is None:
            raise AssertionError(f"the daemon ended before event {name!r}; the log ends:\n{self.tail()}")
        return event

    async def ready(self) -> Self:
        """Wait until it consumes (and owns lanes, in store mode)."""
        await self.event("ready")
        return self

    def tail(self, lines: int = 30) -> str:
        return "\n".join([json.dumps(event) for event in self.events[-lines:]] + self.stray_lines[-lines:])

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        async for line in process.stderr:
            try:
                event = json.loads(line)
            except ValueError:
                event = line.decode("utf-8", "replace").rstrip()
                self.stray_lines.append(event)
            else:
                self.events.append(event)
            self.told(event)
            async with self._news:
                self._news.notify_all()
        await process.wait()
        async with self._news:
            self._news.notify_all()
