"""A complete delayer to try: private servers, a schema, a configuration file, and the daemon."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support import ports
from tests.support.daemon import DaemonProcess, command
from tests.support.servers import Postgres, RabbitMQ

ROUTES: tuple[dict[str, object], ...] = (
    {"from": "orders.in", "to": "orders.out"},
    {"from": "mail.in", "to": "", "routing_key": "mail.inbox"},
    {"from": "", "to": "orders.out", "delay_from": ["x-deliver-at", "x-delay"]},
)
TOKEN = "only-to-try-it-out"
"""A token with the role act, for the page and the API."""


@dataclass
class Stack:
    """The parts of a running stack. ``configure`` rewrites the file that the daemon reads at SIGHUP."""

    broker_url: str
    store_url: str
    config: Path
    routes: Sequence[dict[str, object]] = ROUTES
    management_url: str = ""
    page: str = ""
    """Host and port where the daemon serves HTTP; empty: no HTTP."""
    daemon: DaemonProcess = field(init=False)

    def configure(self, mode: str) -> None:
        lines = [f'mode = "{mode}"', "[broker]", f"url = {json.dumps(self.broker_url)}"]
        lines += [f"management_url = {json.dumps(self.management_url)}"]
        lines += ["[store]", f"url = {json.dumps(self.store_url)}", "history_days = 30", "[log]", 'level = "info"']
        tokens = self.config.with_name("http-tokens")
        tokens.write_text(f"ops act {TOKEN}\n")
        lines += ["[http]", f"listen = {json.dumps(self.page)}", f"tokens_file = {json.dumps(str(tokens))}"]
        for route in self.routes:
            lines += ["[[route]]", *(f"{key} = {json.dumps(value)}" for key, value in route.items())]
        self.config.write_text("\n".join(lines) + "\n")

    async def delayer(self, *arguments: str) -> str:
        """Run a command of the command line to its end; return its output. Raises RuntimeError with the output."""
        return await command(self.config, *arguments)


@asynccontextmanager
async def running_stack(
    mode: str, routes: Sequence[dict[str, object]] = ROUTES, *, page: bool = False
) -> AsyncIterator[Stack]:
    """Servers, schema and daemon (with its ``page``); all are removed at the end of the block."""
    with ExitStack() as undo:
        directory = Path(tempfile.mkdtemp(prefix="delayer-stack-"))
        undo.callback(shutil.rmtree, directory, ignore_errors=True)
        broker, postgres = RabbitMQ(), Postgres()
        undo.callback(broker.close)
        undo.callback(postgres.close)
        await asyncio.gather(asyncio.to_thread(broker.start), asyncio.to_thread(postgres.start))
        stack = Stack(broker.url(), postgres.url(), directory / "delayer.toml", routes, broker.management_url)
        stack.page = f"{ports.HOST}:{ports.reserve()}" if page else ""
        stack.configure(mode)
        await stack.delayer("db", "upgrade")
        async with DaemonProcess({}, config=stack.config, serving=page) as stack.daemon:
            await stack.daemon.ready()
            yield stack
            if stack.daemon.running:
                await stack.daemon.stop()
