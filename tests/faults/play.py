"""One fault after another in one fleet, while messages pass. Several modules of tests play this way, each with its own
faults and its own ledger."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvloop

from tests.faults.doomed import refused
from tests.faults.fault import Fault
from tests.faults.fleet import Fleet
from tests.faults.kinds import KINDS, inject
from tests.support.flow import flowing
from tests.support.servers import Postgres, RabbitMQ
from tests.support.verdict import Window

SEED: Final = 5_000
MESSAGES: Final = 300
A_SECOND: Final = 150
"""Messages a second during the fault."""
LONGEST_MS: Final = 1_200
DOOMED: Final = 5
"""The number of doomed messages sent along with them."""
KNOWN: Final = 50
"""Messages through both daemons, by the cascade too, after which they know all exchanges."""
STORE, NATIVE = "store", "native"


@dataclass
class Play:
    """The fleet, and its event loop."""

    fleet: Fleet
    runner: asyncio.Runner
    doomed: int

    def __call__(self, mode: str, fault: Fault) -> None:
        self.runner.run(self._play(mode, fault))

    async def _play(self, mode: str, fault: Fault) -> None:
        fleet, ledger = self.fleet, self.fleet.ledger
        if mode != fleet.mode:
            await fleet.switched(mode)
        excused = KINDS[fault.kind].excuses(fault, alone=True)
        if not excused:
            # A daemon's first publish to an exchange has a shorter deadline, which the fault would exceed.
            await ledger.publish(KNOWN, delay_ms=1_100)
            await ledger.all_back()
        await ledger.publish(MESSAGES, longest_ms=LONGEST_MS, doomed_ones=self.doomed)
        assert ledger.account.windows is not None
        begin_ms = time.time() * 1000
        async with asyncio.timeout(fault.seconds + 90), flowing(ledger, A_SECOND, longest_ms=LONGEST_MS):
            try:
                await inject(fleet, fault)
            finally:  # a failed fault may have broken something, and the next tests must not fail for it
                if excused:
                    ledger.account.windows.append(Window(begin_ms, time.time() * 1000))
        await ledger.publish(MESSAGES, longest_ms=LONGEST_MS, doomed_ones=self.doomed)
        await ledger.all_back(timeout=60)
        surprises, fleet.surprises = fleet.surprises, []
        assert not surprises
        ledger.verdict().assert_kept(repeats=True)

    async def end(self) -> None:
        """Check the account of everything that passed, with all daemons stopped."""
        fleet = self.fleet
        await fleet.finish()
        standing = await fleet.place.standing()
        standing.pop("delays.refused", None)
        verdict, aside = fleet.ledger.verdict(standing), await refused(fleet)
        counters = await fleet.place.conserved()
        print(verdict, f"{aside.sent} to be refused, {aside.again} of them stand there twice", counters)
        verdict.assert_kept(repeats=True)
        verdict.assert_apart()
        assert aside.kept, aside
        assert not fleet.surprises
        assert counters["parked"] == counters["released"] == await fleet.rows_back(), "a row had two names"


@contextmanager
def playing(directory: Path, *, seed: int, doomed: int = 0, kind: type[Play] = Play, **more: Any) -> Iterator[Play]:
    """A fleet with its own servers, which faults kill and stop. At the end of the block its account is checked.
    ``doomed``: the doomed messages that are sent along with each fault. ``more``: see Fleet.open."""
    with RabbitMQ() as rabbitmq, Postgres() as postgres, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stack = AsyncExitStack()
        opening = Fleet.open(rabbitmq, postgres, directory, mode=STORE, seed=seed, **more)
        fleet = runner.run(stack.enter_async_context(opening))
        fleet.ledger.account.windows = []
        try:
            yield (one := kind(fleet, runner, doomed))
            runner.run(one.end())
        finally:
            runner.run(stack.aclose())


def name_of(value: object) -> str:
    return f"{value.kind} {value.detail}".strip().replace(" ", "-") if isinstance(value, Fault) else str(value)
