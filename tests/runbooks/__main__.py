"""Carry runbooks out: all, or those that are named. ``--write`` puts what was seen into docs/operations.md."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from tests.runbooks import brokers, destinations, stores
from tests.runbooks.desk import Desk, Notes
from tests.runbooks.page import written

APART = "RUNBOOKS_APART"
"""Set where we are in a mount namespace of our own. For root only."""
PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
RUNBOOKS: Mapping[str, Callable[[Desk], Awaitable[None]]] = {
    "stuck-destination": destinations.stuck_destination,
    "postgres-failover": stores.postgres_failover,
    "backup-and-restore": stores.backup_and_restore,
    "broker-upgrade": brokers.broker_upgrade,
    "flood": destinations.flood,
    "disk-full": stores.disk_full,
    "broker-disk-full": brokers.broker_disk_full,
    "another-broker": brokers.another_broker,
    "disaster-recovery": stores.disaster_recovery,
}


async def carry_out(name: str, notes: Notes) -> None:
    async with Desk.open(notes) as desk:
        await RUNBOOKS[name](desk)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.runbooks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RUNBOOKS)}")
    parser.add_argument("--write", action="store_true", help="write what was seen into docs/operations.md")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - RUNBOOKS.keys():
        parser.error(f"no runbook {sorted(unknown)}; there are {', '.join(RUNBOOKS)}")
    if APART not in os.environ:
        # What is mounted (a disk to fill) goes with the processes, however they end.
        argv = ["unshare", "--mount", sys.executable, "-m", "tests.runbooks", *sys.argv[1:]]
        os.execvpe(argv[0], argv, os.environ | {APART: "1"})
    for name in arguments.names or RUNBOOKS:
        print(f"== {name}", flush=True)
        notes = Notes(told=lambda line: print(line, flush=True))
        asyncio.run(carry_out(name, notes))
        if arguments.write:
            PAGE.write_text(written(PAGE.read_text(), name, notes.lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
