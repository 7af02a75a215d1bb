"""The servers of a run: one broker, one Postgres with a fresh database for each measurement, and the daemon."""

from __future__ import annotations

import asyncio
import compileall
import json
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import asyncpg

import delayer
from bench.meter import Meter, tree
from bench.plain import Plain
from tests.support.daemon import DaemonProcess, command
from tests.support.servers import Postgres, RabbitMQ

IN, OUT, INBOX = "delayer.in", "delayer.out", "bench.inbox"
TEMPLATE = "bench_template"
# A database server configured for this load: room for the hot pages, and no checkpoint in the middle of a measurement.
# The settings behind the promises (fsync, synchronous_commit) stay on. pg_stat_statements gives claim times.
POSTGRES: Mapping[str, str | int] = {
    "shared_buffers": "1GB",
    "min_wal_size": "2GB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "30min",
    "shared_preload_libraries": "pg_stat_statements",
}
SEGMENTS = 100
# The default of RabbitMQ; the test setup has a smaller value, which rolls the log over all the time.
BROKER: dict[str, str | int] = {"raft.wal_max_size_bytes": 512 << 20}


@dataclass(frozen=True)
class Place:
    """The place of one measurement: a vhost, a database, and the daemon's configuration for them."""

    servers: Servers
    mode: str
    broker_url: str
    store_url: str
    config: Path

    def daemon(self, **environ: str) -> DaemonProcess:
        """``delayer run`` with this configuration."""
        return DaemonProcess({"HTTP__LISTEN": "", **environ}, config=self.config)

    def meter(self, daemon: DaemonProcess, **more: int) -> Meter:
        """CPU of daemon, broker and database, and of further processes by their ids."""
        return self.servers.meter(daemon=daemon.pid, **more)

    def fresh_inbox(self) -> None:
        """Declare an empty queue bound to the exchange of all releases."""
        plain = Plain(self.broker_url)
        plain.exchange(OUT)
        plain.fresh_queue(INBOX, bind=OUT)
        plain.close()

    def fresh_queue(self, name: str) -> str:
        """Declare an empty queue, for messages of the default exchange; return its name."""
        plain = Plain(self.broker_url)
        plain.fresh_queue(name)
        plain.close()
        return name

    async def delayer(self, *arguments: str) -> str:
        """Run a command of the command line until it exits. Raises RuntimeError with its output."""
        return await command(self.config, *arguments)


class Servers:
    """Made by :func:`running_servers`."""

    def __init__(self, broker: RabbitMQ, postgres: Postgres, directory: Path) -> None:
        self.broker = broker
        self.postgres = postgres
        self._directory = directory
        self._vhosts: dict[str, str] = {}

    async def place(self, mode: str = "store", database: str | None = None) -> Place:
        """A fresh database (or that one) and the vhost of that mode, with its topology and an empty inbox."""
        name = database or str(await asyncio.to_thread(self.postgres.add_database, template=TEMPLATE))
        known = mode in self._vhosts
        if not known:
            self._vhosts[mode] = await asyncio.to_thread(self.broker.add_vhost)
        place = self._place(mode, self._vhosts[mode], name)
        if not known:
            await place.delayer("topology", "apply")
        await asyncio.to_thread(place.fresh_inbox)
        return place

    def _place(self, mode: str, vhost: str, database: str) -> Place:
        config = self._directory / f"{mode}-{database}.toml"
        url, store_url = self.broker.url(vhost), self.postgres.url(database)
        lines = [f'mode = "{mode}"', "[broker]", f"url = {json.dumps(url)}"]
        if mode == "store":
            lines += ["[store]", f"url = {json.dumps(store_url)}"]
        lines += ["[[route]]", f'from = "{IN}"', f'to = "{OUT}"']
        config.write_text("\n".join(lines) + "\n")
        return Place(self, mode, url, store_url, config)

    async def prepare(self) -> None:
        """Create the schema once; every database is a copy."""
        await asyncio.to_thread(self.postgres.add_database, TEMPLATE)
        await self._place("store", "/", TEMPLATE).delayer("db", "upgrade")
        await asyncio.to_thread(
            self.postgres.execute, "CREATE EXTENSION IF NOT EXISTS pg_stat_statements", database=TEMPLATE
        )

    async def age(self) -> None:
        """Make the database like one that has run for a day, with WAL segments to recycle.

        A new server creates each 16 MB segment on demand, and every commit waits for that. At 5,000 messages a
        second this took 50 ms every 4 s, and hid everything else in the last percent of the lateness.
        """
        connection = await asyncpg.connect(self.postgres.url())
        try:
            for _ in range(SEGMENTS):
                await connection.execute("SELECT pg_logical_emit_message(false, 'bench', 'x')")
                await connection.execute("SELECT pg_switch_wal()")
            for _ in range(2):
                await connection.execute("CHECKPOINT")
        finally:
            await connection.close()

    def meter(self, **roots: int) -> Meter:
        """CPU of broker and database, and of the trees below these processes."""
        own = {name: (lambda root=root: tree(root)) for name, root in roots.items()}
        return Meter({**own, "broker": self.broker.pids, "database": self.postgres.pids})

    async def versions(self) -> dict[str, str]:
        overview = await asyncio.to_thread(self.broker.api, "GET", "/api/overview")
        connection = await asyncpg.connect(self.postgres.url())
        try:
            return {
                "RabbitMQ": str(overview["rabbitmq_version"]),
                "Erlang": str(overview["erlang_version"]),
                "Postgres": str(await connection.fetchval("SHOW server_version")),
            }
        finally:
            await connection.close()


@asynccontextmanager
async def running_servers(
    settings: Mapping[str, str | int] = POSTGRES, broker_settings: Mapping[str, str | int] = BROKER
) -> AsyncIterator[Servers]:
    """Both servers and the schema; all of it is always removed at the end."""
    # Compile the package as an installation does, or each process may recompile edited files.
    compileall.compile_dir(Path(delayer.__file__).parent, quiet=1)
    with ExitStack() as undo:
        directory = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="delayer-bench-")))
        broker, postgres = RabbitMQ(config=broker_settings), Postgres(settings=settings)
        undo.callback(broker.close)
        undo.callback(postgres.close)
        starting = asyncio.gather(asyncio.to_thread(broker.start), asyncio.to_thread(postgres.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait([starting])  # otherwise the threads would keep starting servers that are closed below
            raise
        servers = Servers(broker, postgres, directory)
        await servers.prepare()
        await servers.age()
        yield servers
