"""Where a runbook is carried out: servers, a daemon, messages that flow, and the notes of who does it."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.support import ports
from tests.support.daemon import EXECUTABLE, DaemonProcess
from tests.support.ledger import Ledger
from tests.support.servers import Postgres, RabbitMQ

NOT_SHOWN = frozenset({"timestamp", "level", "logger"})
WIDEST = 130
NOT_OK = "  (note|off|out of reach)  "
"""What is worth a look in the table of `delayer check`."""


@dataclass
class Notes:
    """What was done and seen, with the seconds since the beginning."""

    told: Callable[[str], object] = print
    lines: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def restart(self) -> None:
        """The beginning is now."""
        self.began = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self.began

    def step(self, text: str) -> None:
        clock = f"{self.now():6.1f} s"
        self._add(f"{clock}  {text if len(text) <= WIDEST else text[: WIDEST - 1] + '…'}")

    def seen(self, text: str) -> None:
        for line in map(str.rstrip, text.rstrip().splitlines()):
            self._add(f"          {line if len(line) <= WIDEST else line[: WIDEST - 1] + '…'}".rstrip())

    def _add(self, line: str) -> None:
        self.lines.append(line)
        self.told(line)


class Desk:
    """Made by :meth:`open`: everything is gone at its end. ``configure`` writes the daemon's file; ``begin`` starts the
    daemon."""

    def __init__(self, notes: Notes, stack: AsyncExitStack, directory: Path) -> None:
        self.notes = notes
        self.stack = stack
        self.directory = directory
        self.config = directory / "delayer.toml"
        self.daemon = DaemonProcess({})
        self._listen = f"{ports.HOST}:{ports.reserve()}"
        self._heard = 0

    @classmethod
    @asynccontextmanager
    async def open(cls, notes: Notes) -> AsyncIterator[Self]:
        async with AsyncExitStack() as stack:
            directory = Path(tempfile.mkdtemp(prefix="delayer-runbook-"))
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
            yield cls(notes, stack, directory)

    # ---- servers and daemon

    async def server(self, server: RabbitMQ | Postgres) -> None:
        """Start it; it is ended and removed with the desk."""
        self.stack.callback(server.close)
        await asyncio.to_thread(server.start)

    def configure(
        self,
        broker: str,
        store: str,
        *,
        mode: str = "store",
        route: Mapping[str, object] | None = None,
        more: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        """The configuration: one route, and ``more`` sections."""
        lines = [f"mode = {json.dumps(mode)}"]
        sections = {"broker": {"url": broker}, "store": {"url": store}, "http": {"listen": self._listen}}
        for name, table in (sections | dict(more or {})).items():
            lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
        lines.append("[[route]]")
        keys = {"from": "delayer.in", "to": "delayer.out"} | dict(route or {})
        lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
        self.config.write_text("\n".join(lines) + "\n")

    async def begin(self) -> None:
        """Start the daemon (again), and wait until it is ready."""
        if self.daemon.running:
            raise AssertionError("it runs")
        if not self.notes.lines:
            self.notes.restart()
        self._heard = 0
        self.daemon = DaemonProcess({"HTTP__LISTEN": self._listen}, config=self.config)
        await self.stack.enter_async_context(self.daemon)
        await self.daemon.ready()

    async def installed(
        self,
        broker: RabbitMQ,
        postgres: Postgres,
        *,
        mode: str = "store",
        route: Mapping[str, object] | None = None,
    ) -> Ledger:
        """Start both servers and a daemon with its schema, and open the account of its messages."""
        await self.server(broker)
        await self.server(postgres)
        self.configure(broker.url(), postgres.url(), mode=mode, route=route)
        await self.quietly("db", "upgrade")
        ledger = await self.ledger(broker.url())
        await self.begin()
        return ledger

    async def end(self) -> None:
        """Stop it in order."""
        assert await self.daemon.stop() == 0, self.daemon.tail()

    async def ledger(self, broker: str, seed: int = 1) -> Ledger:
        return await self.stack.enter_async_context(Ledger.open(broker, random.Random(seed)))

    # ---- doing and noting

    async def delayer(self, *words: str, expect: int | None = 0, show: str = "", lines: int = 12) -> str:
        """Run a command, and note it with those lines of its output in which ``show``, an expression, is found."""
        output = await self.quietly(*words, expect=expect)
        self.notes.step(f"$ delayer {' '.join(words)}" + (f"   (exit code {expect})" if expect else ""))
        kept = [line for line in self._plain(output).splitlines() if re.search(show, line)]
        self.notes.seen("\n".join([*kept[:lines], *(["…"] if len(kept) > lines else [])]))
        return output

    async def quietly(self, *words: str, expect: int | None = 0) -> str:
        """Run a command for its output, and note nothing. ``expect`` is its exit code; None: whatever it is."""
        process = await asyncio.create_subprocess_exec(
            str(EXECUTABLE), "--config", str(self.config), *words,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output = (await process.communicate())[0].decode()
        asked = f"delayer {' '.join(words)}"
        assert expect in (None, process.returncode), f"{asked}: exit {process.returncode}\n{output}"
        return output

    async def run(self, program: str | Path, *words: str, shown: str) -> str:
        """Run somebody else's program, and note it as ``shown``."""
        process = await asyncio.create_subprocess_exec(
            str(program), *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output = (await process.communicate())[0].decode()
        assert process.returncode == 0, f"{program}: exit {process.returncode}\n{output}"
        self.notes.step(f"$ {shown}")
        return output

    def mark(self) -> None:
        """Events are waited for from here on."""
        self._heard = len(self.daemon.events)

    async def event(self, name: str, **how: Any) -> dict[str, Any]:
        """Wait for an event of the daemon's log that came after the mark, and note it."""
        event = await self.daemon.event(name, after=self._heard, timeout=60.0, **how)
        fields = " ".join(f"{key}={value}" for key, value in event.items() if key not in NOT_SHOWN | {"event"})
        self.notes.step(f"log: {event['event']}  {self._plain(fields)}")
        return event

    def reload(self) -> None:
        self.mark()
        self.daemon.reload()

    def balance(self, ledger: Ledger, *, repeats: bool = False) -> None:
        """The account of every message; fails where a promise is broken."""
        verdict = ledger.verdict()
        worst = max(arrival.at_ms - arrival.due_ms for one in ledger.arrivals.values() for arrival in one) / 1000
        account = str(verdict).partition(" (at release")[0]
        self.notes.step(f"ledger: {account}; the latest came {worst:.1f} s after its due instant")
        verdict.assert_kept(repeats=repeats, redelivered=True)  # daemons are stopped in the middle of their work

    def _plain(self, text: str) -> str:
        return text.replace(str(self.directory), "/etc/delayer")
