"""A compaction loses its driver or an executor at each step, while a daemon releases and others cancel and reschedule.

The account of every message balances. Its worker stops at the step, and actors of the store run into its locks.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from delayer.audit import restore
from delayer.store.admin import actions
from delayer.store.admin.actions import NewDue
from delayer.store.admin.detail import FoundIn
from tests.audit.cluster import Cluster
from tests.audit.compacting import kill_tree, quiet, stopped, until_quiet
from tests.support.ledger import Ledger
from tests.support.letters import NUMBER
from tests.support.place import Place, eventually
from tests.support.rows import everything
from tests.support.store import sql

pytestmark = [pytest.mark.long, pytest.mark.deadline(1500)]

STEPS = ("compact.locked", "compact.written", "compact.verified", "compact.deleted", "compact.committed")
LONGEST_MS = 60_000
AFTER_MS, ROWS = 2_000, 100
AT_ONCE = 3
"""Messages of one cancel, and of one reschedule."""
SEED = 20

# The command itself packs nothing that daemons would restore at once, so it would need messages of the next days.
DRIVER = f"""
import asyncio, sys
from delayer.audit import compact, spark
url, master = sys.argv[1:]
with spark.session("delayer compact", master=master, handing_out=True) as session:
    planned = asyncio.run(compact.plan(url, {AFTER_MS}, {ROWS}))
    print(len(compact.run(session, url, planned, {ROWS}, lambda *_: None).lost))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(executors=1, workers=2) as started:
        yield started


