"""Audits report no violation during compactions, restores, exports, cancels, key replacements and full traffic.

AUDIT_MINUTES sets the duration (5 without it; more than 10 need `-o faulthandler_timeout=0`). An audit with a violation
exits with 1, and its report ends the test.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

from delayer.store.admin import actions
from tests.acceptance.own_vhost import delayed
from tests.faults.test_compact_traffic import Jobs
from tests.faults.test_killed_compaction import repeated
from tests.support.ledger import Ledger
from tests.support.place import Place, eventually
from tests.support.raw import Raw
from tests.support.rows import waiting
from tests.support.store import sql

MINUTES = float(os.environ.get("AUDIT_MINUTES") or 5)
pytestmark = [pytest.mark.long, pytest.mark.deadline(60 * MINUTES + 900)]

NEAR_MS, FAR_MS, KEYED_MS = 4_000, 720_000, 86_400_000
PACKED_AFTER_MS, RESTORED_WITHIN_MS = 360_000, 420_000
"""Above restore_ahead, whose minimum is 5 minutes. Restored messages are packed again."""
FEWEST = 50
NEAR, FAR, MOST_FAR = 1_000, 300, 30_000
"""Messages per portion, and the maximum number of far messages in the store."""
KEYS = 40
SETTINGS = {"STORE__RESTORE_AHEAD": "5m", "STORE__HISTORY_DAYS": "2"}
SPARK = ("--master", "local[2]", "--conf", "spark.driver.memory=768m")


@dataclass
class Reports:
    """Commands run on a store under traffic. ``warnings``: of all audits, by rule and subject."""

    place: Place
    path: Path
    done: Counter[str] = field(default_factory=Counter)
    warnings: Counter[tuple[str, str]] = field(default_factory=Counter)

    async def _told(self, *words: str) -> Any:
        """The JSON of a command. Raises RuntimeError with it at a violation."""
        told = json.loads((await self.place.delayer(*words, "--json", **SETTINGS)).splitlines()[-1])
        self.done[" ".join(words[:2])] += 1
        return told

    async def quick(self) -> None:
        self._note(await self._told("audit"))

    async def deep(self) -> None:
        self._note(await self._told("audit", "--deep", "--work", str(self.path / "work"), *SPARK))

    def _note(self, report: Any) -> None:
        self.warnings.update((one["rule"], one["subject"]) for one in report["findings"])

    async def export(self) -> None:
        where = self.path / "backlog"
        words = await self.place.delayer("backlog", "export", str(where), "--json", **SETTINGS)
        assert ds.dataset(where, partitioning="hive").count_rows() == json.loads(words)["messages"]
        self.done["backlog export"] += 1


@dataclass
class Traffic:
    """Messages due in seconds, messages to pack, and messages with keys, each of which replaces the one before."""

    place: Place
    ledger: Ledger
    raw: Raw
    jobs: Jobs
    keyed: int = 0

    def settled(self) -> int:
        """Messages that came back or were cancelled."""
        return self.ledger.account.back + len(self.jobs.gone)

    async def send(self) -> None:
        before = self.settled()
        await self.ledger.publish(NEAR, longest_ms=NEAR_MS)
        await eventually(self.settled, lambda settled: settled >= before + NEAR * 3 // 4, timeout=300)
        if await self.place.rows() < MOST_FAR:
            await self.ledger.publish(FAR, longest_ms=FAR_MS)

    async def replace(self) -> None:
        some = [delayed(f"{n}", KEYED_MS + n, through="delayer.in", under=f"order {n % KEYS}") for n in range(KEYS * 2)]
        await self.raw.publish(*some)
        self.keyed += len(some)
        parked = "SELECT count(*) FROM message WHERE key IS NOT NULL"
        await eventually(lambda: self.place.ask(parked), KEYS.__eq__)


async def test_no_audit_reports_a_violation(vhost: str, store: str, tmp_path: Path) -> None:
    place = await Place("store", vhost, store).declare()
    jobs = Jobs(store, PACKED_AFTER_MS, RESTORED_WITHIN_MS, FEWEST)
    reports = Reports(place, tmp_path)
    async with place.ledger() as ledger, await Raw.connect(vhost) as raw:
        traffic = Traffic(place, ledger, raw, jobs)
        async with place.daemon(**SETTINGS) as one, place.daemon(**SETTINGS) as two:
            await asyncio.gather(one.ready(), two.ready())
            await traffic.replace()
            works = (traffic.send, traffic.replace, jobs.pack, jobs.restore, jobs.cancel)
            async with repeated(*works, reports.quick, reports.deep, reports.export):
                await asyncio.sleep(60 * MINUTES)  # not to wait for anything: this is the length of the test
            while await place.segments():
                await jobs.restore(everything=True)
            await jobs.cancel(at_once=1 << 31)
            async with sql(store) as admin:
                left = [id_ for id_, row in (await waiting(admin)).items() if row.key is not None]
                await actions.cancel(admin, left)
            await ledger.until(lambda: ledger.account.back >= ledger.account.sent - len(jobs.gone), timeout=120)
            await eventually(place.standing, lambda standing: not standing)
            await reports.quick()
            await reports.deep()
            assert [await one.stop(), await two.stop()] == [0, 0]
        verdict = await place.settle_accounts(ledger)
    counters = await place.conserved()
    print(f"{verdict}; {counters}; {dict(reports.done)}; warnings {reports.warnings}")
    assert set(verdict.missing) == set(jobs.gone), "only the cancelled messages are missing"
    assert not verdict.early
    assert not verdict.changed
    assert not verdict.repeats
    assert counters["cancelled"] == len(jobs.gone) + traffic.keyed
    assert counters["restored"] == counters["compacted"] > 0
