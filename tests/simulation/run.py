"""One simulation from one seed: runs it, measures it, and reports what it broke."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import logging
import resource
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any, Final, NamedTuple

import asyncpg
import structlog
from detangle import Decision, NetConfig, RandomWalk, SimConfig, SimLoop, execute
from detangle._context import current_host

from tests.simulation import clock, links, pauses
from tests.simulation.faults import Plan

FORGET_SECONDS: Final = 60.0


class Outcome(NamedTuple):
    """``faults``: how many of each kind. ``messages``: how many the ledger sent."""

    verdict: str
    faults: dict[str, int]
    messages: int


Scenario = Callable[[Plan, float, float], Awaitable[Outcome]]


class Case(NamedTuple):
    """One simulation: ``rate`` messages a second for so many virtual seconds. ``kinds`` and ``keep``: see Plan."""

    mode: str
    seed: int
    seconds: float
    rate: float
    kinds: tuple[str, ...] = ()
    keep: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Result:
    """``check``: what failed, see :func:`check_of`. ``drawn``: the kinds of all faults, in order. ``hash``: of every
    decision and event; equal runs have equal hashes."""

    seed: int
    failure: str
    check: str
    verdict: str
    faults: dict[str, int]
    messages: int
    drawn: Sequence[str]
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


def hear(loop: SimLoop, context: dict[str, Any]) -> None:
    """Every error that reaches the loop fails the run, except one: asyncpg abandons a future if the server has just
    ended the session in which it begins a COPY. The COPY's caller gets an error, too."""
    if not isinstance(context.get("exception"), asyncpg.ConnectionDoesNotExistError):
        loop.unhandled.append(context)
        if loop.tracer is not None:
            loop.tracer.on_unhandled(context)


def simulate(case: Case, scenario: Scenario, *, log: bool = False) -> Result:
    """Run a simulation in this process, which should not run another one."""
    events = hashlib.sha256()
    plan = Plan(case.kinds, case.keep)
    strategy = RandomWalk(case.seed)
    strategy.start(0)
    network = NetConfig(latency=(0.0002, 0.003), fragment=0.02)
    config = SimConfig(max_steps=10**9, timer_jitter=0.002, net=network)
    with ExitStack() as stack:
        _note_logs(events, log)

        decisions = Decisions()

        def set_up(loop: SimLoop) -> None:
            loop.decisions = decisions  # type: ignore[assignment]
            loop.call_at_exact(FORGET_SECONDS, forget, loop, decisions)
            stack.enter_context(clock.virtual(loop, case.seed))
            pauses.install(loop)
            links.install(loop)
            loop.set_task_factory(numbered)
            loop.set_exception_handler(hear)

        gc.collect()
        gc.freeze()  # as the daemon does; it collects after each failure
        began = clock.cpu_seconds()
        run = execute(scenario, (plan, case.seconds, case.rate), config=config, strategy=strategy, setup=set_up)
        real = clock.cpu_seconds() - began
    gc.unfreeze()
    events.update(f"{decisions.hash}".encode())
    outcome = run.value or Outcome("", {}, 0)
    return Result(
        case.seed,
        run.failure.message if run.failure else "",
        check_of(run.failure.exception) if run.failure else "",
        *outcome,
        plan.drawn,
        run.virtual_time,
        real,
        run.steps,
        decisions.count,
        decisions.tasks + run.tasks,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        events.hexdigest()[:16],
    )


def check_of(error: BaseException | None) -> str:
    """The function that raised the error, and the condition of its assertion."""
    if error is None or not (frames := traceback.extract_tb(error.__traceback__)):
        return ""
    condition, line = "", frames[-1].line or ""
    if line.startswith("assert "):
        condition = ": " + line.removeprefix("assert ").partition(",")[0]
    return frames[-1].name + condition


def _note_logs(events: Any, shown: bool) -> None:
    """Let the log count as a part of the run, and show it if asked."""
    logging.disable()

    def note(_: Any, level: str, event: dict[str, Any]) -> dict[str, Any]:
        line = f"{level} {event}"
        events.update(line.encode())
        if shown:
            at = clock._loop.time() if clock._loop else 0.0
            print(f"{at:10.4f} {current_host.get() or '-':<10} {line}", flush=True)
        raise structlog.DropEvent

    structlog.reset_defaults()
    structlog.configure(processors=[note], cache_logger_on_first_use=False)
