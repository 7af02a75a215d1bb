"""`make soak`: SOAK_MINUTES of faults (default 10), SOAK_SEED to repeat a run; --json FILE for the figures.

Exit code 1 if a promise broke; such a run keeps its logs and prints their place.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import uvloop
from rich.console import Console

from tests.soak.report import show, summary, tell
from tests.soak.result import Options, Result
from tests.soak.run import Soak
from tests.support.odd import BUGS
from tests.support.servers import StartFailed


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=float(os.environ.get("SOAK_MINUTES") or 10))
    parser.add_argument("--seed", type=int, default=int(os.environ.get("SOAK_SEED") or random.randrange(1 << 32)))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--keep", action="store_true", help="keep the logs of a good run too")
    parser.add_argument("--bug", choices=BUGS, default="", help="plant one, to see that the soak finds it")
    return parser.parse_args()


async def soaked(options: Options, console: Console) -> Result:
    soak = Soak(options)
    telling = asyncio.create_task(tell(soak, console))
    try:
        return await soak.run()
    finally:
        telling.cancel()
        with suppress(asyncio.CancelledError):
            await telling


def main() -> int:
    arguments = parsed()
    console = Console(highlight=False)
    directory = Path(tempfile.mkdtemp(prefix="delayer-soak-"))
    options = Options(60 * arguments.minutes, arguments.seed, directory, arguments.bug)
    console.print(f"soak: {arguments.minutes:g} minutes, seed {arguments.seed} (SOAK_SEED repeats its faults)")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(soaked(options, console))
    except KeyboardInterrupt:
        console.print("interrupted; everything that was started is stopped")
        shutil.rmtree(directory)
        return 130
    except StartFailed as failed:
        console.print(f"it did not start: {failed}", markup=False)
        return 1
    show(result, console)
    if arguments.json:
        arguments.json.write_text(json.dumps(summary(result), indent=2) + "\n")
    if result.kept and not arguments.keep:
        shutil.rmtree(directory)
    else:
        console.print(f"logs: {directory}", markup=False, soft_wrap=True)
    console.print("every promise kept" if result.kept else "[bold red]a promise broke, or something else went wrong[/]")
    return 0 if result.kept else 1


if __name__ == "__main__":
    sys.exit(main())
