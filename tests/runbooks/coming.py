"""Coming from another system, and going back to it: the steps of docs/coming-from.md, carried out.

`python -m tests.runbooks.coming [NAME …]`; with ``--write`` what was seen goes into the page. The plugin's needs the
plugin: RUNBOOKS_PLUGINS names the directory that it is in, unpacked or as a file .ez.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from tests.runbooks import old_brokers, old_worlds
from tests.runbooks.desk import Desk, Notes
from tests.runbooks.page import written

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
STEPS: Mapping[str, Callable[[Desk], Awaitable[None]]] = {
    "celery": old_worlds.celery,
    "plugin": old_brokers.plugin,
    "mailerq": old_worlds.mailerq,
    "hold-queues": old_brokers.hold_queues,
}


async def carry_out(name: str, notes: Notes) -> None:
    async with Desk.open(notes) as desk:
        await STEPS[name](desk)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.runbooks.coming", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(STEPS)}")
    parser.add_argument("--write", action="store_true", help="write what was seen into docs/coming-from.md")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - STEPS.keys():
        parser.error(f"no steps of {sorted(unknown)}; there are {', '.join(STEPS)}")
    for name in arguments.names or STEPS:
        if name == "plugin" and old_brokers.PLUGINS not in os.environ:
            print(f"== {name}: left out, {old_brokers.PLUGINS} names no directory with the plugin", flush=True)
            continue
        print(f"== {name}", flush=True)
        notes = Notes(told=lambda line: print(line, flush=True))
        asyncio.run(carry_out(name, notes))
        if arguments.write:
            PAGE.write_text(written(PAGE.read_text(), name, notes.lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
