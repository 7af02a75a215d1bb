"""One soak: servers, two daemons, a ledger that never stops, and a schedule of faults."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

import asyncpg
from aiormq.exceptions import AMQPError

from delayer.amqp.errors import BrokerLost
from tests.faults.doomed import refused
from tests.faults.fault import Fault, Missed, Untouched
from tests.faults.features.striking import numbers_in
from tests.faults.fleet import Fleet
from tests.faults.kinds import KINDS, Planned, schedule, things
from tests.soak.result import Options, Result
from tests.soak.traffic import Traffic
from tests.support.http_ledger import HttpLedger
from tests.support.mixed_ledger import MixedLedger
from tests.support.servers import Postgres, RabbitMQ, StartFailed
from tests.support.verdict import Window, covered

CALM: Final = 15.0
"""Seconds without a fault, at the beginning and at the end, when nothing may be delivered twice."""
PATIENCE: Final = 300.0
"""Seconds after the last fault for the last messages to arrive; a held message may need a few attempts."""
CLIPPED: Final = 1_000
"""Characters of a surprise; the logs have the rest."""
HEALING: Final = 400.0
"""Seconds that a fault may take longer than it lasts."""
FAILURES: Final = (
    StartFailed, RuntimeError, AssertionError, OSError, BrokerLost, subprocess.SubprocessError,
    asyncpg.PostgresError, asyncpg.InterfaceError, AMQPError,
)  # fmt: skip
"""Errors of a fault that fails. TimeoutError is an OSError."""


class Soak:
    """``faults``: those that are over. ``missed``: those that broke nothing. ``now``: those in progress."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.calm = min(CALM, options.seconds / 8)
        self.plan = schedule(options.seed, options.seconds, self.calm)
        self.faults: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()
        self.now: list[Fault] = []
        self.phase = "starting"
        self.fleet: Fleet | None = None
        self._over = asyncio.Event()
        self._no_more_faults = False
        self._began = time.monotonic()
        self._begun = datetime.now(UTC)
        self._log = (options.directory / "faults.log").open("a", buffering=1)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    async def run(self) -> Result:
        """Run from the first server's start to the last one's end. Raises StartFailed if a server does not start."""
        async with self._servers() as (rabbitmq, postgres):
            where = self.options.directory
            try:
                opened = Fleet.open(
                    rabbitmq,
                    postgres,
                    where,
                    mode="store",
                    seed=self.options.seed,
                    bug=self.options.bug,
                    ledger=MixedLedger,
                    environ=HttpLedger.environ(),
                )
                async with opened as self.fleet:
                    return await self._attack(self.fleet)
            finally:
                (where / "broker.log").write_text(rabbitmq.log())
                (where / "postgres.log").write_text(postgres.log())
                self._log.close()

    @asynccontextmanager
    async def _servers(self) -> AsyncIterator[tuple[RabbitMQ, Postgres]]:
        rabbitmq, postgres = RabbitMQ(), Postgres(settings={"max_wal_size": "2GB", "shared_buffers": "256MB"})
        try:
            await asyncio.gather(asyncio.to_thread(rabbitmq.start), asyncio.to_thread(postgres.start))
            yield rabbitmq, postgres
        finally:
            await asyncio.to_thread(rabbitmq.close)
            await asyncio.to_thread(postgres.close)

    async def _attack(self, fleet: Fleet) -> Result:
        account = fleet.ledger.account
        account.windows = []
        self._began = time.monotonic()
        self.phase = "running"
        traffic = Traffic(fleet)
        side = [asyncio.create_task(work) for work in (traffic.alternate(), traffic.measure())]
        publishing = asyncio.create_task(traffic.publish(self._over))
        try:
            await self._break_things(fleet)
            self._over.set()
            self.phase = "waiting for the last ones"
            await publishing
            with suppress(AssertionError):  # the account names the missing messages
                await fleet.ledger.all_back(timeout=PATIENCE)
        finally:
            for task in (*side, publishing):
                task.cancel()
            await asyncio.wait([*side, publishing])
        return await self._settle(fleet, traffic)

    async def _break_things(self, fleet: Fleet) -> None:
        """Run the whole schedule, without the faults that have not begun when the time is over."""
        at_work: set[asyncio.Task[None]] = set()
        for planned in self.plan:
            await self._until(planned.at)
            at_work.add(asyncio.create_task(self._inject(fleet, planned)))
        await self._until(self.options.seconds - self.calm)
        self._no_more_faults = True
        if at_work:
            self.phase = "healing"
            await asyncio.wait(at_work)
        self.phase = "calm"
        await asyncio.sleep(self.calm)

    async def _until(self, at: float) -> None:
        if (seconds := at - self.elapsed) > 0:
            await asyncio.sleep(seconds)

    async def _inject(self, fleet: Fleet, planned: Planned) -> None:
        fault = planned.fault
        async with fleet.holding(things(fault)):
            if self._no_more_faults:
                return
            begin_ms, excuses = time.time() * 1000, KINDS[fault.kind].excuses(fault, alone=False)
            self.now.append(fault)
            self._note(f"begin {fault}")
            try:
                async with asyncio.timeout(fault.seconds + HEALING):
                    begin_ms = await KINDS[fault.kind].inject(fleet, fault) or begin_ms
                self.faults[fault.kind] += 1
            except Missed as missed:
                self.missed[fault.kind] += 1
                self._note(f"missed {fault}: {missed}")
                # Other missed faults excuse repeats: a fault waiting for a daemon at its point ends by killing it.
                excuses = excuses and not isinstance(missed, Untouched)
            except FAILURES as error:
                fleet.surprises.append(f"{fault}: {type(error).__name__}: {str(error)[:CLIPPED]}")
            finally:
                self.now.remove(fault)
                self._note(f"over  {fault}")
                assert fleet.ledger.account.windows is not None
                if excuses:
                    fleet.ledger.account.windows.append(Window(begin_ms, time.time() * 1000))

    def _note(self, text: str) -> None:
        self._log.write(f"{self.elapsed:8.2f} {text}\n")

    async def _settle(self, fleet: Fleet, traffic: Traffic) -> Result:
        self.phase = "settling the account"
        surprises = fleet.surprises
        await self._or_say(surprises, fleet.finish())
        for daemon in fleet.daemons:
            async with daemon.meant():
                await daemon.kill()
        released, back = 0, 0
        try:
            released = (await fleet.place.conserved())["released"]
            back = await fleet.rows_back()
        except AssertionError as error:
            surprises.append(f"the counters do not match the rows: {error}")
        aside = set(await numbers_in(fleet, fleet.strays))
        doomed = await refused(fleet)
        standing = {name: depth for name, depth in (await fleet.place.standing()).items() if name not in fleet.aside}
        account = fleet.ledger.account
        verdict = account.verdict(standing)
        missing = [number for number in verdict.missing if number not in aside]
        return Result(
            self.options,
            self._begun,
            ".".join(map(str, fleet.rabbitmq.version)),
            self.elapsed,
            replace(verdict, missing=missing),
            self.faults,
            self.missed,
            len(aside),
            len(aside.intersection(verdict.missing)),
            doomed,
            self.elapsed - covered(account.windows or []),
            (released, back),
            traffic.largest / 1e6,
            traffic.modes,
            traffic.ways,
            surprises,
        )

    async def _or_say(self, surprises: list[str], work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except (AssertionError, TimeoutError, BrokerLost) as error:
            surprises.append(f"the end: {type(error).__name__}: {error}")
