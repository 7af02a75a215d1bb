"""One simulation from one seed: runs it, measures it, and reports what it broke."""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import json
import logging
import os
import resource
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from typing import Any, Final

import structlog
from detangle import Decision, NetConfig, RandomWalk, SimConfig, SimLoop, execute
from detangle.errors import SimulationError

from tests.simulation import clock, pauses
from tests.simulation.native import native
from tests.simulation.planted import PLANTED
from tests.simulation.store.process import ClockedPostgres
from tests.simulation.stored import FEATURES, stored

FORGET_SECONDS: Final = 60.0
Scenario = Callable[[float, int], Awaitable[tuple[str, dict[str, int]]]]


@dataclass(frozen=True)
class Result:
    """``hash``: of every decision and event; equal runs have equal hashes."""

    seed: int
    failure: str
    verdict: str
    faults: dict[str, int]
    virtual_seconds: float
    cpu_seconds: float
    steps: int
    decisions: int
    tasks: int
    megabytes: int
    hash: str

    def __str__(self) -> str:
        speed = self.virtual_seconds / self.cpu_seconds
        rate = self.steps / self.cpu_seconds
        return f"{json.dumps(asdict(self))}\n{speed:.1f} virtual seconds and {rate:.0f} steps in a second of one core"


class NumberedTask(asyncio.Task[Any]):
    """A task whose place in a set does not depend on its address."""

    _numbers = count()

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self._number = next(self._numbers)
        super().__init__(*arguments, **more)

    def __hash__(self) -> int:
        return self._number


def numbered(loop: asyncio.AbstractEventLoop, work: Any, **more: Any) -> NumberedTask:
    return NumberedTask(work, loop=loop, **more)


class Decisions:
    """Stands in for detangle's list of all decisions, which would fill the memory in hours: a count and a hash."""

    def __init__(self) -> None:
        self.count = self.hash = self.tasks = 0

    def append(self, decision: Decision) -> None:
        self.count += 1
        self.hash = hash((self.hash, decision.n, decision.value))


def forget(loop: SimLoop, decisions: Decisions) -> None:
    """Forget the tasks that are done; detangle keeps each until the end. Those with an error stay."""
    done = [task for task in loop.tasks if task.done() and not task._log_traceback]  # type: ignore[attr-defined]
    decisions.tasks += len(done)
    for task in done:
        del loop.task_info[task], loop._task_lanes[task]
    gone = set(done)
    loop.tasks[:] = [task for task in loop.tasks if task not in gone]
    loop.call_at_exact(loop.time() + FORGET_SECONDS, forget, loop, decisions)


def simulate(seed: int, scenario: Scenario, seconds: float, rate: int, *, log: bool = False) -> Result:
    events = hashlib.sha256()
    strategy = RandomWalk(seed)
    strategy.start(0)
    network = NetConfig(latency=(0.0002, 0.003), fragment=0.02)
    config = SimConfig(max_steps=10**9, timer_jitter=0.002, net=network)
    with ExitStack() as stack:
        _note_logs(events, log)

        decisions = Decisions()

        def set_up(loop: SimLoop) -> None:
            loop.decisions = decisions  # type: ignore[assignment]
            loop.call_at_exact(FORGET_SECONDS, forget, loop, decisions)
            stack.enter_context(clock.virtual(loop, seed))
            pauses.install(loop)
            loop.set_task_factory(numbered)

        gc.collect()
        gc.freeze()  # as the daemon does; it collects after each failure
        began = clock.cpu_seconds()
        run = execute(scenario, (seconds, rate), config=config, strategy=strategy, setup=set_up)
        real = clock.cpu_seconds() - began
    gc.unfreeze()
    events.update(f"{decisions.hash}".encode())
    failure, verdict, faults = run.failure.message if run.failure else "", "", {}
    if run.value is not None:
        verdict, faults = run.value
    return Result(
        seed,
        failure,
        verdict,
        faults,
        run.virtual_time,
        real,
        run.steps,
        decisions.count,
        decisions.tasks + run.tasks,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        events.hexdigest()[:16],
    )


def _note_logs(events: Any, shown: bool) -> None:
    """Let the log count as a part of the run, and show it if asked."""
    logging.disable()

    def note(_: Any, level: str, event: dict[str, Any]) -> dict[str, Any]:
        line = f"{level} {event}"
        events.update(line.encode())
        if shown:
            print(f"{clock._loop.time() if clock._loop else 0:10.4f} {line}")
        raise structlog.DropEvent

    structlog.reset_defaults()
    structlog.configure(processors=[note], cache_logger_on_first_use=False)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--mode", choices=("native", *FEATURES), default="native")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rate", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--first", action="store_true", help="stop at the first failure")
    parser.add_argument("--log", action="store_true")
    parser.add_argument("--plant", choices=PLANTED, help="a bug that the simulation should find, in its mode")
    asked = parser.parse_args(arguments)
    mode = asked.mode
    if asked.plant:
        PLANTED[asked.plant].plant()
        mode = PLANTED[asked.plant].mode
    failed = 0
    with scenario_of(mode) as scenario:
        for seed in range(asked.seed, asked.seed + asked.runs):
            failed += in_a_fork(lambda seed=seed: simulate(seed, scenario, asked.seconds, asked.rate, log=asked.log))
            if failed and asked.first:
                break
    return 1 if failed else 0


def in_a_fork(run: Callable[[], Result]) -> bool:
    """Print the result of a run in a child process, so that each begins with the same state: it must not depend on the
    runs before it. Whether it failed."""
    sys.stdout.flush()
    if not (child := os.fork()):
        try:
            result = run()
            print(result, flush=True)
            os._exit(bool(result.failure))
        except BaseException:  # noqa: BLE001 - the child must not go on as its parent would
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(2)
    _, status = os.waitpid(child, 0)
    if (code := os.waitstatus_to_exitcode(status)) not in (0, 1):
        raise RuntimeError(f"a run ended with {code}")
    return code == 1


@contextmanager
def scenario_of(mode: str) -> Iterator[Scenario]:
    """The modes with a store have a Postgres for all their runs."""
    if mode == "native":
        yield native
        return
    postgres = ClockedPostgres()
    try:
        postgres.start()
        yield partial(stored, FEATURES[mode], postgres)
    finally:
        postgres.close()


__all__ = ["SimulationError", "main", "simulate"]
