"""The rules over Spark's frames. Rows are counted where they lie, tallies meet in one place and are cut to what fits on
a page there; the driver sees some thousand tallies, however many messages there are.

Every function that decides something is one of :mod:`delayer.audit.rules`; here is only the way of rows to them, as
Arrow batches (``mapInArrow``).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sql

from delayer.audit.findings import Report
from delayer.audit.frames import SEGMENT, Frames
from delayer.audit.rules import checks, judge
from delayer.audit.rules.checks import Claim, Damage, judged_claims
from delayer.audit.rules.counting import counted, counted_segments, merged, spread, summarized
from delayer.audit.rules.model import (
    HELD,
    PACKED,
    WAITING,
    Context,
    Evidence,
    Key,
    Lane,
    Message,
    Partial,
    Segment,
    Tally,
)
from delayer.store.admin.stats import RESTORED_MS


def message_rows(frames: Frames) -> DataFrame:
    """Waiting, packed and held messages, with the columns of :class:`Message`."""
    packed = sql.col("origin") == SEGMENT
    kinds = (
        (WAITING, frames.messages.where(~packed)),
        (PACKED, frames.messages.where(packed)),
        (HELD, frames.held),
    )
    return functools.reduce(DataFrame.unionByName, (_with_every_column(frame, where) for where, frame in kinds))


def _with_every_column(frame: DataFrame, where: str) -> DataFrame:
    """The columns of :class:`Message`; those that the frame has not are null."""
    made = {"where": sql.lit(where), "home": sql.col("partition") if where == WAITING else _nothing("string")}
    if "retry_ms" not in frame.columns:
        made["retry_ms"] = _nothing("bigint")
    return frame.select(*(made.get(name, sql.col(name)).alias(name) for name in Message._fields))


def _nothing(type_: str) -> Column:
    return sql.lit(None).cast(type_)


def segment_rows(frames: Frames) -> DataFrame:
    """Segments, and tombstones of segments that are not there, with the columns of :class:`Segment`."""
    tombstones = frames.tombstones.groupBy("segment").agg(sql.count(sql.lit(1)).alias("tombstones"))
    joined = frames.segments.join(tombstones, sql.col("id") == sql.col("segment"), "full_outer")
    found = {"first_due_ms", "last_due_ms", "first_id", "last_id", "messages", "cancelled", "raw_bytes", "packed_bytes"}
    missing = {*found, "tombstones"}

    def column(name: str) -> Column:
        if name == "id":
            return sql.coalesce("id", "segment").alias(name)
        return sql.coalesce(name, sql.lit(0)).alias(name) if name in missing else sql.col(name)

    return joined.select(*(column(name) for name in Segment._fields))


def claim_rows(frames: Frames) -> DataFrame:
    """What names a key, with the columns of :class:`Claim`. No segment has any."""

    def of(frame: DataFrame, source: int) -> DataFrame:
        return frame.where(sql.col("key").isNotNull()).withColumn("source", sql.lit(source)).select(*Claim._fields)

    return (
        of(frames.keys, checks.POINTER)
        .unionByName(of(frames.held, checks.CLAIM_HELD))
        .unionByName(of(frames.messages, checks.CLAIM_WAITING))
    )


_PARTIAL: Final = pa.schema(
    [
        ("kind", pa.string()),
        ("spread", pa.int64()),
        ("number", pa.int64()),
        ("first", pa.binary()),
        ("second", pa.binary()),
        ("messages", pa.int64()),
        ("size", pa.int64()),
        ("first_due_ms", pa.int64()),
        ("last_due_ms", pa.int64()),
        ("examples", pa.list_(pa.int64())),
    ]
)
PARTIAL: Final = (
    "kind string, spread bigint, number bigint, first binary, second binary,"
    " messages bigint, size bigint, first_due_ms bigint, last_due_ms bigint, examples array<bigint>"
)
"""The same for Spark: a tally under its key, and what must be summarized in one place (``spread``)."""
Batches = Iterator[pa.RecordBatch]
T = TypeVar("T")


def counting(context: Context) -> Callable[[Batches], Batches]:
    """Messages to tallies."""
    return lambda batches: _batches(counted(_rows(batches, Message._make), context))


def counting_segments(context: Context) -> Callable[[Batches], Batches]:
    """Segments to tallies."""
    return lambda batches: _batches(counted_segments(_rows(batches, Segment._make), context))


def counting_damage(now_ms: int) -> Callable[[Batches], Batches]:
    """What is damaged to tallies, which are few."""

    def of(batches: Batches) -> Batches:
        return _batches(summarized(sorted(checks.counted_damage(_rows(batches, Damage._make))), now_ms))

    return of


def summarizing(now_ms: int) -> Callable[[Batches], Batches]:
    """Sorted tallies to those that are worth a place on a page."""
    return lambda batches: _batches(summarized(_rows(map(_without_singles, batches), _partial), now_ms))


def _without_singles(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A sorted batch without what is nobody's repeat: most messages, and no use looking at them one by one.

    The first and the last row stay, because their like may be in another batch.
    """
    kinds = pc.is_in(batch["kind"], value_set=pa.array([checks.ID, checks.REPEAT]))
    if batch.num_rows < 3 or not pc.any(kinds).as_py():
        return batch
    same = _as_before(batch["kind"], batch["number"], batch["first"])
    alone = pc.and_(pc.invert(same[:-1]), pc.invert(same[1:]))  # of all rows but the first and the last
    single = pc.and_(pc.and_(kinds[1:-1], pc.equal(batch["messages"][1:-1], 1)), alone)
    end = pa.array([False])
    return batch.filter(pc.invert(pa.concat_arrays([end, single, end])))


