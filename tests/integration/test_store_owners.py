"""A daemon that was started before the store knew segments restores none: compaction waits until it is gone."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from delayer.audit import compact
from delayer.audit.errors import DaemonsOutdated
from delayer.cli import cli
from delayer.store import owners, session
from delayer.store.partitions import DAY_MS
from tests.conformance.store_contract import owned, parcel
from tests.integration.test_store_lane import opened, sql

WEEK_MS = 7 * DAY_MS


@pytest.mark.parametrize(
    ("application", "schema"),
    [
        ("delayer lane 7", ""),
        ("delayer lane 7, schema 0001", "0001"),
        ("delayer lane 12, schema 0002", "0002"),
        ("delayer lane 7, schema 0002 ", ""),
        ("", ""),
    ],
)
def test_what_a_session_says(application: str, schema: str) -> None:
    assert owners.schema_of(application) == schema


def test_ours_says_that_it_restores() -> None:
    assert owners.schema_of(owners.application_of(3)) >= owners.SEGMENTS


@pytest.mark.parametrize("application", ["delayer lane 7", "delayer lane 7, schema 0001"])
async def test_compaction_refuses_while_an_old_daemon_owns_a_lane(database: str, application: str) -> None:
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        await store.park(lane, [parcel(store.now_ms() + 10 * DAY_MS)], [])
        assert (await compact.plan(database, WEEK_MS, 100)).rows == 1, "ours are no reason"
        old = await session.connect(database, application)
        try:
            await old.execute("SELECT pg_advisory_lock('lane'::regclass::oid::int, 7)")
            with pytest.raises(DaemonsOutdated, match=r"own lanes \(7\)"):
                await compact.plan(database, WEEK_MS, 100)
            assert await admin.fetchval("SELECT count(*) FROM segment") == 0
        finally:
            await session.close(old)
        assert (await compact.plan(database, WEEK_MS, 100)).rows == 1


def test_it_is_exit_1_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: object) -> None:
        raise DaemonsOutdated([3, 7])

    monkeypatch.setattr(compact, "plan", refused)
    result = CliRunner().invoke(cli, ["compact"], prog_name="delayer")
    assert result.exit_code == 1
    assert "(3, 7)" in result.output
    assert "restart every daemon" in result.output
