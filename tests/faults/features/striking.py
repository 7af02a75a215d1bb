"""Common parts of all features: a handful of faults, the traffic during them, and the end."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from tests.faults.doomed import emptied
from tests.faults.fault import Fault, Missed, Untouched
from tests.faults.fleet import Fleet
from tests.faults.injections.daemons import LANE_SECONDS
from tests.faults.kinds import inject
from tests.support.account import Account, Window
from tests.support.daemon import PROGRAM
from tests.support.flow import flowing
from tests.support.ledger import Ledger
from tests.support.letters import NUMBER
from tests.support.place import eventually
from tests.support.servers import Postgres, RabbitMQ

HEALING: Final = 120.0
"""Seconds that a fault may take longer than it lasts."""
HANGS: Final = 6.0
"""Seconds after which the lanes of a hung daemon are free."""
REACH: Final = 3
"""The exit code of a command that could not reach the broker or the store."""


def handful(seed: int, *, daemons: int = 2, adopted: bool = False, store: bool = True) -> list[Fault]:
    """Faults in an order reproducible from the seed, each at a random daemon. ``adopted``: one hangs until the other
    takes its lanes. ``store``: whether some faults break the store."""
    chance = random.Random(seed)
    faults = [
        Fault("daemon killed", chance.randrange(daemons), 0.3),
        Fault("daemon hangs", chance.randrange(daemons), LANE_SECONDS if adopted else HANGS),
        Fault("broker killed", 0, 0.3),
        Fault("network cut", chance.randrange(daemons), 0.0, "broker"),
    ]
    if store:
        faults += [Fault("store killed", 0, 0.3), Fault("network cut", chance.randrange(daemons), 0.0, "store")]
    chance.shuffle(faults)
    return faults


@asynccontextmanager
async def opened(
    rabbitmq: RabbitMQ, postgres: Postgres, directory: Path, kind: type[Ledger] = Ledger, **more: Any
) -> AsyncIterator[Fleet]:
    """A fleet whose account knows the times of its faults."""
    async with Fleet.open(rabbitmq, postgres, directory, ledger=kind, **{"mode": "store", **more}) as fleet:
        await fleet.settled()
        fleet.ledger.account.windows = []
        yield fleet


async def strike(
    fleet: Fleet, faults: Iterable[Fault], *, rate: int = 0, longest_ms: int = 2_000, delay_ms: int | None = None
) -> int:
    """Inject the faults one after another, each into a working fleet, while the ledger publishes. Return how many
    broke something."""
    if not rate:
        return await _strike(fleet, faults)
    async with flowing(fleet.ledger, rate, longest_ms=longest_ms, delay_ms=delay_ms):
        return await _strike(fleet, faults)


async def _strike(fleet: Fleet, faults: Iterable[Fault]) -> int:
    struck, windows = 0, fleet.ledger.account.windows
    assert windows is not None
    for fault in faults:
        begin_ms = time.time() * 1000
        try:
            async with asyncio.timeout(fault.seconds + HEALING):
                await inject(fleet, fault)
            struck += 1
        except Missed as missed:
            print(f"{fault} met nothing: {missed}")
            if isinstance(missed, Untouched):
                continue
        windows.append(Window(begin_ms, time.time() * 1000))
        await fleet.settled()
    return struck


def excused(account: Account, number: int, until_ms: float, after_ms: float = 0.0) -> bool:
    """Whether a fault happened between the sending of a message and ``until_ms``, or up to ``after_ms`` earlier."""
    assert account.windows is not None
    if number in account.published_twice:
        return True
    sent_ms = account.owed(number).sent_ms
    return any(window.begin_ms <= until_ms and window.end_ms + after_ms >= sent_ms for window in account.windows)


@asynccontextmanager
async def stopped(fleet: Fleet) -> AsyncIterator[None]:
    """Stop all daemons by SIGTERM for the block, and start them again after it."""
    for daemon in fleet.daemons:
        async with daemon.meant():
            await daemon.ready()
            assert await daemon.process.stop() == 0, daemon.process.tail(5)
    yield
    for daemon in fleet.daemons:
        async with daemon.meant():
            await daemon.start()
    await fleet.settled()


async def rested(fleet: Fleet, empty: Callable[[], Awaitable[bool]]) -> None:
    """Wait until the fleet is ``empty``, even with its daemons stopped: until then, messages a daemon is working on are
    in no count."""
    while True:
        await eventually(empty, bool, timeout=120)
        async with stopped(fleet):
            left = not await empty()
        if not left:
            return await fleet.ledger.drained()


async def taken_in(fleet: Fleet) -> None:
    """Wait until everything that was published is read and settled."""

    async def read() -> bool:
        return await fleet.ledger.depths("delays") == {"delays": 0}

    await rested(fleet, read)


async def nothing_left(fleet: Fleet) -> None:
    """Wait until no message waits to be read or to be due, and the ledger has received every delivery."""

    async def gone() -> bool:
        return not set(await fleet.place.standing()) - fleet.aside

    await rested(fleet, gone)


async def commanded(fleet: Fleet, *arguments: str) -> tuple[int, str]:
    """Run a command of the command line, past the proxies. Return its exit code and its output."""
    process = await asyncio.create_subprocess_exec(
        *PROGRAM, "--config", str(fleet.config),
        "--set", f"store.url={fleet.postgres.url(fleet.database)}",
        "--set", f"broker.url={fleet.rabbitmq.url(fleet.vhost)}", *arguments,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, complaint = await process.communicate()
    assert process.returncode is not None
    assert process.returncode in (0, 1, REACH), f"{arguments}: exit {process.returncode}\n{complaint.decode()}"
    return process.returncode, output.decode()


async def due_from_now(fleet: Fleet, seconds: float) -> None:
    """Make everything in the store due in this many seconds with `delayer reschedule`, and change the ledger to
    match."""
    due_ms = int((time.time() + seconds) * 1000)
    at = datetime.fromtimestamp(due_ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S") + f".{due_ms % 1000:03d}Z"
    fleet.ledger.account.reschedule(due_ms)
    while (await commanded(fleet, "reschedule", "--all", "--yes", "--at", at))[0]:
        pass  # the command can be repeated


async def numbers_in(fleet: Fleet, queue: str) -> list[int]:
    """Numbers of the ledger's messages in one queue."""
    found = [one.delivery.body for one in (await emptied(fleet, queue)).arrivals]
    return [NUMBER.unpack_from(body)[0] for body in found if len(body) >= NUMBER.size]


async def finished(fleet: Fleet) -> dict[str, int]:
    """The end of every run: no message is left anywhere, nothing unexpected happened, and the counters match the
    rows."""
    await fleet.finish()
    standing = await fleet.place.standing()
    assert not set(standing) - {"delays.refused"}, f"left standing: {standing}"
    assert not fleet.surprises, fleet.surprises
    counters = await fleet.place.conserved()
    assert counters["parked"] == counters["released"] + counters["cancelled"], counters
    return counters
