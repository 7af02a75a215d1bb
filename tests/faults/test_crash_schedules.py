"""The crash table of schedules: a daemon dies in the release of an occurrence, alone or next to another daemon, or an
operator's process dies in a change. No occurrence is lost, and none comes twice but those that were being released."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import unquote

import pytest

from delayer.core.units import HOUR_MS
from delayer.schedule.occurrence import message_id
from delayer.schedule.rhythm import Every
from delayer.schedule.schedule import ScheduleState
from delayer.store.schedules import changes
from tests.faults.scenes import ONCE, PERHAPS_TWICE, Copies
from tests.faults.tables import CHANGED, SCHEDULE
from tests.support.daemon import DaemonProcess
from tests.support.odd import Clock, program
from tests.support.operating import perform
from tests.support.place import Place, eventually, killed_by_fault, stopped
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitMQ
from tests.support.schedules import OccurrenceInbox, check_waiting, record, schedule
from tests.support.store import sql

PERIOD_MS = 1_000
NAMES = [f"s{n}" for n in range(8)]
"""In both lanes, so that each of two daemons releases some."""
pytestmark = pytest.mark.deadline(120)


@asynccontextmanager
async def ticking(place: Place, *, copies: Copies) -> AsyncIterator[OccurrenceInbox]:
    """Schedules that fire every second, and their inbox. At the end each occurrence has come as often as ``copies``
    allow, and the store is consistent. A caller that stops the daemons leaves one to release what is left."""
    assert place.store is not None
    async with sql(place.store) as admin, OccurrenceInbox.open(place) as inbox:
        wanted = [schedule(name, rhythm=Every(PERIOD_MS), catch_up=1_000) for name in NAMES]
        await changes.apply(admin, wanted, who="test")
        first = {name: (await record(admin, name)).waiting_ms or 0 for name in NAMES}
        yield inbox
        owed = set()
        for name in NAMES:
            over = await check_waiting(admin, name)
            owed |= {(name, at_ms) for at_ms in range(first[name], (over.settled_ms or 0) + 1, PERIOD_MS)}
            assert over.missed == 0
            ids = {at_ms: message_id(over.schedule.id, at_ms).encode() for one, at_ms in owed if one == name}
            assert all({one.message_id for one in inbox.came[name, at_ms]} == {id_} for at_ms, id_ in ids.items()), (
                "an occurrence is lost, or has another message id"
            )
        assert set(inbox.came) == owed
        counts = {due: len(came) for due, came in inbox.came.items()}
        assert copies[0] <= min(counts.values()) and max(counts.values()) <= copies[1], counts
        assert len({at_ms for (_, at_ms), number in counts.items() if number > 1}) <= 2, "of one moment"
        assert all(len({one.id for one in came}) == 1 for came in inbox.came.values())


async def go_on(inbox: OccurrenceInbox, seconds: int = 3) -> None:
    """Wait until all schedules went on for so long, from when each has come."""
    before = await eventually(lambda: inbox.last(NAMES), lambda last: last > 0, timeout=60)
    await eventually(lambda: inbox.last(NAMES), lambda last: last >= before + seconds * PERIOD_MS, timeout=60)


async def pause(place: Place) -> None:
    """Pause all schedules, and wait until what was due has left."""
    assert place.store is not None
    async with sql(place.store) as admin:
        for name in NAMES:
            await changes.pause(admin, name, who="test")
    await eventually(place.standing, lambda standing: not standing, timeout=60)


@pytest.mark.parametrize("standby", [False, True], ids=["alone", "next to another daemon"])
@pytest.mark.parametrize("name", SCHEDULE)
async def test_a_daemon_dies_in_the_release_of_an_occurrence(vhost: str, store: str, name: str, standby: bool) -> None:
    row = SCHEDULE[name]
    place = await Place("store", vhost, store).declare()
    if not standby:  # With one lane, no other claim is in flight.
        await place.ask("DELETE FROM lane WHERE number > 1")
    async with (
        ticking(place, copies=PERHAPS_TWICE if standby else row.copies) as inbox,
        place.daemon(row.fault) as doomed,
    ):
        if standby:
            async with place.daemon() as other:
                await killed_by_fault(doomed)
                await go_on(inbox)
                await pause(place)
                assert await other.stop() == 0, other.tail()
        else:
            await killed_by_fault(doomed)
            async with place.working():
                await go_on(inbox)
                await pause(place)
        await place.conserved()


@pytest.mark.parametrize("lost", ["store", "broker"])
@pytest.mark.parametrize("point", ["release.claimed", "release.published", "schedule.copied", "release.committed"])
async def test_the_daemon_loses_a_server_in_the_release_of_an_occurrence(
    rabbitmq: RabbitMQ, vhost: str, store: str, point: str, lost: str
) -> None:
    """It stops at the point, its connections are reset, and it goes on."""
    port = int(store.rpartition(":")[2].partition("/")[0])
    async with Proxy(port) as to_store, Proxy(rabbitmq.port) as to_broker:
        via_store = store.replace(f":{port}/", f":{to_store.port}/")
        via_broker = rabbitmq.url(unquote(vhost.rpartition("/")[2]), port=to_broker.port)
        place = await Place("store", vhost, store, via_store=via_store, via_broker=via_broker).declare()
        async with ticking(place, copies=PERHAPS_TWICE) as inbox, place.daemon(f"{point}:3:stop") as daemon:
            await stopped(daemon)
            (to_store if lost == "store" else to_broker).cut()
            daemon.signal(signal.SIGCONT)
            await go_on(inbox)
            await pause(place)
            assert await daemon.stop() == 0, daemon.tail()
            await place.conserved()


@pytest.mark.parametrize(("change", "point"), CHANGED)
async def test_an_operator_dies_in_a_change(vhost: str, store: str, change: str, point: str) -> None:
    place = await Place("store", vhost, store).declare()
    async with ticking(place, copies=ONCE) as inbox, place.working():
        await go_on(inbox, 1)
        assert await perform(store, change, "s0", f"{point}:1") == -signal.SIGKILL
        if change == "pause":
            async with sql(store) as admin:
                assert (await record(admin, "s0")).state is ScheduleState.PAUSED
                await changes.resume(admin, "s0", who="test")
        else:
            await go_on(inbox)
            bodies = {one.body for (name, due), came in inbox.came.items() for one in came if due == inbox.last(NAMES)}
            assert bodies == ({b"tick", b"edited"} if CHANGED[change, point] else {b"tick"})
        await pause(place)
        await place.conserved()


async def test_a_host_s_clock_that_is_set_changes_nothing(vhost: str, store: str, tmp_path: Path) -> None:
    """Postgres decides what is due, late or missed."""
    clock = Clock(tmp_path / "clock")
    clock.set(HOUR_MS)
    place = await Place("store", vhost, store).declare()
    async with (
        ticking(place, copies=ONCE) as inbox,
        DaemonProcess(place.environ, program=program(clock=clock.path)) as daemon,
    ):
        for ahead_ms in (-HOUR_MS, 0, HOUR_MS):
            await go_on(inbox, 2)
            clock.set(ahead_ms)
        await go_on(inbox, 2)
        await pause(place)
        assert await daemon.stop() == 0, daemon.tail()
        await place.conserved()
