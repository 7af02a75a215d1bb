"""How long it takes to look at a store with a full backlog, and to act on one message of it: from the opening of a
connection to the answer; as an operator waits for it, by the command line; and by the page of a running daemon.
The command line has its configuration in a file and its byte code written, as it is installed.

Bare ids are measured beside tokens (ID@DUE): the first read the index of every partition.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import time
from collections.abc import Awaitable, Callable
from typing import Any

from bench.figures import median
from bench.run import Bench
from bench.servers import IN, Place
from delayer.core.filters import Filter, Token
from delayer.services import reading
from delayer.store import acting, acts, listing, showing
from delayer.store.listing import BEGINNING
from delayer.store.partitions import DAY_MS
from delayer.store.rescheduling import When
from delayer.store.status import overview
from tests.rig.daemon import EXECUTABLE
from tests.rig.web import Web

TURNS = 15
PAGE = 50
UNTOUCHED = PAGE - 3 * TURNS
"""Of the later page: the others are moved, cancelled, and cancelled by the command line."""
LATE_DAYS = 30
"""How far into the backlog the later pages are."""


async def looked(url: str, wanted: Filter, after: tuple[int, int] = BEGINNING) -> list[listing.Entry]:
    """A page, as `delayer list` reads it."""
    async with listing.looking(url, "bench") as connection:
        found = await listing.find(connection, wanted, reading.header_test(wanted), PAGE, after)
        return await listing.entries(connection, found)


async def acted(url: str, do: acting.Do, token: Token) -> None:
    """One message, as `delayer cancel` and `reschedule` do it."""
    async with acting.acting(url, "bench") as connection:
        act = await acts.begin(connection, "bench", "bench", {})
        await acting.named(connection, do, [token], act)


async def shown(url: str, token: Token) -> None:
    async with listing.looking(url, "bench") as connection:
        await showing.show(connection, token)


async def timed(work: Callable[[], Awaitable[Any]]) -> float:
    began = time.monotonic()
    await work()
    return (time.monotonic() - began) * 1000


async def run(bench: Bench) -> None:
    rows = bench.options.backlog
    place = await bench.place(rows)
    url = place.store_url
    late_us = (int(time.time() * 1000) + LATE_DAYS * DAY_MS) * 1000
    late = await looked(url, Filter(), (late_us, 0))
    names = [entry.place.token for entry in late]
    random.Random(1).shuffle(names)
    late_ms = late_us // 1000
    questions: dict[str, Callable[[int], Awaitable[Any]]] = {
        "status": lambda _: overview(url),
        "list, first page": lambda _: looked(url, Filter()),
        "list, a later page": lambda _: looked(url, Filter(), (late_us, 0)),
        "list by due instant": lambda _: looked(url, Filter(due_from_ms=late_ms, due_before_ms=late_ms + 60_000)),
        "list by key": lambda _: looked(url, Filter(key=b"nobody's")),
        "list by route": lambda _: looked(url, Filter(route=IN.encode())),
        "list by a route of nobody (bounded)": lambda _: looked(url, Filter(route=b"nobody")),
        "list by a header of nobody (bounded)": lambda _: looked(url, Filter(headers=((b"x-delay", "no"),))),
        "show": lambda turn: shown(url, names[turn]),
        "reschedule": lambda turn: acted(url, acting.rescheduler(When(by_ms=1)), names[turn]),
        "cancel": lambda turn: acted(url, acting.canceller(), names[TURNS + turn]),
        "cancel what is gone": lambda turn: acted(url, acting.canceller(), names[TURNS + turn]),
    }
    for name, ask in questions.items():
        bench.say(name)
        times = [await timed(lambda turn=turn, ask=ask: ask(turn)) for turn in range(TURNS)]  # type: ignore[misc]
        bench.add(name, median(times), "ms", backlog=rows)
        bench.add(f"{name}, slowest", max(times), "ms", backlog=rows)
    bench.say("show, by the id alone")
    bare = [await timed(lambda turn=turn: shown(url, Token(names[-turn].id))) for turn in range(1, 4)]  # type: ignore[misc]
    bench.add("show, by the id alone", median(bare), "ms", backlog=rows)
    commands: dict[str, Callable[[int], list[str]]] = {
        "--version": lambda _: [],
        "status": lambda _: [],
        "list": lambda _: [],
        "show": lambda turn: [str(names[-1 - turn % UNTOUCHED])],
        "cancel": lambda turn: [str(names[2 * TURNS + turn])],
    }
    for verb, given in commands.items():
        await processes(bench, place, f"`delayer {verb}`", lambda turn, verb=verb, given=given: [verb, *given(turn)])  # type: ignore[misc]
    await paged(bench, place, f"/message/{names[-2]}", late_us)


async def paged(bench: Bench, place: Place, message: str, late_us: int) -> None:
    """What a browser and Prometheus wait for. The first one who asks for figures of the backlog has it counted."""
    rows = bench.options.backlog
    async with place.daemon(HTTP__LISTEN="127.0.0.1:0") as daemon:
        web = await Web.of(await daemon.ready())
        asked = ["--set", f"http.listen={web.address}", "status"]
        await processes(bench, place, "`delayer status`, beside a daemon", lambda _: asked)

        async def answered(path: str) -> None:
            assert (await web.get(path)).status == 200, path

        counted = await timed(lambda: answered("/metrics"))
        bench.add("GET /metrics, first (counts the backlog)", counted, "ms", backlog=rows)
        for path, name in (
            ("/metrics", "/metrics"), ("/", "/"), ("/waiting", "/waiting"), (message, "/message/ID"),
            (f"/waiting?after={late_us}.0", "/waiting, a later page"), ("/health/ready", "/health/ready"),
        ):  # fmt: skip
            bench.say(f"GET {name}")
            times = [await timed(lambda path=path: answered(path)) for _ in range(TURNS)]  # type: ignore[misc]
            bench.add(f"GET {name}", median(times), "ms", backlog=rows)
            bench.add(f"GET {name}, slowest", max(times), "ms", backlog=rows)


async def processes(bench: Bench, place: Place, name: str, line: Callable[[int], list[str]]) -> None:
    bench.say(name)
    times = [await timed(lambda turn=turn: command(place, *line(turn))) for turn in range(TURNS)]  # type: ignore[misc]
    bench.add(name, median(times), "ms", backlog=bench.options.backlog)
    bench.add(f"{name}, slowest", max(times), "ms", backlog=bench.options.backlog)


async def command(place: Place, *arguments: str) -> None:
    """A whole process, the interpreter's start included."""
    line = [EXECUTABLE, "--config", place.config, *arguments]
    done = await asyncio.to_thread(subprocess.run, line, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
