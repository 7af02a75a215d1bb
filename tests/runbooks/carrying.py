"""Carrying steps out and printing what was seen, for runbooks and for the ways over from other systems."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Mapping

from tests.runbooks.desk import Desk, Notes

Steps = Mapping[str, Callable[[Desk], Awaitable[None]]]


def asked(program: str, description: str | None, steps: Steps) -> list[str]:
    """Which of them the command line names; all of them without a name."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(steps)}")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - steps.keys():
        parser.error(f"no steps of {sorted(unknown)}; there are {', '.join(steps)}")
    return arguments.names or list(steps)


def carry_out(name: str, steps: Steps) -> None:
    """At a desk of its own."""
    print(f"== {name}", flush=True)
    notes = Notes(told=lambda line: print(line, flush=True))
    asyncio.run(_at_a_desk(steps[name], notes))


async def _at_a_desk(work: Callable[[Desk], Awaitable[None]], notes: Notes) -> None:
    async with Desk.open(notes) as desk:
        await work(desk)
