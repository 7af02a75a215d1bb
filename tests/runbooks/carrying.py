"""Carrying steps out and writing down what was seen, for runbooks and for the ways over from other systems."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from tests.runbooks.desk import Desk, Notes
from tests.runbooks.page import written

Steps = Mapping[str, Callable[[Desk], Awaitable[None]]]


def asked(program: str, description: str | None, steps: Steps, page: Path) -> tuple[list[str], bool]:
    """Which of them the command line names (all), and whether what is seen goes into the page."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(steps)}")
    parser.add_argument("--write", action="store_true", help=f"write what was seen into docs/{page.name}")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - steps.keys():
        parser.error(f"no steps of {sorted(unknown)}; there are {', '.join(steps)}")
    return arguments.names or list(steps), arguments.write


def carry_out(name: str, steps: Steps, page: Path | None) -> None:
    """At a desk of its own; what was seen goes into ``page``."""
    print(f"== {name}", flush=True)
    notes = Notes(told=lambda line: print(line, flush=True))
    asyncio.run(_at_a_desk(steps[name], notes))
    if page is not None:
        page.write_text(written(page.read_text(), name, notes.lines))


async def _at_a_desk(work: Callable[[Desk], Awaitable[None]], notes: Notes) -> None:
    async with Desk.open(notes) as desk:
        await work(desk)
