"""Faults of one daemon; ``fault.target`` is its index."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from delayer.store.errors import DRIVER_ERRORS
from tests.faults.fault import Fault, Missed, Untouched
from tests.faults.fleet import Fleet, Kept
from tests.support.memory import out_of_memory
from tests.support.place import eventually, stopped

POINT_SECONDS = 8.0
"""Seconds for a daemon to reach its fault point under load; after that it is killed anywhere."""
LANE_SECONDS = 30.0
"""A daemon that hangs this long has lost its lanes to the other, if the other is running."""
SOME = 20
"""Enough messages in its lanes to keep it busy until it has stopped."""
NOTICED_SECONDS = 60.0
"""Seconds within which it notices the loss after it resumes."""
STOP_SECONDS = 10.0
"""The promised limit of a stop."""


def of(fleet: Fleet, fault: Fault) -> Kept:
    """The target, if it is alive."""
    daemon = fleet.daemons[fault.target]
    if not daemon.process.running:
        raise Untouched(f"daemon {daemon.number} does not run")
    return daemon


@asynccontextmanager
async def replaced(daemon: Kept, fault: Fault) -> AsyncIterator[None]:
    """The block stops the daemon on purpose. ``seconds`` later a new process replaces it."""
    async with daemon.meant():
        yield
        await asyncio.sleep(fault.seconds)
        await daemon.start()
    await daemon.ready()


async def killed(fleet: Fleet, fault: Fault) -> None:
    """SIGKILL, and ``seconds`` without it."""
    daemon = of(fleet, fault)
    async with replaced(daemon, fault):
        await daemon.kill()


async def without_memory(fleet: Fleet, fault: Fault) -> None:
    """The kernel kills it because memory is short."""
    daemon = of(fleet, fault)
    async with replaced(daemon, fault):
        await asyncio.to_thread(out_of_memory, daemon.process.pid)
        await daemon.process.wait(timeout=60)


async def told_to_stop(fleet: Fleet, fault: Fault) -> None:
    """SIGTERM in the middle of its work: it stops in time, and with exit code 0."""
    daemon = of(fleet, fault)
    await daemon.ready()
    async with replaced(daemon, fault):
        began = asyncio.get_running_loop().time()
        code = await daemon.process.stop()
        took = asyncio.get_running_loop().time() - began
        if code != 0 or took > STOP_SECONDS:
            fleet.surprises.append(f"daemon {daemon.number} stopped with {code} after {took:.1f} s")


async def hanging(fleet: Fleet, fault: Fault) -> None:
    """SIGSTOP for ``seconds``: another daemon takes its lanes while it still believes it owns them."""
    daemon = of(fleet, fault)
    await daemon.ready()
    watched = fleet.mode == "store" and fault.seconds >= LANE_SECONDS  # a shorter hang loses no lane
    if watched:
        with suppress(AssertionError, *DRIVER_ERRORS):  # the check below then raises Missed
            await eventually(lambda: _some_rows(fleet, daemon), lambda rows: rows == SOME, timeout=POINT_SECONDS)
    before = fleet.told("lane taken"), _losses(daemon)
    daemon.process.signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(fault.seconds)
        adopted = fleet.told("lane taken") - before[0]
    finally:
        daemon.process.signal(signal.SIGCONT)
    if not watched:
        return
    if not adopted:
        raise Missed(f"no other daemon took a lane of daemon {daemon.number} meanwhile")
    await eventually(lambda: _losses(daemon) > before[1], timeout=NOTICED_SECONDS)


async def _some_rows(fleet: Fleet, daemon: Kept) -> int:
    """The number of messages in its lanes, up to SOME."""
    number: int = await fleet.sql(
        "SELECT count(*) FROM (SELECT FROM message WHERE lane IN"
        f" (SELECT number FROM lane WHERE owner LIKE '%:{daemon.process.pid}') LIMIT {SOME}) AS found"
    )
    return number


def _losses(daemon: Kept) -> int:
    """The number of its log lines about lost lanes."""
    return daemon.told["lane lost"] + daemon.told["lane connection broken"]


async def start_active(fleet: Fleet, daemon: Kept, point: str) -> None:
    """Start the target with this fault point, as the active consumer of the intake. A standby reads and parks nothing,
    so the other daemons' connections to the broker are reset, and they queue up behind it."""
    await daemon.kill()
    others = [one for one in fleet.daemons if one is not daemon]
    for one in others:
        await one.broker.refuse()
    try:
        await daemon.start(point)
        with suppress(AssertionError):  # It may reach the point, and die, before it consumes.
            await daemon.process.event("consuming", where=lambda one: one["queue"] == "delays", timeout=LANE_SECONDS)
    finally:
        for one in others:
            await one.broker.accept()


async def dying_at(fleet: Fleet, fault: Fault) -> None:
    """A daemon that kills itself at the point ``detail``, a row of the crash tables."""
    daemon = of(fleet, fault)
    async with replaced(daemon, fault):
        await start_active(fleet, daemon, fault.detail)
        came = True
        try:
            await daemon.process.wait(timeout=POINT_SECONDS)
        except TimeoutError:
            came = False
        await daemon.kill()
    if not came:
        raise Missed(f"daemon {daemon.number} did not come to {fault.detail}")


async def losing_at(fleet: Fleet, fault: Fault) -> None:
    """A daemon that stops at the point ``detail``, while something else of it dies: see LOSSES."""
    daemon = of(fleet, fault)
    point, _, loss = fault.detail.partition(" ")
    async with daemon.meant():
        await start_active(fleet, daemon, f"{point}:stop")
        came = True
        try:
            await stopped(daemon.process, timeout=POINT_SECONDS)
        except TimeoutError:
            came = False
            await daemon.kill()
            await daemon.start()
        else:
            await _lose(fleet, daemon, loss)
            await asyncio.sleep(fault.seconds)
            daemon.process.signal(signal.SIGCONT)
    await daemon.ready()
    if not came:
        raise Missed(f"daemon {daemon.number} did not come to {point}")


LOSSES = ("broker-cut", "store-cut", "broker", "store")


async def _lose(fleet: Fleet, daemon: Kept, loss: str) -> None:
    if loss.endswith("-cut"):
        (daemon.broker if loss == "broker-cut" else daemon.store).cut()
        return
    server = fleet.rabbitmq if loss == "broker" else fleet.postgres
    if loss == "broker":
        await asyncio.to_thread(fleet.rabbitmq.settle)
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)


async def clock_stepped(fleet: Fleet, fault: Fault) -> None:
    """Its host's clock is ``detail`` milliseconds ahead for ``seconds``; the store's clock is right."""
    daemon = of(fleet, fault)
    await daemon.process.event("store connected", timeout=60)
    daemon.clock.set(int(fault.detail))
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        daemon.clock.set(0)
