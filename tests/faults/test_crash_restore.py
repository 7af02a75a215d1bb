"""Restoring a segment, step by step: whoever dies there, its messages come once, on time and as they were."""

from __future__ import annotations

import asyncio
import random
import signal
from contextlib import AsyncExitStack

import pytest

from tests.faults.place import Place, eventually, stopped
from tests.faults.scenes import DAEMON, POSTGRES, STORE_CUT, Scenes, check, work_off
from tests.faults.tables import PACKED, RESTORE

SEED = 30_000
MESSAGES = 6_000
OF_A_SEGMENT = 50
KILLS = 6
LONGEST_LIFE = 0.5

deaths = pytest.mark.parametrize("death", [DAEMON, POSTGRES, STORE_CUT])


def played(scenes: Scenes, death: str, name: str) -> None:
    row, outcome = scenes.outcome(death, name)
    check(row, outcome, RESTORE[name].copies[death])
    assert outcome.counters["compacted"] == outcome.counters["restored"] == PACKED, "restored once, whoever died"


@deaths
def test_lock_a_segment_still(restore_scenes: Scenes, death: str) -> None:
    played(restore_scenes, death, "lock of the segment")


@deaths
def test_copy_before_the_deletion_a_segment_again(restore_scenes: Scenes, death: str) -> None:
    played(restore_scenes, death, "copy of its rows")


@deaths
def test_deletion_before_commit_a_segment_again(restore_scenes: Scenes, death: str) -> None:
    played(restore_scenes, death, "deletion of the segment")


@deaths
def test_commit_rows_and_nothing_to_do(restore_scenes: Scenes, death: str) -> None:
    played(restore_scenes, death, "commit of the restore")


@pytest.mark.deadline(150)
async def test_killed_at_random_moments_while_it_restores(vhost: str, store: str) -> None:
    """Each life finds segments, rows that were restored before it, and new messages, and dies with some of each."""
    place = await Place("store", vhost, store).declare()
    chance = random.Random(SEED)
    async with place.ledger(SEED) as ledger:
        async with place.daemon() as daemon:
            await daemon.ready()
            await ledger.publish(MESSAGES, delay_ms=15_000, absolute=True)
            await eventually(place.rows, lambda rows: rows == MESSAGES)
            assert await daemon.stop() == 0, daemon.tail()
        made = await place.compact(OF_A_SEGMENT)
        assert made >= MESSAGES // OF_A_SEGMENT
        for life in range(KILLS):
            await ledger.publish(200, longest_ms=1_000)
            async with place.daemon() as daemon:
                begun = "segment restored" if life % 2 and await place.segments() else "lane taken"
                await daemon.event(begun)
                moment = chance.uniform(0, LONGEST_LIFE)
                print(f"seed {SEED}, life {life}: killed {moment:.3f} s after {begun}")
                await asyncio.sleep(moment)  # not for something to happen: this is the random moment
                daemon.signal(signal.SIGKILL)
                await daemon.wait()
            print(f"in segments: {await place.segments()}, rows: {await place.rows()}, out: {ledger.total()}")
        async with place.daemon() as daemon:
            await ledger.all_back()
            await work_off(place, daemon)
        verdict = await place.settle_accounts(ledger)
    counters = await place.conserved()
    print(verdict, counters)
    verdict.assert_kept(repeats=True)
    assert counters["compacted"] == counters["restored"] == MESSAGES
    assert counters["parked"] == counters["released"]


@pytest.mark.deadline(90)
async def test_another_daemon_restores_the_segment_of_a_hung_one(vhost: str, store: str) -> None:
    """The store ends its transaction after some seconds; the other looks again soon, and not in a minute."""
    place = await Place("store", vhost, store).declare()
    async with place.ledger(SEED + 1) as ledger:
        async with place.daemon(STORE__LANES="1") as daemon:  # one lane, one segment
            await daemon.ready()
            await ledger.publish(PACKED, delay_ms=3_000, absolute=True)
            await eventually(place.rows, lambda rows: rows == PACKED)
            assert await daemon.stop() == 0, daemon.tail()
        assert await place.compact() == 1
        async with AsyncExitStack() as stack:
            hung = await stack.enter_async_context(place.daemon("restore.copied:1:stop"))
            await stopped(hung)
            other = await stack.enter_async_context(place.daemon())
            restored = await other.event("segment restored")
            assert restored["messages"] == PACKED
            await ledger.all_back(timeout=20.0)
            hung.signal(signal.SIGCONT)
            await hung.event("restoring interrupted")
            assert [await hung.stop(), await other.stop()] == [0, 0]
        verdict = await place.settle_accounts(ledger)
    verdict.assert_kept()
    counters = await place.conserved()
    assert counters["restored"] == PACKED
