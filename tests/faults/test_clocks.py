"""Wrong clocks, and clocks that are set. With a store its clock decides; without one, the later of two clocks. No
message is early by the deciding clock."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest

from tests.support.daemon import DaemonProcess
from tests.support.odd import Clock, program
from tests.support.place import Place, eventually
from tests.support.servers import Postgres

SEED = 8_000
HOUR_MS = 3_600_000
BACK_MS = 2_000

# In a schema that is searched before pg_catalog: every session of this database reads this clock.
_SKEW = """
CREATE TABLE skew (ms bigint);
INSERT INTO skew VALUES (0);
CREATE FUNCTION clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE
    AS 'SELECT pg_catalog.clock_timestamp() + ms * interval ''1 ms'' FROM public.skew';
CREATE FUNCTION statement_timestamp() RETURNS timestamptz LANGUAGE sql STABLE
    AS 'SELECT pg_catalog.statement_timestamp() + ms * interval ''1 ms'' FROM public.skew';
CREATE FUNCTION now() RETURNS timestamptz LANGUAGE sql STABLE
    AS 'SELECT pg_catalog.now() + ms * interval ''1 ms'' FROM public.skew';
"""


@asynccontextmanager
async def odd_daemon(place: Place, clock: Clock) -> AsyncIterator[DaemonProcess]:
    """A daemon whose host's clock can be set."""
    async with DaemonProcess(place.environ, program=program(clock=clock.path)) as daemon:
        place.daemons.append(daemon)
        yield await daemon.ready()


async def in_the_cascade(place: Place) -> int:
    """The number of messages that the daemon has sent into the cascade."""
    return sum(depth for name, depth in (await place.standing()).items() if "delay-level" in name)


@pytest.mark.parametrize("ahead_ms", [HOUR_MS, -HOUR_MS])
async def test_with_a_store_the_hosts_clock_does_not_matter(
    ahead_ms: int, vhost: str, store: str, tmp_path: Path
) -> None:
    """Wrong from the start, or set while messages wait: messages are delivered when due, even with relative delays."""
    clock = Clock(tmp_path / "clock")
    clock.set(ahead_ms)
    place = await Place("store", vhost, store).declare()
    async with place.ledger(SEED) as ledger, odd_daemon(place, clock):
        await ledger.publish(500, longest_ms=1_500)
        clock.set(0)
        await ledger.publish(500, longest_ms=1_500)
        await ledger.until(lambda: ledger.total() > 250)
        clock.set(ahead_ms)
        await ledger.publish(500, longest_ms=1_500)
        await place.ended(ledger)
        late_ms = [one[0].at_ms - one[0].due_ms for one in ledger.arrivals.values()]
    assert max(late_ms) < 30_000, "a lane sleeps for up to a minute"


async def test_without_a_store_setting_the_clock_does_not_make_messages_early(vhost: str, tmp_path: Path) -> None:
    """The cascade measures durations. After a clock is set forward, messages are on time. After it is set back, the
    daemon considers them an hour early and sends them through again: late by its clock, never lost."""
    clock = Clock(tmp_path / "clock")
    place = await Place("native", vhost, strategy="cascade").declare()
    async with place.ledger(SEED + 1) as ledger, odd_daemon(place, clock) as daemon:
        await ledger.publish(300, delay_ms=6_000)
        await eventually(lambda: in_the_cascade(place), lambda count: count == 300)
        clock.set(HOUR_MS)
        await ledger.all_back()
        ledger.verdict().assert_kept()
        clock.set(0)
        await ledger.publish(300, delay_ms=6_000)
        await eventually(lambda: in_the_cascade(place), lambda count: count == 300)
        clock.set(-HOUR_MS)
        await eventually(place.standing, lambda standing: "delayer.delay-level-11" in standing)
        await eventually(place.standing, lambda standing: sum(standing.values()) == 300)
        assert ledger.total() == 300
        assert await daemon.stop() == 0


async def test_messages_wait_for_a_store_clock_set_back_at_a_failover(
    postgres: Postgres, vhost: str, store: str
) -> None:
    """All sessions are closed, and new sessions find a clock two seconds behind. Messages due by the old clock wait
    until the new clock reaches their due instant."""
    connection = await asyncpg.connect(store)
    await connection.execute(_SKEW)
    name = store.rpartition("/")[2]
    await connection.execute(f'ALTER DATABASE "{name}" SET search_path = public, pg_catalog')
    place = await Place("store", vhost, store).declare()
    try:
        async with place.ledger(SEED + 2) as ledger, place.working() as daemon:
            await ledger.publish(1_000, longest_ms=6_000, absolute=True)
            await ledger.until(lambda: ledger.total() > 300)
            await connection.execute("UPDATE public.skew SET ms = $1", -BACK_MS)
            set_ms = time.time() * 1000
            await connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'delayer%'"
                " AND datname = current_database()"
            )
            await ledger.publish(300, longest_ms=1_000, absolute=False)
            await ledger.all_back()
            assert await daemon.stop() == 0
            verdict = await place.settle_accounts(ledger)
            arrivals = [one[0] for one in ledger.arrivals.values()]
    finally:
        await connection.close()
    assert not verdict.missing
    assert not verdict.changed
    # A release that began before the change of the clock may end after it.
    after = [one for one in arrivals if one.at_ms > set_ms + 1_000]
    assert len(after) > 500
    early = [one for one in after if one.at_ms - BACK_MS < one.due_ms]
    assert not early, f"{len(early)} of {len(after)} early by the store's clock, such as {early[0]}"
