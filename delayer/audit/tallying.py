"""What runs on executors: the rules over rows of Arrow batches (``mapInArrow``), and their tallies as rows again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from delayer.audit.rules import damage, repeats
from delayer.audit.rules.counting import counted, counted_segments
from delayer.audit.rules.damage import Damage
from delayer.audit.rules.keys import Claim, judged
from delayer.audit.rules.message import Context, Message, Segment
from delayer.audit.rules.summary import spread, summarized
from delayer.audit.rules.tally import Key, Partial, Tally

BATCH: Final = 20_000
"""Tallies in an Arrow batch."""
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
        return _batches(summarized(sorted(damage.counted(_rows(batches, Damage._make))), now_ms))

    return of


def summarizing(now_ms: int) -> Callable[[Batches], Batches]:
    """Sorted tallies to those that are worth a place on a page."""
    return lambda batches: _batches(summarized(_rows(map(_without_singles, batches), _partial), now_ms))


def _without_singles(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A sorted batch without what is nobody's repeat: most messages, and no use looking at them one by one.

    The first and the last row stay, because their like may be in another batch.
    """
    kinds = pc.is_in(batch["kind"], value_set=pa.array([repeats.ID, repeats.MESSAGE]))
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
    return _batches(judged(_rows(batches, Claim._make)))


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
    while portion := list(islice(partials, BATCH)):
        rows = [(key.kind, spread(key), *key[1:], *tally) for key, tally in portion]
        transposed = zip(*rows, strict=True)
        arrays = [pa.array(values, field.type) for values, field in zip(transposed, _PARTIAL, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=_PARTIAL)
