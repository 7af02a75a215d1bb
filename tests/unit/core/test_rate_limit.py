"""The token bucket of a limited route, and the release loop of its lane."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from delayer.core.counters import Counters
from delayer.core.rate_limit import BURST, TokenBucket
from delayer.release.loop import LaneRelease
from tests.support.fakes import Heartbeat, ScriptedLane, ScriptedLive, ScriptedPublisher, due, until


@given(rate=st.floats(0.01, 100_000), steps=st.lists(st.tuples(st.floats(-1, 60), st.integers(0, 2000)), max_size=50))
def test_the_bucket_gives_at_most_the_burst_plus_the_rate(rate: float, steps: list[tuple[float, int]]) -> None:
    now, longest, taken = 0.0, 0.0, 0
    bucket = TokenBucket(rate, now)
    for seconds, wanted in steps:
        now += seconds
        got = bucket.take(wanted, now)
        assert 0 <= got <= wanted
        taken, longest = taken + got, longest + max(seconds, 0.0)
    assert taken <= max(1.0, rate * BURST) + rate * longest + 1e-6 * (1 + taken)


def test_the_bucket_has_a_token_after_the_wait() -> None:
    for rate in (0.1, 1, 7, 1000):
        bucket = TokenBucket(rate, 0.0)
        assert bucket.take(1_000_000, 0.0) == max(1, int(rate * BURST))
        wait = bucket.wait(0.0)
        assert 0 < wait <= max(BURST, 1 / rate)
        assert bucket.take(1, wait + 1e-9) == 1


def test_unused_tokens_return_to_the_bucket() -> None:
    bucket = TokenBucket(100, 0.0)
    assert bucket.take(15, 0.0) == 15
    bucket.give_back(10)
    bucket.give_back(1000)
    assert bucket.take(1000, 0.0) == 20


async def run(live: ScriptedLive, lane: ScriptedLane, settled: int) -> None:
    """Release the lane of a limited route until this many claims are settled."""
    stopping, lane.route = asyncio.Event(), b"slow"
    loop = LaneRelease(lane, ScriptedPublisher(), live, heartbeat=Heartbeat(), counters=Counters())
    task = asyncio.create_task(loop.run(stopping))
    await until(lambda: len(lane.settled) >= settled or task.done())
    stopping.set()
    lane.note_parked(0)
    await task


async def test_a_limited_lane_claims_only_its_tokens() -> None:
    lane = ScriptedLane(claims=[[due(n) for n in range(20)], [due(n) for n in range(10)]])
    began = time.monotonic()
    await run(ScriptedLive(rates={b"slow": 100.0}), lane, 2)
    assert lane.limits[0] == 20
    assert 10 <= lane.limits[1] <= 20
    assert time.monotonic() - began >= 0.09
    assert all(event != "give up" for event in lane.events)


async def test_a_new_limit_counts_from_the_next_claim() -> None:
    live = ScriptedLive()
    lane = ScriptedLane(claims=[[due(1)], [due(2)], [due(3)]])
    limits = [{b"slow": 10.0}, {b"slow": 1000.0}]
    settle = lane.settle

    async def settled(*rows: Any) -> None:
        await settle(*rows)
        live.rates = limits.pop(0) if limits else live.rates

    lane.settle = settled  # type: ignore[method-assign]
    await run(live, lane, 3)
    assert lane.limits == [1000, 2, 200]
