"""The rules both ways: over lists in plain Python and over frames in Spark, on the same rows, with the same report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delayer.audit import judging
from delayer.audit.frames import ROW, SCHEMAS, SEGMENT, Facts, Frames
from delayer.audit.rules import checks, judge
from delayer.audit.rules.checks import CLAIM_HELD, CLAIM_WAITING, POINTER, Claim, Damage
from delayer.audit.rules.counting import summarized
from delayer.audit.rules.model import DAY_MS, HELD, PACKED, Context, Key, Lane, Message, Partial, Segment, Tally
from tests.audit.rows import DAY, NOW, damaged, drawn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

LANES = [Lane(1, "one", True), Lane(2, "two", False), Lane(3, "three", None)]
PARTITIONS = {f"message_{day}": (day * DAY_MS, (day + 1) * DAY_MS) for day in range(DAY - 1, DAY + 3)}


class Store:
    """Rows that fit each other as the frames of one extract do: ranges from the segments, claims from the messages."""

    def __init__(self, seed: int, count: int) -> None:
        random = Random(seed)
        messages, segments, claims, self.counters = drawn(random, count)
        self.segments = [each for each in segments if each.lane is not None or each.tombstones]
        there = [each for each in self.segments if each.lane is not None]
        self.packed_in = {number: random.choice(there) for number in range(len(messages))} if there else {}
        self.messages = [self._keyed(random, each) for each in messages]
        self.damage = damaged(random)
        pointers = {claim.key: claim for claim in claims if claim.source == POINTER}
        self.claims = [*pointers.values(), *self._claims()]

    def _keyed(self, random: Random, each: Message) -> Message:
        key = bytes((97 + random.randrange(8),)) if each.where != PACKED and random.random() < 0.05 else None
        return each._replace(key=key)

    def _claims(self) -> Iterator[Claim]:
        for each in self.messages:
            if each.key is not None:
                source = CLAIM_HELD if each.where == HELD else CLAIM_WAITING
                yield Claim(each.key, source, each.id, each.lane, each.due_ms)

    def frames(self, spark: SparkSession, *, sample: float) -> Frames:
        def of(name: str, rows: Iterable[dict[str, Any]]) -> DataFrame:
            names = [field.split()[0] for field in SCHEMAS[name].split(",")]
            found = [tuple(row.get(column) for column in names) for row in rows]
            return spark.createDataFrame(found, SCHEMAS[name]).repartition(3)

        return Frames(
            facts=Facts(NOW, sample),
            messages=of("messages", self._message_rows()),
            held=of("held", (each._asdict() for each in self.messages if each.where == HELD)),
            segments=of("segments", (each._asdict() for each in self.segments if each.lane is not None)),
            tombstones=of(
                "tombstones",
                ({"segment": each.id, "id": n} for each in self.segments for n in range(each.tombstones)),
            ),
            keys=of("keys", (claim._asdict() for claim in self.claims if claim.source == POINTER)),
            lanes=of("lanes", (lane._asdict() for lane in LANES)),
            counters=of(
                "counters", ({"lane": lane, "kind": kind, "n": n} for (lane, kind), n in self.counters.items())
            ),
            damage=of("damage", (one._asdict() for one in self.damage)),
            partitions=of(
                "partitions",
                [
                    {"name": "message_default"},
                    *({"name": name, "first_ms": low, "after_ms": high} for name, (low, high) in PARTITIONS.items()),
                ],
            ),
        )

    def _message_rows(self) -> Iterator[dict[str, Any]]:
        for number, each in enumerate(self.messages):
            if each.where != HELD:
                inside = self.packed_in.get(number) if each.where == PACKED else None
                origin = SEGMENT if each.where == PACKED else ROW
                segment = inside.id if inside else None
                yield {**each._asdict(), "origin": origin, "partition": each.home, "segment": segment}


@contextmanager
def batches_of(spark: SparkSession, rows: int) -> Iterator[None]:
    """Small batches, so that what belongs together is in several."""
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(name)
    spark.conf.set(name, str(rows))
    try:
        yield
    finally:
        spark.conf.set(name, before)


@pytest.mark.parametrize(
    ("seed", "count", "batch", "sample"), [(1, 900, 10_000, 1.0), (2, 250, 20, 1.0), (3, 90, 7, 0.1)]
)
def test_spark_and_plain_python_report_the_same(
    spark: SparkSession, seed: int, count: int, batch: int, sample: float
) -> None:
    store = Store(seed, count)
    whole = sample >= 1.0
    paced = {b"in": 3} if seed % 2 else {}
    context = Context(NOW, PARTITIONS, whole, paced=paced)
    evidence = judge.evidence_of(store.messages, store.segments, store.claims if whole else (), context, store.damage)
    plain = judge.report(evidence, LANES, store.counters, context, release_rate=7.0, sample=None if whole else sample)
    assert not whole or {found.rule for found in plain.findings} == set(judge.RULES) - {"peaks"}
    with batches_of(spark, batch):
        sparks = judging.run(store.frames(spark, sample=sample), release_rate=7.0, paced=paced)
    assert replace(sparks, seconds=0.0) == plain


def test_an_empty_store(spark: SparkSession) -> None:
    store = Store(0, 0)
    store.segments, store.claims, store.counters, store.damage = [], [], {}, []
    context = Context(NOW, PARTITIONS)
    plain = judge.report(judge.evidence_of([], [], [], context), LANES, {}, context)
    assert replace(judging.run(store.frames(spark, sample=1.0)), seconds=0.0) == plain
    assert plain.findings == ()


singles = st.tuples(
    st.builds(
        Key,
        st.sampled_from([checks.ID, checks.REPEAT, "route", "lane"]),
        st.integers(0, 3),
        st.sampled_from([b"", b"a"]),
    ),
    st.builds(Tally, st.integers(1, 2), st.just(1), st.just(0), st.just(0), st.sampled_from([(), (1,), (2,)])),
)


@settings(deadline=None)
@given(st.lists(singles, max_size=30), st.integers(1, 10))
def test_leaving_out_what_is_nobodys_repeat_changes_nothing(partials: list[Partial], rows: int) -> None:
    partials.sort()
    batches = [batch for start in range(0, len(partials), rows) for batch in _arrow(partials[start : start + rows])]
    kept = [partial for batch in batches for partial in _partials(judging._without_singles(batch))]
    assert list(summarized(kept, NOW)) == list(summarized(partials, NOW))


def _arrow(partials: Sequence[Partial]) -> Iterator[pa.RecordBatch]:
    return judging._batches(iter(partials))


def _partials(batch: pa.RecordBatch) -> list[Partial]:
    return list(judging._rows(iter([batch]), judging._partial))


def test_the_ids_of_most_messages_never_reach_python() -> None:
    partials: list[Partial] = [(Key(checks.ID, number), Tally(1, 1, 0, 0)) for number in range(1000)]
    (batch,) = _arrow(partials)
    assert [key.number for key, _ in _partials(judging._without_singles(batch))] == [0, 999]


def test_columns_of_the_frames_are_those_of_the_rows() -> None:
    columns = {name: {field.split()[0] for field in ddl.split(",")} for name, ddl in SCHEMAS.items()}
    made = {"where", "home", "retry_ms"}
    assert set(Message._fields) - made <= columns["messages"] & columns["held"]
    assert set(Segment._fields) - {"tombstones"} <= columns["segments"]
    assert set(Lane._fields) <= columns["lanes"]
    assert list(Damage._fields) == [field.split()[0] for field in SCHEMAS["damage"].split(",")]
