"""Two daemons, and everything around them that can break: their own servers, a proxy before every connection, a clock
for each, and a file with the mode. The faults are in tests/faults/injections."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import asyncpg

from delayer.broker.admin import Admin
from tests.support.daemon import DaemonProcess
from tests.support.ledger import Ledger
from tests.support.odd import Clock, program
from tests.support.place import Place, eventually
from tests.support.processes import Server
from tests.support.proxy import Proxy
from tests.support.servers import Postgres, RabbitMQ

DAEMONS = 2
LANES = 2
USER, PASSWORD = "delayer", "secret"
EVENTS_KEPT = 20_000
BEGINNING = 200
"""Events at the start of the log that are always kept, and show whether the daemon is ready."""
STARTUP = 240.0
"""Seconds within which a daemon is ready, on a machine where all processes start at once."""
HEARD_OF = 20.0
"""Seconds within which the management has heard of a connection: the broker tells it every five."""

NOTE_NAMED = """
CREATE TABLE test_named (id bigint PRIMARY KEY);
CREATE FUNCTION test_note_named() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    INSERT INTO test_named VALUES (NEW.id) ON CONFLICT DO NOTHING;
    RETURN NEW;
END $$;
CREATE TRIGGER test_note_named AFTER INSERT ON held
    FOR EACH ROW WHEN (NEW.token IS NOT NULL) EXECUTE FUNCTION test_note_named();
