"""Compaction and bulk restore while daemons and cancels run: every message is accounted for.

Several real jobs run at once, but without Spark: the executors' work runs in threads of this process.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from delayer.audit import compact, restore
from delayer.store.admin import actions
from delayer.store.admin.detail import FoundIn
from tests.support.ledger import Ledger
from tests.support.letters import NUMBER
from tests.support.place import Place, eventually
from tests.support.rows import everything
from tests.support.store import sql

SEED = 4_000
NEAR, FAR = 1_500, 3_000
NEAR_MS, FAR_MS = 4_000, 20_000
PORTIONS, MOST_PORTIONS = 10, 20
PACKED_AFTER_MS = 1_000
OF_A_SEGMENT = 100
RESTORED_WITHIN_MS = 8_000
"""Above the limit of packing: restored messages are packed again, and messages packed late are restored at once."""
ROUNDS = 4
"""The minimum number of rounds for each packer, restorer and canceller; they continue while messages arrive."""
AT_ONCE = 6
"""Messages of one cancel."""


def quiet(*_: object) -> None:
    """Report no progress."""


@dataclass
class Jobs:
    """Jobs on the store of ``url`` during the traffic, and their results."""

    url: str
    after_ms: int = PACKED_AFTER_MS
    within_ms: int = RESTORED_WITHIN_MS
    fewest: int = 0
    """Minimum number of messages per segment."""
    chance: random.Random = field(default_factory=lambda: random.Random(SEED))
    packed: int = 0
    again: int = 0
    """Messages packed by a job that began after the first restore."""
    restored: int = 0
    rounds: int = 0
    """Rounds of packing."""
    gone: dict[int, FoundIn] = field(default_factory=dict)
    """The ledger's numbers of cancelled messages, and where the cancel found them."""

    def enough(self) -> bool:
        """Whether messages were packed again after a restore, and cancelled in both places."""
        return self.again > OF_A_SEGMENT and {FoundIn.WAITING, FoundIn.SEGMENT} <= set(self.gone.values())

    async def pack(self) -> None:
        async with sql(self.url) as admin:
            begun = await admin.fetchval("SELECT coalesce(sum(n), 0) > 0 FROM counter WHERE kind = 'restored'")
        planned = await compact.plan(self.url, self.after_ms, OF_A_SEGMENT, self.fewest)
        work = partial(compact.work, self.url, OF_A_SEGMENT, planned.fewest)
        halves = [asyncio.to_thread(work, planned.windows[of::2]) for of in range(2)]
        done = [one for part in await asyncio.gather(*halves) for one in part]
        assert not [one for one in done if one.lost or one.broken]
        await asyncio.to_thread(compact.finish, self.url, planned, done, 0.0, quiet)
        packed = sum(made.messages for one in done for made in one.made)
        self.packed += packed
        self.rounds += 1
        self.again += packed if begun else 0

    async def restore(self, *, everything: bool = False) -> None:
        done = await restore.run(self.url, await restore.plan(self.url, None if everything else self.within_ms), quiet)
        assert not done.lost, done.lost
        assert not done.broken, done.broken
        self.restored += done.messages

    async def cancel(self, at_once: int = AT_ONCE) -> None:
        """Cancel some messages without a key of a snapshot: each may have moved or left since."""
        async with sql(self.url) as connection:
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                standing = {id_: row for id_, row in (await everything(connection)).items() if row.key is None}
            chosen = self.chance.sample(sorted(standing), min(at_once, len(standing)))
            outcome = await actions.cancel(connection, chosen)
        for one, found in outcome.items():
            if found is not FoundIn.NOWHERE:
                self.gone[NUMBER.unpack_from(standing[one].body)[0]] = found


async def send(ledger: Ledger, jobs: Jobs) -> None:
    """Send messages due in some seconds and in twenty, in portions; a slow machine gets more of them, one a round."""
    for portion in range(MOST_PORTIONS):
        if portion >= PORTIONS:
            if jobs.enough():
                break
            await eventually(lambda seen=jobs.rounds: jobs.rounds > seen, timeout=60)
        await ledger.publish(FAR // PORTIONS, longest_ms=FAR_MS)
        await ledger.publish(NEAR // PORTIONS, longest_ms=NEAR_MS)


@pytest.mark.deadline(150)
async def test_daemons_jobs_and_cancels_at_once(vhost: str, store: str) -> None:
    place = await Place("store", vhost, store).declare()
    jobs = Jobs(store)
    async with place.ledger(SEED) as ledger:
        async with place.daemon() as one, place.daemon() as two:
            await asyncio.gather(one.ready(), two.ready())
            sending = asyncio.create_task(send(ledger, jobs))
            await eventually(place.rows, lambda rows: rows > OF_A_SEGMENT)

            async def again(work: Callable[[], Any]) -> None:
                rounds = 0
                while rounds < ROUNDS or not sending.done():
                    await work()
                    rounds += 1

            actors = [jobs.pack, jobs.pack, jobs.restore, jobs.cancel, jobs.cancel]
            async with asyncio.TaskGroup() as group:
                for actor in actors:
                    group.create_task(again(actor))
            await sending
            while await place.segments():
                await jobs.restore(everything=True)
            await ledger.until(lambda: ledger.account.back >= ledger.account.sent - len(jobs.gone), timeout=60)
            await eventually(place.standing, lambda standing: not standing)
            assert [await one.stop(), await two.stop()] == [0, 0]
        verdict = await place.settle_accounts(ledger)
    print(f"{verdict}; packed {jobs.packed} ({jobs.again}), restored {jobs.restored}, {Counter(jobs.gone.values())}")
    assert set(verdict.missing) == set(jobs.gone), "only the cancelled messages are missing"
    assert not verdict.early
    assert not verdict.changed
    assert not verdict.repeats
    counters = await place.conserved()
    print(counters)
    assert counters["parked"] == counters["released"] + len(jobs.gone)
    assert counters["cancelled"] == len(jobs.gone)
    assert counters["compacted"] == jobs.packed
    assert counters["restored"] == counters["compacted"] >= jobs.restored, "the daemons may restore some too"
    assert jobs.enough()
