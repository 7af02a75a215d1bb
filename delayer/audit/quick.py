"""The quick audit: a store judged without Spark, by counters, indexes, headers of segments and a sample of its pages.

It reads the primary key of ``message`` once, for exact numbers by lane and hour. A sample of pages gives destinations
and sizes. It checks no byte of a message and unpacks no segment. All of it is of one snapshot.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import asyncpg

from delayer.audit import coming, extract, faults, job, rules
from delayer.audit.extract import AuditedStore
from delayer.audit.findings import PACKED, WAITING, AuditReport, Bar, Finding, Share
from delayer.audit.job import Audited, Options
from delayer.broker.route_check import CheckedTarget
from delayer.core.segment import FORMAT
from delayer.core.units import DAY_MS, HOUR_MS, MINUTE_MS
from delayer.store.admin.listing import looking
from delayer.store.statements import read

_SLOTS: Final = """
SELECT date_bin('{} ms', due_at, 'epoch'), count(*) FROM message WHERE due_at >= $1 AND due_at < $2 GROUP BY 1
"""
_SEGMENTS: Final = """
SELECT 1 AS segments, first_due AS first_due_ms, last_due AS last_due_ms, messages, octet_length(packed) AS packed_bytes
FROM segment
"""
# Of waiting rows, and of held ones.
_BYTES: Final = """
SELECT sum(pg_relation_size(relid))::bigint, pg_relation_size('held') FROM pg_partition_tree('message')
"""
# In the order of audit_headers.sql.
_FAULTS: Final = (faults.MARKED, faults.LATE, faults.NEWER, faults.DUE, faults.NUMBER)


class _Record(asyncpg.Record):  # type: ignore[misc]  # the driver has no types
    """A row with its columns as attributes, as Spark's rows have them."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def run(options: Options) -> Audited:
    """One audit. Raises StoreLost, BadStoreUrl, SchemaOutdated."""
    began = time.monotonic()
    report, targets, unseen = asyncio.run(_judged(options))
    report, remarks = job.asked(report, targets, options, unseen)
    return Audited(replace(report, seconds=round(time.monotonic() - began, 3)), remarks)


async def _judged(options: Options) -> tuple[AuditReport, list[CheckedTarget], list[str]]:
    """The report, the destinations to ask the broker about, and words for destinations outside of these."""
    patience = {"statement_timeout": "0", "lock_timeout": "30s"}
    async with (
        looking(options.store.reveal(), "audit", "delayer audit", patience) as connection,
        connection.transaction(isolation="repeatable_read", readonly=True),
    ):
        await connection.execute(extract.LOCK)
        return await _judge(partial(connection.fetch, record_class=_Record, timeout=DAY_MS / 1000), options)