@asynccontextmanager
async def driver(url: str, master: str, **environ: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DRIVER, url, master, env=os.environ | environ,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        kill_tree(process.pid)
        await process.wait()


@dataclass
class Actors:
    """Cancels and reschedules during the traffic. ``gone``: the ledger's numbers of cancelled messages."""

    url: str
    ledger: Ledger
    chance: random.Random = field(default_factory=lambda: random.Random(SEED))
    gone: dict[int, FoundIn] = field(default_factory=dict)
    moved: Counter[FoundIn] = field(default_factory=Counter)

    async def cancel(self) -> None:
        for number, found in (await self._act(actions.cancel)).items():
            if found is not FoundIn.NOWHERE:
                self.gone[number] = found

    async def reschedule(self) -> None:
        """Make them due a second later, which the ledger allows for messages with a relative delay."""

        async def later(connection: object, ids: list[int]) -> dict[int, FoundIn]:
            return await actions.reschedule(connection, ids, when=NewDue(by_ms=1_000))

        self.moved.update((await self._act(later, absolute=False)).values())

    async def _act(self, act: Callable[..., object], *, absolute: bool = True) -> dict[int, FoundIn]:
        """Act on some messages of a snapshot: each may have moved or left since. The result by the ledger's number."""
        async with sql(self.url) as connection:
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                standing = {id_: NUMBER.unpack_from(row.body)[0] for id_, row in (await everything(connection)).items()}
            owed = self.ledger.account.owed
            fit = sorted(id_ for id_, number in standing.items() if absolute or not owed(number).form.absolute)
            found = await act(connection, self.chance.sample(fit, min(AT_ONCE, len(fit))))
        return {standing[id_]: where for id_, where in found.items()}


@asynccontextmanager
async def repeated(*works: Callable[[], object]) -> AsyncIterator[None]:
    """Repeat each of these in the block, and finish the rounds already begun."""
    over = asyncio.Event()

    async def again(work: Callable[[], object]) -> None:
        while not over.is_set():
            await work()

    async with asyncio.TaskGroup() as group:
        for work in works:
            group.create_task(again(work))
        try:
            yield
        finally:
            over.set()


async def at_step(process: asyncio.subprocess.Process, workers: Callable[[], list[psutil.Process]]) -> bool:
    """Whether a worker stops at its step before the driver exits."""

    async def look() -> object:
        return workers() or process.returncode is not None

    await eventually(look, timeout=240.0)
    return bool(workers())


def resume(workers: list[psutil.Process]) -> None:
    for one in workers:
        with suppress(psutil.NoSuchProcess):
            one.resume()


async def kill_driver(url: str, step: str) -> bool:
    """The driver dies alone, and its workers go on for a moment. Whether one stood at the step."""
    async with driver(url, "local[2]", DELAYER_FAULT=f"{step}:1:stop") as process:
        stands = await at_step(process, lambda: stopped(process.pid))
        family = psutil.Process(process.pid).children(recursive=True) if stands else []
        if stands:
            process.send_signal(signal.SIGKILL)
            await process.wait()
        resume(family)
        psutil.wait_procs(family, timeout=1)
        for one in family:
            with suppress(psutil.NoSuchProcess):
                one.kill()
    await until_quiet(url, "delayer compact")
    return stands


async def kill_executor(url: str, step: str, settings: Path, cluster: Cluster) -> bool:
    """An executor of a cluster dies with its worker, and the rest finish the work."""

    def standing() -> list[psutil.Process]:
        return [one for executor in cluster.executors() for one in stopped(executor.pid)]

    async with driver(url, cluster.url, **cluster.with_fault(f"{step}:1:stop", settings)) as process:
        stands = await at_step(process, standing)
        ended = asyncio.create_task(process.communicate())
        if stands:
            cluster.kill_executor(next(one.pid for one in cluster.executors() if stopped(one.pid)))
        while not ended.done():
            resume(standing())
            await asyncio.wait([ended], timeout=0.1)
        _, told = await ended
        assert process.returncode == 0, told.decode()
    await until_quiet(url, "delayer compact")
    return stands


async def scene(place: Place, kill: Callable[[str, Path], Awaitable[bool]], tmp_path: Path) -> None:
    """Traffic of all kinds, and a death at each step. ``kill``: whether a worker stood at the step."""
    assert place.store
    async with place.ledger(SEED) as ledger:
        actors = Actors(place.store, ledger)

        async def send() -> None:
            await ledger.publish(100, longest_ms=LONGEST_MS)
            back = ledger.account.back
            # As many as come back, so that a slow machine keeps up.
            await ledger.until(lambda: ledger.account.back >= min(back + 50, ledger.account.sent), timeout=None)

        async with place.working() as daemon:
            await ledger.publish(3_000, longest_ms=LONGEST_MS)
            async with repeated(send, actors.cancel, actors.reschedule):
                for step in STEPS:
                    # A job with too few messages never reaches its step.
                    tries = [await kill(step, tmp_path / step)]
                    while not tries[-1]:
                        assert len(tries) < 3, f"no worker reached {step}"
                        tries.append(await kill(step, tmp_path / step))
            while await place.segments():
                await restore.run(place.store, await restore.plan(place.store, None), quiet)
            await ledger.until(lambda: ledger.account.back >= ledger.account.sent - len(actors.gone), timeout=240)
            await eventually(place.standing, lambda standing: not standing)
            assert await daemon.stop() == 0
        verdict = await place.settle_accounts(ledger)
    print(f"{verdict}; cancelled {Counter(actors.gone.values())}, rescheduled {actors.moved}")
    assert set(verdict.missing) == set(actors.gone), "only the cancelled messages are missing"
    assert not verdict.early
    assert not verdict.changed
    assert not verdict.repeats
    counters = await place.conserved()
    print(counters)
    assert counters["parked"] == counters["released"] + counters["cancelled"]
    assert counters["cancelled"] == len(actors.gone)
    assert counters["restored"] == counters["compacted"] > 0
    assert actors.gone and actors.moved[FoundIn.WAITING]


async def test_the_driver_dies_at_each_step(vhost: str, store: str, tmp_path: Path) -> None:
    place = await Place("store", vhost, store).declare()
    await scene(place, lambda step, _: kill_driver(store, step), tmp_path)


async def test_an_executor_dies_at_each_step(cluster: Cluster, vhost: str, store: str, tmp_path: Path) -> None:
    place = await Place("store", vhost, store).declare()
    await scene(place, lambda step, settings: kill_executor(store, step, settings, cluster), tmp_path)
