"""Sound rows for the rules; a test changes them to plant a defect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from delayer.audit import rules
from delayer.audit.extract import Extract, LaneState, create_views
from delayer.audit.findings import HELD, PACKED, WAITING, AuditReport, Finding
from delayer.audit.job import Options
from delayer.audit.source import RELATIONS
from delayer.config.model import AuditRuleTable
from delayer.core.secret import SecretUrl
from delayer.core.units import DAY_MS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOW = 1_795_000_000_000
DAY = NOW // DAY_MS
ONE = LaneState(1, "one", True)
Row = dict[str, Any]


def properties(message_id: bytes) -> bytes:
    """Nothing but a message id."""
    return b"\x00\x80" + bytes((len(message_id),)) + message_id


def message(number: int = 1, **other: Any) -> Row:
    """A sound message of MESSAGES, due in an hour."""
    sound = {
        "id": number,
        "lane": 1,
        "due_ms": NOW + 3_600_000,
        "kind": WAITING,
        "route": b"delayer.in",
        "to_exchange": b"delayer.out",
        "to_key": b"orders",
        "size": 100,
        "faults": [],
    }
    return sound | other


def held(number: int = 1, **other: Any) -> Row:
    return message(number, **{"kind": HELD, **other})


def packed(number: int, segment: int = 1, **other: Any) -> Row:
    return message(number, **{"kind": PACKED, "segment": segment, "due_ms": NOW + 8 * DAY_MS, **other})


def segment(number: int, messages: Iterable[Row], /, **other: Any) -> Row:
    """The row of a segment with these messages."""
    inside = list(messages)
    sound = {
        "id": number,
        "lane": 1,
        "first_due_ms": min(one["due_ms"] for one in inside),
        "last_due_ms": max(one["due_ms"] for one in inside),
        "ids": [one["id"] for one in inside],
        "messages": len(inside),
        "cancelled": 0,
        "raw_bytes": sum(one["size"] for one in inside),
        "packed_bytes": 1000,
    }
    return sound | other


def key(name: bytes, number: int, **other: Any) -> Row:
    """A key of a message made by :func:`message`."""
    return {"key": name, "lane": 1, "due_ms": NOW + 3_600_000, "id": number} | other


def store(
    spark: SparkSession,
    messages: Iterable[Row] = (),
    segments: Iterable[Row] = (),
    keys: Iterable[Row] = (),
    *,
    history: Iterable[Row] = (),
    lanes: Iterable[LaneState] = (ONE,),
    counters: Mapping[tuple[int, str], int] | None = None,
    now_ms: int = NOW,
    sample: float = 1.0,
) -> Extract:
    """An extract of these rows, with counters that match them unless others are given."""
    messages, segments = list(messages), list(segments)
    found = {
        "message": [one for one in messages if one.get("kind", WAITING) == WAITING],
        "held": [one for one in messages if one.get("kind") == HELD],
        "segment_message": [one for one in messages if one.get("kind") == PACKED],
        "segment": segments,
        "message_key": list(keys),
        "history": list(history),
    }
    counted = fitting(messages, segments) if counters is None else counters
    extract = Extract(now_ms, tuple(lanes), counted, 0, (), (0, None), spark, sample)
    create_views(
        spark,
        {
            name: spark.createDataFrame(pa.Table.from_pylist(rows, schema=RELATIONS[name].schema))
            for name, rows in found.items()
        },
    )
    return extract


def fitting(messages: Iterable[Row], segments: Iterable[Row] = ()) -> dict[tuple[int, str], int]:
    """Counters that match these rows."""
    found: dict[tuple[int, str], int] = {}

    def add(lane: int, kind: str, n: int = 1) -> None:
        found[lane, kind] = found.get((lane, kind), 0) + n

    for each in messages:
        if "id" in each and each["kind"] != PACKED:
            add(each["lane"], "parked")
        if "id" in each and each["kind"] == HELD:
            add(each["lane"], "held")
    for some in segments:
        if "id" in some:
            add(some["lane"], "parked", some["messages"])
            add(some["lane"], "compacted", some["messages"])
    return found


def judged(
    spark: SparkSession,
    *rows: Iterable[Any],
    release_rate: float = 14_000.0,
    own_rules: Sequence[AuditRuleTable] = (),
    **more: Any,
) -> AuditReport:
    """The report on the extract of these rows."""
    options = Options(SecretUrl("postgresql:///"), release_rate=release_rate, own_rules=tuple(own_rules))
    return rules.judge(store(spark, *rows, **more), options)


def said(found: AuditReport | Iterable[Finding]) -> list[tuple[str, str, str, int]]:
    """The findings without the details."""
    return [brief(one) for one in (found.findings if isinstance(found, AuditReport) else found)]


def brief(found: Finding) -> tuple[str, str, str, int]:
    return found.rule, found.severity, found.subject, found.count
