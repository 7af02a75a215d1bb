"""The command of the simulation: chosen seeds, new ones for a while, or all that failed before. Each runs in a process
of its own. The command shrinks a failing one, and tells its story."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import pickle
import random
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import Final

from tests.simulation import clock
from tests.simulation.faults import OF_STORE
from tests.simulation.native import native
from tests.simulation.planted import PLANTED
from tests.simulation.run import Case, Result, Scenario, simulate
from tests.simulation.store.process import ClockedPostgres
from tests.simulation.stored import FEATURES, stored

KNOWN: Final = Path(__file__).with_name("seeds.jsonl")
"""Every case that failed once, with the reason."""
MODES: Final = ("native", *FEATURES)
HANGS_SECONDS: Final = 600.0
"""Real time beyond its virtual seconds after which a run counts as hanging; even an overloaded host is faster."""


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--mode", choices=MODES, default="store")
    parser.add_argument("--seconds", type=float, default=600.0, help="virtual seconds of traffic in each run")
    parser.add_argument("--rate", type=float, default=5, help="messages a second")
    parser.add_argument("--seed", type=int, help="the first seed; without it, a new one")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument(
        "--faults", action="append", default=[], choices=OF_STORE, help="only this kind; may be repeated"
    )
    parser.add_argument("--keep", help="only the faults with these indices, as in 0,3")
    parser.add_argument(
        "--new", type=float, metavar="SECONDS", help="new seeds, in all modes, for so many real seconds"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        nargs="?",
        default=1,
        const=len(os.sched_getaffinity(0)),
        metavar="N",
        help="with --new: so many processes, each on one core; without a number, one for each core",
    )
    parser.add_argument("--known", action="store_true", help="all cases that failed before")
    parser.add_argument("--first", action="store_true", help="stop at the first failure")
    parser.add_argument(
        "--shrink", action="store_true", help="leave out what a failure does not need, and tell its story"
    )
    parser.add_argument("--log", action="store_true")
    parser.add_argument("--results", type=Path, metavar="FILE", help="append a line of JSON for each run")
    parser.add_argument("--plant", choices=PLANTED, help="a bug that the simulation should find, in its mode")
    asked = parser.parse_args(arguments)
    if asked.jobs > 1 and (not asked.new or asked.seed is not None):
        parser.error("--jobs needs --new, and draws its seeds itself")
    return asked


def main(arguments: Sequence[str]) -> int:
    asked = parsed(arguments)
    if asked.jobs > 1:
        return spread(arguments, asked.jobs)
    if asked.plant:
        PLANTED[asked.plant].plant()
    failed, code = 0, revision() if asked.results else ""
    with Simulations() as simulations:
        for case in cases_of(asked):
            began = clock.real_seconds()
            result = simulations.run(case, log=asked.log)
            print(result, flush=True)
            if asked.results:
                with asked.results.open("a") as file:
                    print(line_of(case, result, clock.real_seconds() - began, code), file=file)
            if result.failure:
                failed += 1
                planted = f" --plant {asked.plant}" if asked.plant else ""
                print(f"to repeat: python -m tests.simulation {words_of(case)}{planted}", flush=True)
                if asked.shrink:
                    tell(shrunk(case, result, simulations.run), simulations)
                if asked.first:
                    break
    return 1 if failed else 0


def spread(arguments: Sequence[str], jobs: int) -> int:
    """Run the same command in several processes. A simulation and its Postgres take turns, so one core is enough for
    both, and on the same core the turns cost less."""
    command = [sys.executable, "-m", "tests.simulation", *arguments, "--jobs", "1"]
    cores = cycle(sorted(os.sched_getaffinity(0)))
    children = [subprocess.Popen(["taskset", "--cpu-list", str(next(cores)), *command]) for _ in range(jobs)]
    return max([child.wait() for child in children])


def cases_of(asked: argparse.Namespace) -> Iterator[Case]:
    if asked.known:
        for line in KNOWN.read_text().splitlines():
            yield case_of(json.loads(line))
        return
    seed = random.SystemRandom().randrange(1 << 31) if asked.seed is None else asked.seed
    if asked.new:
        ends = clock.real_seconds() + asked.new
        for number, mode in zip(count(seed), cycle(MODES)):
            if clock.real_seconds() >= ends:
                return
            yield Case(mode, number, asked.seconds, asked.rate)
    keep = None if asked.keep is None else tuple(int(place) for place in asked.keep.split(",") if place)
    mode, kinds = asked.mode, tuple(asked.faults)
    if asked.plant:
        mode, kinds = PLANTED[asked.plant].mode, tuple(PLANTED[asked.plant].faults)
    for number in range(seed, seed + asked.runs):
        yield Case(mode, number, asked.seconds, asked.rate, kinds, keep)


def case_of(line: dict[str, object]) -> Case:
    """A case of KNOWN."""
    fields = {name: line[name] for name in ("mode", "seed", "seconds", "rate")}
    return Case(**fields, kinds=tuple(line.get("kinds", ())))  # type: ignore[arg-type]


def line_of(case: Case, result: Result, real_seconds: float, code: str) -> str:
    """The line of a run in a log of results."""
    asked: dict[str, object] = {"mode": case.mode, "seed": case.seed, "seconds": case.seconds, "rate": case.rate}
    asked |= {"kinds": case.kinds} if case.kinds else {}
    took = {"virtual_seconds": round(result.virtual_seconds), "real_seconds": round(real_seconds, 1)}
    found = {"messages": result.messages, "faults": result.faults, "failure": result.failure}
    return json.dumps({**asked, **took, **found, "revision": code})


def revision() -> str:
    """The commit of the code; "+" if it was changed since."""
    described = ["git", "-C", str(KNOWN.parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()


def words_of(case: Case) -> str:
    """The arguments that repeat a case."""
    words = [f"--mode '{case.mode}' --seed {case.seed} --seconds {case.seconds:g} --rate {case.rate:g}"]
    words += [f"--faults '{kind}'" for kind in case.kinds]
    if case.keep is not None:
        words.append(f"--keep '{','.join(map(str, case.keep))}'")
    return " ".join(words)


def shrunk(case: Case, result: Result, run: Callable[[Case], Result]) -> Case:
    """Return a smaller case that still fails: drop faults, one at a time, then halve the time."""
    keep = list(range(len(result.drawn)) if case.keep is None else case.keep)
    for place in reversed(keep.copy()):
        fewer = tuple(one for one in keep if one != place)
        if run(case._replace(keep=fewer)).failure:
            keep.remove(place)
    case = case._replace(keep=tuple(keep))
    while case.seconds > 1 and run(half := case._replace(seconds=case.seconds / 2)).failure:
        case = half
    return case


def tell(case: Case, simulations: Simulations) -> None:
    """Print who did what in a case: the time in virtual seconds, the host, and its log line."""
    print(f"smaller, and it fails too: python -m tests.simulation {words_of(case)}\nits story:", flush=True)
    print(simulations.run(case, log=True), flush=True)


class Simulations:
    """Runs each case in a child process, so that each begins with the same state. Those with a store share a Postgres,
    which starts with the first of them."""

    def __init__(self) -> None:
        self._postgres: ClockedPostgres | None = None

    def __enter__(self) -> Simulations:
        return self

    def __exit__(self, *_: object) -> None:
        if self._postgres is not None:
            self._postgres.close()

    def run(self, case: Case, *, log: bool = False) -> Result:
        """Raises RuntimeError if the process ends without a result. One that hangs says where."""
        scenario = self._scenario(case.mode)
        sys.stdout.flush()
        reading, writing = os.pipe()
        if not (child := os.fork()):
            with _exiting():
                faulthandler.dump_traceback_later(HANGS_SECONDS + case.seconds, exit=True)
                os.write(writing, pickle.dumps(simulate(case, scenario, log=log)))
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            answer = pipe.read()
        _, status = os.waitpid(child, 0)
        if status or not answer:
            raise RuntimeError(f"the run {words_of(case)} ended with {os.waitstatus_to_exitcode(status)}")
        result: Result = pickle.loads(answer)
        return result

    def _scenario(self, mode: str) -> Scenario:
        if mode == "native":
            return native
        if self._postgres is None:
            self._postgres = ClockedPostgres()
            self._postgres.start()
        return partial(stored, FEATURES[mode], self._postgres)


@contextmanager
def _exiting() -> Iterator[None]:
    """The child must not go on as its parent would."""
    try:
        yield
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(2)
    sys.stdout.flush()
    os._exit(0)