"""
"""Record the rows that keep the id of their message from before it was held: they do not come under their number."""


class Kept:
    """One of the daemons, with its own proxies and clock. A fault that kills it restarts it."""

    def __init__(self, number: int, fleet: Fleet) -> None:
        self.number = number
        self.broker = Proxy(fleet.rabbitmq.port)
        self.store = Proxy(fleet.postgres.port)
        self.clock = Clock(fleet.directory / f"clock-{number}")
        self.log = (fleet.directory / f"daemon-{number}.log").open("a", buffering=1)
        self.told: Counter[str] = Counter()
        """The number of log lines of each event, over all its processes."""
        self.process = DaemonProcess({})
        self.consumes = False
        """Whether it consumes the intake queue, or stands by, as its log says."""
        self._fleet = fleet
        self._meant = 0
        self._started = asyncio.Event()
        self._left: DaemonProcess | None = None

    async def start(self, fault: str = "") -> None:
        """Start a new process in place of the last one, without waiting for readiness."""
        fleet = self._fleet
        if self.process.running:
            await self.kill()
        given = fleet.place.environ | fleet.environ
        environ = {name: value for name, value in given.items() if name != "MODE"} | {
            "BROKER__URL": fleet.rabbitmq.url(fleet.vhost, port=self.broker.port, user=f"{USER}:{PASSWORD}"),
            "STORE__URL": fleet.postgres.url(fleet.database, port=self.store.port),
        }
        if fault:
            environ["FAULT"] = fault
        odd = program(clock=self.clock.path, bug=fleet.bug)
        process = DaemonProcess(environ, config=fleet.config, program=odd)
        process.told = self._told
        self.consumes = False
        await process.start()
        self.process = process
        self._started.set()

    def _told(self, event: dict[str, Any] | str) -> None:
        self.log.write(f"{event}\n")
        if isinstance(event, dict):
            self.told[str(event.get("event"))] += 1
            if event.get("queue") == "delays" and event["event"] in ("consuming", "consuming interrupted"):
                self.consumes = event["event"] == "consuming"
        if len(self.process.events) > 2 * EVENTS_KEPT:
            del self.process.events[BEGINNING:EVENTS_KEPT]

    @property
    def up(self) -> bool:
        """It is ready, so that it handles signals."""
        return self.process.running and any(one.get("event") == "ready" for one in self.process.events[:BEGINNING])

    @property
    def mode(self) -> str:
        """The mode that its log reports; empty before the first report."""
        said = [one for one in self.process.events if one.get("event") in ("starting", "mode switched")]
        return str(said[-1].get("now") or said[-1].get("mode")) if said else ""

    @property
    def address(self) -> str:
        """Where it serves HTTP; empty before it does."""
        served = (one for one in self.process.events[:BEGINNING] if one.get("event") == "http served")
        return next((one["addresses"][0] for one in served), "")

    async def ready(self) -> None:
        await self.process.event("ready", timeout=STARTUP)

    async def kill(self) -> None:
        if self.process.running:
            self.process.signal(signal.SIGKILL)
        await self.process.wait()

    @asynccontextmanager
    async def meant(self) -> AsyncIterator[None]:
        """The block may stop the process on purpose. If it is not running at the end of the block, it stays down."""
        self._meant += 1
        try:
            yield
        finally:
            self._meant -= 1
            self._left = None if self.process.running else self.process

    async def mind(self) -> None:
        """Restart it each time it exits by itself, and record that as unexpected: a fault outside it must not end
        it."""
        while True:
            process = self.process
            code = await process.wait(timeout=float("inf"))
            if process is not self.process:
                continue
            if not self._meant and process is not self._left and not self._fleet.over:
                self._fleet.surprises.append(
                    f"daemon {self.number} ended with {code}; its log ends:\n{process.tail(5)}"
                )
                await self.start()
            else:
                self._started.clear()
                await self._started.wait()  # The fault that ended it may start another one.


class Fleet:
    """Made by :meth:`open`. ``surprises``: unexpected events that the ledger does not show."""

    def __init__(
        self,
        rabbitmq: RabbitMQ,
        postgres: Postgres,
        directory: Path,
        *,
        bug: str = "",
        daemons: int = DAEMONS,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.environ = environ or {}
        """Environment variables of the daemons, in addition to those of their place."""
        self.rabbitmq = rabbitmq
        self.postgres = postgres
        self.directory = directory
        self.bug = bug
        self.vhost = rabbitmq.add_vhost()
        rabbitmq.add_user(USER, PASSWORD, vhost=self.vhost, configure=".*", write=".*", read=".*")
        self.database = postgres.add_store()
        self.config = directory / "delayer.toml"
        self.mode = ""
        self.more = ""
        """The lines of the file after the mode."""
        # A place in native mode with a store checks everything: the cascade and the rows.
        self.place = Place("native", rabbitmq.url(self.vhost), postgres.url(self.database), lanes=LANES)
        self.surprises: list[str] = []
        self.over = False
        """From now on a daemon that exits is not restarted."""
        self.daemons = [Kept(number, self) for number in range(1, daemons + 1)]
        self.ledger: Ledger
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, *arguments: Any, mode: str, seed: int, ledger: type[Ledger] = Ledger, **more: Any
    ) -> AsyncIterator[Self]:
        """A fleet with all daemons ready, and a ledger that consumes."""
        fleet = cls(*arguments, **more)
        await fleet.execute(NOTE_NAMED)
        fleet.write_mode(mode)
        await fleet.place.declare()
        async with AsyncExitStack() as stack:
            fleet.ledger = await stack.enter_async_context(fleet.place.ledger(seed, kind=ledger))
            for daemon in fleet.daemons:
                stack.enter_context(daemon.log)
                daemon.broker.listener = fleet.ledger.listener
                await stack.enter_async_context(daemon.broker)
                await stack.enter_async_context(daemon.store)
                await daemon.start()
                stack.push_async_callback(daemon.kill)
            await asyncio.gather(*(daemon.ready() for daemon in fleet.daemons))
            minders = [asyncio.create_task(daemon.mind()) for daemon in fleet.daemons]
            try:
                yield fleet
            finally:
                fleet.over = True
                for daemon in fleet.daemons:
                    await daemon.kill()
                for minder in minders:
                    minder.cancel()
                await asyncio.wait(minders)

    # ---- the mode

    def write_mode(self, mode: str) -> None:
        """Set the mode for every daemon that starts or reloads from now on."""
        self.mode = mode
        self.config.write_text(f'mode = "{mode}"\n{self.more}')

    def switch(self, mode: str) -> None:
        """Send SIGHUP to all daemons; a hanging or dying one, or its successor, reads the file later."""
        self.write_mode(mode)
        for daemon in self.daemons:
            if daemon.up:  # an earlier SIGHUP would kill it; it reads the file at startup
                daemon.process.reload()

    async def switched(self, mode: str) -> None:
        """Switch the mode, and wait until every daemon works in it: an earlier fault would hit the other mode. Retry
        after a refusal, because a daemon whose broker has just come back may refuse."""
        await asyncio.gather(*(daemon.ready() for daemon in self.daemons))
        refused = -1

        def working() -> bool:
            nonlocal refused
            if refused != (refused := self.told("reload refused")):
                self.switch(mode)
            return {daemon.mode for daemon in self.daemons} == {mode}

        await eventually(working, timeout=60)

    # ---- for the faults

    def told(self, event: str) -> int:
        """The number of log lines of this event so far."""
        return sum(daemon.told[event] for daemon in self.daemons)

    @asynccontextmanager
    async def holding(self, things: Iterable[str]) -> AsyncIterator[None]:
        """No other fault breaks these things during the block: "broker", "store", "daemon 1", …"""
        async with AsyncExitStack() as stack:
            for thing in sorted(set(things)):
                await stack.enter_async_context(self._locks[thing])
            yield

    async def paused(self, server: Server, seconds: float) -> None:
        """Pause the server: connections stay open, but nothing is answered."""
        await asyncio.to_thread(server.pause)
        try:
            await asyncio.sleep(seconds)
        finally:
            await asyncio.to_thread(server.resume)

    async def sql(self, statement: str) -> Any:
        """One value of the store, or None."""
        async with self.connected() as connection:
            return await connection.fetchval(statement)

    async def execute(self, script: str) -> None:
        async with self.connected() as connection:
            await connection.execute(script)

    async def rows_back(self) -> int:
        """Rows of the emptied store: those that came under their number, and those that were held under an earlier id.
        The counter of releases is the same unless a row had two names."""
        named: int = await self.sql("SELECT count(*) FROM test_named")
        return self.ledger.account.rows_back + named

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[asyncpg.Connection]:
        """A database session separate from the daemons'."""
        connection = await asyncpg.connect(self.postgres.url(self.database), timeout=10)
        try:
            yield connection
        finally:
            await connection.close()

    async def api(self, method: str, path: str, body: object = None) -> Any:
        return await asyncio.to_thread(self.rabbitmq.api, method, path, body)

    @property
    def quoted_vhost(self) -> str:
        return quote(self.vhost, safe="")

    async def permit(self, pattern: str = ".*") -> None:
        """Set the names that the daemons may configure, write and read."""
        permissions = {"configure": pattern, "write": pattern, "read": pattern}
        await self.api("PUT", f"/api/permissions/{self.quoted_vhost}/{USER}", permissions)

    async def close_connections(self) -> int:
        """Let the broker close every connection of the daemons. Return how many. The management learns of new ones
        within seconds, and is asked until it knows some."""
        closed = 0
        with suppress(AssertionError):
            for name in await eventually(self._connections, bool, timeout=HEARD_OF):
                with suppress(RuntimeError):  # it is gone by now
                    await self.api("DELETE", f"/api/connections/{quote(name, safe='')}")
                    closed += 1
        return closed

    async def _connections(self) -> list[str]:
        """The daemons' connections that the management knows."""
        found = await self.api("GET", f"/api/vhosts/{self.quoted_vhost}/connections")
        return [one["name"] for one in found if one.get("user") == USER]

    async def settled(self) -> None:
        """Wait until all daemons own lanes, and consume or stand by."""
        wanted = len(self.daemons) * LANES
        owned = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'delayer lane%'"
        await eventually(lambda: self.sql(owned), lambda found: found >= wanted, timeout=STARTUP)
        await eventually(lambda: all(daemon.consumes for daemon in self.daemons), timeout=STARTUP)

    # ---- the end

    async def finish(self) -> None:
        """Let the daemons work until no more messages can arrive, then stop them with SIGTERM."""
        while True:
            await eventually(self._hidden, lambda count: count == 0, timeout=120)
            await eventually(self.place.standing, lambda standing: not set(standing) - self.aside, timeout=120)
            for daemon in self.daemons:
                async with daemon.meant():
                    await daemon.ready()
                    if (code := await daemon.process.stop()) != 0:
                        self.surprises.append(f"daemon {daemon.number} stopped with {code}: {daemon.process.tail(5)}")
            await self.ledger.drained()
            if not set(await self.place.standing()) - self.aside:
                return
            # The stop gave back messages that were read and not begun.
            for daemon in self.daemons:
                async with daemon.meant():
                    await daemon.start()

    async def _hidden(self) -> int:
        """The messages that the broker itself delays in the due queue. AMQP does not show them."""
        if not self.rabbitmq.delays_messages:
            return 0
        broker, host = self.place.broker, self.rabbitmq.management_url
        async with await Admin.connect(broker, management_url=host) as admin:
            return sum(count or 0 for count in (await admin.delayed(["delays.due"])).values())

    @property
    def strays(self) -> str:
        """The queue for messages that the broker could not route."""
        return "delayer.delay-strays"

    @property
    def aside(self) -> set[str]:
        """Queues of messages that are not under way any more."""
        return {self.strays, "delays.refused"}
