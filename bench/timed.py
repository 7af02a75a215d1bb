"""`delayer` with a stopwatch: `python bench/timed.py FILE run` writes to FILE how long the parts of each turn of a lane
took, in seconds. Not part of a measurement of rates: the stopwatch itself takes a microsecond for each part."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

from delayer import cli
from delayer.ops import loop
from delayer.services.release import Release
from delayer.store.lane import PostgresLane

PARTS: tuple[tuple[type, str, str], ...] = (
    (PostgresLane, "claim", "claim"),
    (Release, "_send", "publish and confirm"),
    (PostgresLane, "settle", "settle and commit"),
    (Release, "tick", "whole turn"),
)
times: dict[str, list[tuple[float, float]]] = {name: [] for _, _, name in PARTS}


def timed(method: Callable[..., Awaitable[Any]], name: str) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(method)
    async def stopped(*args: Any) -> Any:
        began = time.monotonic()
        found = await method(*args)
        times[name].append((began, time.monotonic() - began))
        return found

    return stopped


def main() -> None:
    output = Path(sys.argv.pop(1))
    for owner, method, name in PARTS:
        setattr(owner, method, timed(getattr(owner, method), name))
    end = loop.end

    def write_and_end(code: int) -> NoReturn:
        output.write_text(json.dumps(times))
        end(code)

    loop.end = write_and_end
    cli.main()


if __name__ == "__main__":
    main()
