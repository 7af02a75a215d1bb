"""The audit judges a replica at the instant of its last replay: messages due since then are not overdue there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from delayer.audit import extract
from delayer.audit.extract import AuditedStore
from delayer.core.secret import SecretUrl
from tests.audit.test_job import audit, violated
from tests.audit.test_reading import execute, fetch, fill
from tests.support.place import eventually
from tests.support.postgres import Postgres
from tests.support.postgres_kinds import Standby
from tests.support.rows import put, row
from tests.support.store import sql

READER = "auditor"
LATE_MS = 58_000
"""A lateness that counts as overdue two seconds later (rules.GRACE_MS)."""


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Postgres, Standby, str]]:
    """A primary, a standby that follows it, and the name of the database. The reader has no special rights."""
    with Postgres() as primary:
        name = primary.add_database()
        fill(primary.url(name), 200)
        with Standby(primary) as standby:
            primary.execute(f"CREATE ROLE {READER} LOGIN")  # the first record that it replays since its start
            primary.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {READER}", database=name)
            yield primary, standby, name


@pytest.fixture
def caught_up(pair: tuple[Postgres, Standby, str]) -> tuple[Postgres, Standby, str]:
    _, standby, _ = pair
    standby.execute("SELECT pg_wal_replay_resume()")
    until(standby.follows)
    return pair


def until(look: object) -> None:
    async def scene() -> None:
        async def once() -> bool:
            return bool(await asyncio.to_thread(look))  # type: ignore[arg-type]

        await eventually(once)

    asyncio.run(scene())


def exported(url: str) -> AuditedStore:
    with extract.hold_snapshot(SecretUrl(url)) as held:
        return held.store


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def replayed_ms(url: str) -> int:
    [(at,)] = fetch(url, "SELECT floor(extract(epoch FROM pg_last_xact_replay_timestamp()) * 1000)::bigint")
    return int(at)


@pytest.mark.parametrize("user", ["postgres", READER])
def test_a_replica_of_an_idle_primary_is_judged_by_now(caught_up: tuple[Postgres, Standby, str], user: str) -> None:
    """The replica knows everything, also long after the last commit."""
    _, standby, name = caught_up
    before = now_ms()
    found = exported(standby.url(name, user=user))
    assert found.behind_ms == 0
    assert found.now_ms >= before > replayed_ms(standby.url(name))


def test_a_lagging_replica_is_judged_by_its_last_replay(
    spark: SparkSession, caught_up: tuple[Postgres, Standby, str]
) -> None:
    primary, standby, name = caught_up
    url = standby.url(name)

    async def park() -> None:
        async with sql(primary.url(name)) as admin:
            await put(admin, [row(900_001, now_ms() - LATE_MS)])

    asyncio.run(park())
    until(standby.follows)
    standby.execute("SELECT pg_wal_replay_pause()")
    until(lambda: fetch(url, "SELECT pg_get_wal_replay_pause_state()") == [("paused",)])
    execute(primary.url(name), "DELETE FROM message WHERE id = 900001")
    until(lambda: fetch(url, "SELECT pg_last_wal_receive_lsn() > pg_last_wal_replay_lsn()") == [(True,)])
    until(lambda: exported(url).behind_ms > 3_000)
    found = exported(url)
    assert found.now_ms == replayed_ms(url)
    assert abs(found.now_ms + found.behind_ms - now_ms()) < 2_000
    report = audit(spark, url)
    assert violated(report) == {}
    assert [one.rule for one in report.findings] == []
    assert (report.totals.waiting, report.store_now_ms) == (201, found.now_ms)
    assert {lane.alive for lane in report.lanes} == {None}, "a replica does not show locks"
    assert report.behind_ms >= found.behind_ms


def test_a_cut_off_replica_is_judged_by_its_last_commit(caught_up: tuple[Postgres, Standby, str]) -> None:
    """It has replayed everything that it received, but it may have missed later commits."""
    primary, standby, name = caught_up
    url = standby.url(name)
    primary.stop()
    try:
        until(lambda: exported(url).behind_ms > 0)
        assert exported(url).now_ms == replayed_ms(url)
    finally:
        primary.start()
    until(lambda: exported(url).behind_ms == 0)
