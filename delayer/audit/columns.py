"""Counting by columns alone, as SQL: what rules.counting.counted_by_columns does to a list of messages.

Python would take longest for what is the least thought: these tallies are more than half of all. So rows are counted
where Spark has them, without a Python worker. The keys and what is counted must be the same as there, to the letter:
tests/audit/test_rules_spark.py compares.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sql

from delayer.audit.rules import repeats
from delayer.audit.rules.message import HELD
from delayer.audit.rules.summary import SPREAD_SECONDS

PARTIAL_DDL: Final = (
    "kind string, spread bigint, number bigint, first binary, second binary,"
    " messages bigint, size bigint, first_due_ms bigint, last_due_ms bigint, examples array<bigint>"
)
"""A tally under its key, and what must be summarized in one place (rules.summary.spread)."""
_KEY: Final = ("kind", "spread", "number", "first", "second")
_SECOND: Final = "(due_ms - pmod(due_ms, 1000)) div 1000"
_DAY: Final = f"({_SECOND} - pmod({_SECOND}, {SPREAD_SECONDS})) div {SPREAD_SECONDS}"


def counted(messages: DataFrame, *, whole: bool) -> DataFrame:
    """The tallies of ``messages``, which have the columns of :class:`Message`; with those of ids if ``whole``."""
    sized = messages.withColumn("size", sql.col("body_bytes") + sql.length("properties"))
    by_key = (
        sized.select("due_ms", "size", sql.explode(_keys()).alias("key"))
        .groupBy(*(sql.col(f"key.{name}").alias(name) for name in _KEY))
        .agg(
            sql.count(sql.lit(1)).alias("messages"),
            sql.sum("size").alias("size"),
            sql.min("due_ms").alias("first_due_ms"),
            sql.max("due_ms").alias("last_due_ms"),
        )
    )
    found = by_key.withColumn("examples", _no_examples())
    return found.unionByName(_ids(sized)) if whole else found


def _keys() -> Column:
    """The keys of one message; those that it has not got are null, and left out."""
    waiting, keyed = sql.col("where") != HELD, sql.col("key").isNotNull()
    return sql.array_compact(
        sql.array(
            _key("lane", number=sql.col("lane"), first=sql.col("where").cast("binary")),
            sql.when(keyed, _key("keyed")),
            sql.when(waiting, _key("second", spread=sql.expr(_DAY), number=sql.expr(_SECOND))),
            sql.when(waiting, _key("route", first=sql.col("route"))),
            sql.when(waiting, _key("target", first=sql.col("to_exchange"), second=sql.col("to_key"))),
        )
    )


def _key(
    kind: str,
    *,
    spread: Column | None = None,
    number: Column | None = None,
    first: Column | None = None,
    second: Column | None = None,
) -> Column:
    zero, empty = sql.lit(0), sql.lit(b"")
    return sql.struct(
        sql.lit(kind).alias("kind"),
        (zero if spread is None else spread).cast("bigint").alias("spread"),
        (zero if number is None else number).cast("bigint").alias("number"),
        (empty if first is None else first).alias("first"),
        (empty if second is None else second).alias("second"),
    )


def _ids(sized: DataFrame) -> DataFrame:
    """Each message under its id: nothing to add up, but for what must never be."""
    return sized.select(
        sql.lit(repeats.ID).alias("kind"),
        sql.col("id").alias("spread"),
        sql.col("id").alias("number"),
        sql.lit(b"").alias("first"),
        sql.lit(b"").alias("second"),
        sql.lit(1).cast("bigint").alias("messages"),
        "size",
        sql.col("due_ms").alias("first_due_ms"),
        sql.col("due_ms").alias("last_due_ms"),
        _no_examples().alias("examples"),
    )


def _no_examples() -> Column:
    return sql.array().cast("array<bigint>")
