"""Frames with the columns of what the rules take: messages, segments, claims of keys."""

from __future__ import annotations

import functools

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sql

from delayer.audit.frames import SEGMENT, Frames
from delayer.audit.rules import keys
from delayer.audit.rules.keys import Claim
from delayer.audit.rules.message import HELD, PACKED, WAITING, Message, Segment


def messages(frames: Frames) -> DataFrame:
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


def segments(frames: Frames) -> DataFrame:
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


def claims(frames: Frames) -> DataFrame:
    """What names a key, with the columns of :class:`Claim`. No segment has any."""

    def of(frame: DataFrame, source: int) -> DataFrame:
        return frame.where(sql.col("key").isNotNull()).withColumn("source", sql.lit(source)).select(*Claim._fields)

    return (
        of(frames.keys, keys.POINTER)
        .unionByName(of(frames.held, keys.HELD))
        .unionByName(of(frames.messages, keys.WAITING))
    )
