"""One daemon's surroundings, so that many can share a broker: its own queues, its own database, a ledger."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self, TypeVar

import aio_pika
import asyncpg

from delayer.amqp.address import Address
from delayer.broker.admin import Admin
from delayer.broker.management_api import Management
from delayer.broker.pipelined_admin import DELAYS_FROM
from delayer.config.model import Settings
from delayer.config.topology import cascade_of, topology_of
from delayer.store.segments import compact as packing
from tests.support.daemon import DaemonProcess, command
from tests.support.ledger import Ledger, Verdict
from tests.support.rabbitmq import RabbitMQ
from tests.support.rows import compact, conserved
from tests.support.sql_ledger import SqlLedger
from tests.support.store import sql
from tests.support.topology import declare

T = TypeVar("T")
LOOK_SECONDS = 0.02
STRATEGY = os.environ.get("TEST_STRATEGY", "auto")
"""The strategy of native mode; "queue" needs a broker that delays messages itself."""
_IN_SEGMENTS = "SELECT coalesce(sum(messages), 0) FROM segment"


async def eventually(
    look: Callable[[], Awaitable[T] | T], wanted: Callable[[T], bool] = bool, *, timeout: float = 60.0
) -> T:
    """Call ``look``, a function or coroutine, until its result is wanted: for changes that servers do not announce."""
    seen: T | None = None
    try:
        async with asyncio.timeout(timeout):
            while True:
                found = look()
                seen = await found if inspect.isawaitable(found) else found
                if wanted(seen):
                    return seen
                await asyncio.sleep(LOOK_SECONDS)
    except TimeoutError:
        raise AssertionError(f"not within {timeout:g} s; the last look saw {seen}") from None


async def counted(broker: RabbitMQ, vhost: str) -> None:
    """Wait until the management API has counted each queue of the vhost (a URL). It has no figures of a queue's first
    seconds, and on a broker that delays messages every verb calls such a queue unknown."""
    if broker.version >= DELAYS_FROM:
        management = Management(broker.management_url, Address.parse(vhost).vhost)
        await eventually(management.delayed, lambda counts: None not in counts.values())


@dataclass
class Place:
    """The surroundings of a daemon. Tests use the URLs ``broker`` and ``store``; the daemon uses ``via_broker`` and
    ``via_store``, which may go through a proxy. ``tag`` is the prefix of its queues and exchanges; all places of
    a vhost share the cascade."""

    mode: str
    broker: str
    store: str | None = None
    tag: str = ""
    via_broker: str = ""
    via_store: str = ""
    prefetch: int = 5_000
    strategy: str = STRATEGY
    lanes: int = 2
    daemons: list[DaemonProcess] = field(default_factory=list)

    def _sections(self, broker: str, store: str | None) -> dict[str, dict[str, str | int]]:
        """The configuration, but for the mode and the route."""
        sections: dict[str, dict[str, str | int]] = {
            "broker": {"url": broker},
            "intake": {"queue": f"{self.tag}delays", "prefetch": self.prefetch},
            "refused": {"queue": f"{self.tag}delays.refused"},
            "native": {"due_queue": f"{self.tag}delays.due", "strategy": self.strategy},
        }
        return sections | ({"store": {"url": store, "lanes": self.lanes}} if store else {})

    @property
    def _routes(self) -> list[dict[str, str]]:
        return [{"from": f"{self.tag}delayer.in", "to": f"{self.tag}delayer.out"}]

    @cached_property
    def environ(self) -> dict[str, str]:
        """The configuration of its daemons."""
        sections = self._sections(self.via_broker or self.broker, self.store and (self.via_store or self.store))
        keys = {f"{name}__{key}".upper(): str(value) for name, of in sections.items() for key, value in of.items()}
        return {"MODE": self.mode, "ROUTE": json.dumps(self._routes), **keys}

    @cached_property
    def settings(self) -> Settings:
        sections = self._sections(self.broker, self.store)
        return Settings.model_validate({"mode": self.mode, "route": self._routes, **sections})

    async def declare(self) -> Self:
        """Declare the topology before any daemon does, so that messages can be there first."""
        await declare(self.broker, topology_of(self.settings))
        return self

    @asynccontextmanager
    async def ledger(
        self, seed: int = 1, *, consume: bool = True, kind: type[Ledger] = Ledger
    ) -> AsyncIterator[Ledger]:
        async with kind.open(
            self.broker,
            random.Random(seed),
            into=f"{self.tag}delayer.in".encode(),
            exchange=f"{self.tag}delayer.out",
            queue=f"{self.tag}ledger",
            consume=consume,
        ) as ledger:
            if isinstance(ledger, SqlLedger):
                ledger.store = self.store or ""
            yield ledger

    @asynccontextmanager
    async def daemon(self, fault: str = "", **more: str) -> AsyncIterator[DaemonProcess]:
        """A running daemon, perhaps with a fault; killed at the end if still running."""
        environ = self.environ | ({"FAULT": fault} if fault else {}) | more
        async with DaemonProcess(environ) as daemon:
            self.daemons.append(daemon)
            yield daemon

    @asynccontextmanager
    async def working(self, **more: str) -> AsyncIterator[DaemonProcess]:
        """A ready daemon, stopped with SIGTERM if still running at the end."""
        async with self.daemon(**more) as daemon:
            yield await daemon.ready()
            if daemon.running:
                assert await daemon.stop() == 0, daemon.tail()

    async def delayer(self, *words: str, **more: str) -> str:
        """Run a command of the command line with the configuration of its daemons. Fails unless it exits with 0."""
        return await command(None, *words, environ=self.environ | more)

    # ---- messages by place

    async def depth(self, queue: str) -> int:
        """Messages ready in one of its queues (``delays``, ``delays.due``, ``delays.refused``, ``ledger``)."""
        async with await Admin.connect(self.broker) as admin:
            return (await admin.depths([f"{self.tag}{queue}"]))[f"{self.tag}{queue}"] or 0

    async def bodies(self, queue: str) -> list[bytes]:
        """The bodies in a queue, from the head; the messages stay there."""
        async with await aio_pika.connect(self.broker) as connection:
            there = await (await connection.channel()).get_queue(queue)
            # A queue with a single active consumer does not know basic.get.
            async with there.iterator() as messages:
                return [(await anext(messages)).body for _ in range(there.declaration_result.message_count or 0)]

    async def ready(self, count: int, queue: str = "delays") -> None:
        """Wait until this many messages are ready there."""
        await eventually(lambda: self.depth(queue), lambda depth: depth == count)

    async def ask(self, statement: str) -> Any:
        """One value of the store."""
        assert self.store
        async with sql(self.store) as connection:
            return await connection.fetchval(statement)

    async def rows(self) -> int:
        """Messages in the store, waiting or held."""
        return int(await self.ask("SELECT (SELECT count(*) FROM message) + (SELECT count(*) FROM held)"))

    async def inbox(self) -> int:
        """Messages in the SQL inbox."""
        return int(await self.ask("SELECT count(*) FROM delayer_inbox"))

    async def segments(self) -> int:
        """Messages in segments."""
        return int(await self.ask(_IN_SEGMENTS))

    async def compact(self, rows: int = packing.ROWS) -> int:
        """Pack all waiting messages of any due instant, with the daemons stopped. Return the number of segments."""
        assert self.store
        assert not any(daemon.running for daemon in self.daemons)
        async with sql(self.store) as connection:
            made = await compact_all(connection, rows)
        assert await self.rows() == 0
        return made

    async def standing(self, *, cascade: bool = True) -> dict[str, int]:
        """The number of undelivered messages by place, in broker and store, with or without the cascade's levels."""
        names = [f"{self.tag}{name}" for name in ("delays", "delays.refused")]
        if self.mode == "native":
            levels = cascade_of(self.settings)
            names += [f"{self.tag}delays.due", levels.strays]
            names += [level.name for level in levels.levels() if cascade]
        async with await Admin.connect(self.broker) as admin:
            found = {name: depth for name, depth in (await admin.depths(names)).items() if depth}
        if self.store and (rows := await self.rows()):
            found["store"] = rows
        if self.store and (unread := await self.inbox()):
            found["inbox"] = unread
        if self.store and (packed := await self.segments()):
            found["segments"] = packed
        return {name: depth for name, depth in found.items() if depth is not None}

    async def conserved(self) -> dict[str, int]:
        """The counters of the store, after comparing them with its rows, lane by lane."""
        assert self.store
        async with sql(self.store) as connection:
            return await conserved(connection)

    async def settle_accounts(self, ledger: Ledger) -> Verdict:
        """The account, including messages still left somewhere; the daemons must be stopped."""
        assert not any(daemon.running for daemon in self.daemons), "a daemon still runs: the account would not hold"
        await ledger.drained()
        return ledger.verdict(await self.standing())

    async def ended(
        self, ledger: Ledger, *, repeats: bool = False, redelivered: bool | None = None, timeout: float = 60.0
    ) -> Verdict:
        """Wait for all owed messages, and stop the daemons: every promise is kept, and the store's counters agree."""
        await ledger.all_back(timeout=timeout)
        for daemon in self.daemons:
            if daemon.running:
                assert await daemon.stop() == 0, daemon.tail()
        verdict = await self.settle_accounts(ledger)
        counters = await self.conserved() if self.store else {}
        print(verdict, counters)
        verdict.assert_kept(repeats=repeats, redelivered=redelivered)
        if counters:
            assert counters["parked"] == counters["released"], "parked and neither released nor standing anywhere"
            assert counters["held"] == 0
        return verdict


async def compact_all(connection: asyncpg.Connection, rows: int = packing.ROWS) -> int:
    """Pack all waiting messages into segments of up to ``rows`` messages. Return how many segments."""
    return len(await compact(connection, rows=rows))


async def stopped(daemon: DaemonProcess, timeout: float = 60.0) -> None:
    """Wait until the process stopped itself (SIGSTOP) at its fault point; fails if it ended instead. Raises
    TimeoutError. No thread waits for it: a scene has more daemons than threads."""
    async with asyncio.timeout(timeout):
        while (state := _stopped_or_ended(daemon.pid)) is None:  # noqa: ASYNC110 - another process
            await asyncio.sleep(LOOK_SECONDS)
    assert state == os.CLD_STOPPED, f"it ended; the log ends:\n{daemon.tail()}"


def _stopped_or_ended(pid: int) -> int | None:
    try:
        seen = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:  # the loop has taken its exit code already
        return os.CLD_EXITED
    return None if seen is None else seen.si_code


async def killed_by_fault(daemon: DaemonProcess) -> None:
    """Wait until the process killed itself at its fault point."""
    code = await daemon.wait()
    assert code == -signal.SIGKILL, f"expected SIGKILL, found exit code {code}; the log ends:\n{daemon.tail()}"