def _as_before(*sides: pa.Array) -> pa.Array:
    """For each row but the first: are these columns the same as in the row before?"""
    equal = [pc.equal(column[1:], column[:-1]) for column in sides]
    return functools.reduce(pc.and_, equal)


def judging_keys(batches: Batches) -> Batches:
    """Claims, sorted by their keys, to tallies."""
    return _batches(judged_claims(_rows(batches, Claim._make)))


def _rows(batches: Batches, make: Callable[[Iterable[Any]], T]) -> Iterator[T]:
    for batch in batches:
        yield from map(make, zip(*(column.to_pylist() for column in batch.columns), strict=True))


def _partial(values: Iterable[Any]) -> Partial:
    kind, _, number, first, second, messages, size, first_due_ms, last_due_ms, examples = values
    return Key(kind, number, first, second), Tally(messages, size, first_due_ms, last_due_ms, tuple(examples))


def from_rows(rows: list[Any]) -> Iterator[Partial]:
    """On the driver: tallies as they were collected."""
    for row in rows:
        values = list(row)
        values[3:5] = bytes(row.first), bytes(row.second)
        yield _partial(values)


def _batches(partials: Iterator[Partial]) -> Batches:
    # Tallies in an Arrow batch.
    while portion := list(islice(partials, 20_000)):
        rows = [(key.kind, spread(key), *key[1:], *tally) for key, tally in portion]
        transposed = zip(*rows, strict=True)
        arrays = [pa.array(values, field.type) for values, field in zip(transposed, _PARTIAL, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=_PARTIAL)


def run(
    frames: Frames,
    *,
    release_rate: float = judge.RELEASE_RATE,
    restored_ms: int = RESTORED_MS,
    paced: Mapping[bytes, int] | None = None,
) -> Report:
    """Judge the frames; ``paced`` as in rules.model.Context. Raises ValueError for a release rate that is none;
    Spark's errors."""
    began = time.monotonic()
    facts = frames.facts
    context = Context(facts.now_ms, _intervals(frames), facts.whole, restored_ms, dict(paced or {}))
    evidence = Evidence(merged(from_rows(_collected(frames, context))))
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
    messages = message_rows(frames)
    summary = (
        messages.mapInArrow(counting(context), PARTIAL)
        .repartition("kind", "spread", "first", "second")
        .sortWithinPartitions("kind", "number", "first", "second")
        .mapInArrow(summarizing(context.now_ms), PARTIAL)
    )
    of_segments = segment_rows(frames).mapInArrow(counting_segments(context), PARTIAL)
    found = summary.unionByName(of_segments)
    # One task: nearly always there is none, and the files say so without being read.
    damaged = frames.damage.coalesce(1).mapInArrow(counting_damage(context.now_ms), PARTIAL)
    found = found.unionByName(damaged)
    if context.whole:
        claims = claim_rows(frames).repartition("key").sortWithinPartitions("key", "source", "id")
        found = found.unionByName(claims.mapInArrow(judging_keys, PARTIAL))
    return found.collect()