async def _judge(rows: Any, options: Options) -> tuple[AuditReport, list[CheckedTarget], list[str]]:
    """``rows`` gives the rows of a statement on the snapshot. Raises the driver's errors."""
    store = AuditedStore.of(*[await rows(sql) for sql in (extract.INSTANTS, extract.LANES, extract.COUNTERS)])
    reached_ms = store.now_ms
    counted, segments = await rows(read("audit_places")), await rows(_SEGMENTS)
    places = [row for row in counted if row.lane is not None]
    figures = rules.figures_of(store, places, {row.lane: row.messages for row in places if row.kind == PACKED})
    totals = rules.totals_of(figures, places, segments)

    # The sample has at most 10,000 pages (8 KB) of waiting rows, and as many of held rows. Its last row is the sum.
    [sizes] = await rows(_BYTES)
    shares = [min(10_000 * 8_192 / max(size, 1), 1.0) for size in sizes]
    *sample, whole = await rows(read("audit_sample"), *shares)
    scale = (totals.waiting + totals.held) / max(whole.messages or 0, 1)
    totals = replace(totals, size=totals.size + round(whole.size * scale), keyed=round(whole.keyed * scale))
    hours = spread(segments)
    hours.update({row.start_ms: row.messages for row in counted if row.lane is None})
    due = {HOUR_MS: hours} | await _slots(rows, hours, reached_ms, options.release_rate)
    mean = totals.size / max(totals.waiting + totals.held + totals.packed, 1)
    bars = {width: _bars(width, due[width], mean) for width in sorted(due)}
    destinations = [_share(row, scale) for row in sample if row.waiting]
    listed = destinations[: coming.DESTINATIONS]
    forecast = coming.draw(reached_ms, options.release_rate, bars, listed, len(destinations) - len(listed))

    late = await rows(read("audit_overdue"), reached_ms - rules.GRACE_MS, reached_ms, list(options.paced))
    limited = [row for row in late if row.kind == faults.PACED]
    first_due = {row.lane: row.first_due_ms for row in places if row.kind == WAITING}
    headers = await rows(read("audit_headers"), reached_ms + options.restored_ms, FORMAT, _FAULTS)
    found = {
        rules.CONSERVATION: rules.conservation(figures),
        rules.SEGMENTS: [
            *(
                Finding(rules.SEGMENTS, "violation", subject, n, first, {"segments": ids}, faults.NEXT[fault])
                for subject, fault, n, first, ids in headers
            ),
            *rules.law_of_segments(figures),
        ],
        rules.INTEGRITY: [],
        rules.OVERDUE: rules.late_ones(late, limited, figures, options.paced),
        rules.LANES: rules.lanes(store, figures, first_due),
        rules.REPEATS: [],
        rules.KEYS: [],
        rules.PEAKS: coming.peaks(forecast),
        **{rule.name: [] for rule in options.own_rules},
    }
    skipped = {
        rules.INTEGRITY: "messages were not read",
        rules.REPEATS: "messages were not compared",
        rules.KEYS: "keys were not compared with their messages",
        **{rule.name: "rules of your own need --deep" for rule in options.own_rules},
    }
    unseen = [f"those outside a sample of {min(shares) * 100:.2g} % of the pages"] if min(shares) < 1 else []
    if segments:
        unseen.append("those of messages in segments")
        skipped[rules.SEGMENTS] = "the messages inside them"
        skipped[rules.PEAKS] = "within segments, whose messages count evenly for each of their hours"
    told = rules.ruled(found, skipped)
    report = AuditReport(reached_ms, 0.0, None, totals, tuple(figures), forecast, *told, store.behind_ms, quick=True)
    return report, [_target(row, scale) for row in sample], unseen


def spread(segments: Iterable[Any]) -> Counter[int]:
    """Messages by hour, from the headers of segments: those of a segment are spread evenly over its hours. Two messages
    may be centuries apart, so at most one hour for each message gets a number."""
    found: Counter[int] = Counter()
    for one in segments:
        first_ms, last_ms = sorted((one.first_due_ms, one.last_due_ms))  # A header may be wrong.
        starts = range(first_ms // HOUR_MS * HOUR_MS, last_ms + 1, HOUR_MS)
        slots = min(len(starts), one.messages)
        for n in range(slots):
            found[starts[n * len(starts) // slots]] += one.messages * (n + 1) // slots - one.messages * n // slots
    return found


async def _slots(rows: Any, hours: Mapping[int, int], now_ms: int, rate: float) -> dict[int, Counter[int]]:
    """Messages by minute of the near future, and by minute and second of each hour that may have a peak.

    A peak takes over a minute longer than its width (coming.peaks). An hour has none if all its
    messages take a minute at most.
    """
    found: dict[int, Counter[int]] = {1_000: Counter(), MINUTE_MS: Counter()}
    busy = [hour for hour, messages in hours.items() if messages > 60 * rate]
    wanted = [(width, hour, hour + HOUR_MS) for hour in busy for width in found]
    for width, first_ms, after_ms in [(MINUTE_MS, *coming.spans(now_ms)[0]), *wanted]:
        found[width] |= Counter(dict(await rows(_SLOTS.format(width), first_ms, after_ms)))
    return found


def _bars(width: int, due: Mapping[int, int], mean: float) -> list[Bar]:
    """Bars of numbers of messages by their start, the fullest first. ``mean``: bytes of a message."""
    fullest = sorted(due.items(), key=lambda slot: (-slot[1], slot[0]))
    return [Bar(start_ms, width, messages, round(messages * mean)) for start_ms, messages in fullest]


def _share(row: Any, scale: float) -> Share:
    messages, size = max(round(row.waiting * scale), 1), round(row.size * scale)
    return Share(messages, size, row.first_due_ms, row.last_due_ms, b"", row.to_exchange, row.to_key)


def _target(row: Any, scale: float) -> CheckedTarget:
    messages, held = max(round(row.messages * scale), 1), round((row.messages - row.waiting) * scale)
    return CheckedTarget(row.to_exchange, row.to_key, messages, row.due_ms, held)
