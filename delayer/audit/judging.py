"""The rules over Spark's frames. Rows are counted where they lie, tallies meet in one place and are cut to what fits on
a page there; the driver sees some thousand tallies, however many messages there are.

Every function that decides something is one of :mod:`delayer.audit.rules`; here is only the way of rows to them, as
Arrow batches (``mapInArrow``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from pyspark.sql import functions as sql

from delayer.audit import shaping, tallying
from delayer.audit.findings import Report
from delayer.audit.frames import Frames
from delayer.audit.rules import calendar, judge
from delayer.audit.rules.evidence import Evidence
from delayer.audit.rules.message import Context, Lane
from delayer.audit.rules.summary import merged
from delayer.store.status import RESTORED_MS


def run(
    frames: Frames,
    *,
    release_rate: float = calendar.RELEASE_RATE,
    restored_ms: int = RESTORED_MS,
    paced: Mapping[bytes, int] | None = None,
) -> Report:
    """Judge the frames; ``paced`` as in rules.message.Context. Raises ValueError for a release rate that is none;
    Spark's errors."""
    began = time.monotonic()
    facts = frames.facts
    context = Context(facts.now_ms, _intervals(frames), facts.whole, restored_ms, dict(paced or {}))
    evidence = Evidence(merged(tallying.from_rows(_collected(frames, context))))
    lanes = [
        Lane(row.number, row.owner, row.alive) for row in frames.lanes.select("number", "owner", "alive").collect()
    ]
    counters = {(row.lane, row.kind): row.n for row in frames.counters.collect()}
    return judge.report(
        evidence,
        lanes,
        counters,
        context,
        release_rate=release_rate,
        sample=None if facts.whole else facts.sample,
        behind_ms=facts.behind_ms,
        seconds=round(time.monotonic() - began, 3),
    )


def _intervals(frames: Frames) -> dict[str, tuple[int, int]]:
    rows = frames.partitions.where(sql.col("first_ms").isNotNull()).select("name", "first_ms", "after_ms").collect()
    return {row.name: (row.first_ms, row.after_ms) for row in rows}


def _collected(frames: Frames, context: Context) -> list[Any]:
    """The tallies that are left when everything is counted and cut."""
    messages = shaping.messages(frames)
    summary = (
        messages.mapInArrow(tallying.counting(context), tallying.PARTIAL)
        .repartition("kind", "spread", "first", "second")
        .sortWithinPartitions("kind", "number", "first", "second")
        .mapInArrow(tallying.summarizing(context.now_ms), tallying.PARTIAL)
    )
    of_segments = shaping.segments(frames).mapInArrow(tallying.counting_segments(context), tallying.PARTIAL)
    found = summary.unionByName(of_segments)
    # One task: nearly always there is none, and the files say so without being read.
    damaged = frames.damage.coalesce(1).mapInArrow(tallying.counting_damage(context.now_ms), tallying.PARTIAL)
    found = found.unionByName(damaged)
    if context.whole:
        claims = shaping.claims(frames).repartition("key").sortWithinPartitions("key", "source", "id")
        found = found.unionByName(claims.mapInArrow(tallying.judging_keys, tallying.PARTIAL))
    return found.collect()
