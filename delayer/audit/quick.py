"""The quick audit: judges a store without Spark, by counters, indexes, segment headers and a sample of its pages.

It scans the primary key of ``message`` once for exact numbers by lane and hour, and samples pages for destinations and
sizes. It does not check message bytes or unpack segments. Everything comes from one snapshot.
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
from delayer.audit.findings import PACKED, WAITING, AuditReport, Bar, Calendar, Finding, Share
from delayer.audit.job import Options
from delayer.broker.route_check import CheckedTarget
from delayer.core.segment import FORMAT
from delayer.core.units import DAY_MS, HOUR_MS, MINUTE_MS
from delayer.store.rows.partitions import bounds_of, day_of
from delayer.store.session import read_connection
from delayer.store.statements import read

_SLOTS: Final = """
SELECT date_bin('{} ms', due_at, 'epoch'), count(*) FROM message WHERE due_at >= $1 AND due_at < $2 GROUP BY 1
"""
_SEGMENTS: Final = """
SELECT 1 AS segments, first_due AS first_due_ms, last_due AS last_due_ms, messages, octet_length(packed) AS packed_bytes
FROM segment
"""
_PARTITIONS: Final = """
SELECT c.relname, pg_get_expr(c.relpartbound, c.oid), pg_relation_size(c.oid) / current_setting('block_size')::bigint
FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid WHERE i.inhparent = 'message'::regclass
"""
_HELD_PAGES: Final = "SELECT pg_relation_size('held') / current_setting('block_size')::bigint"
# Partition {0} is named after a day but lacks that day's bounds {1} and {2}. Its rows of other days are misplaced, and
# so are the day's rows in the default partition.
_MISPLACED: Final = f"""
SELECT concat('lane ', lane, ', {WAITING}: {faults.PARTITION}'), count(*), min(due_at) FROM (
    SELECT lane, due_at FROM {{0}} WHERE NOT (due_at >= '{{1}}' AND due_at < '{{2}}')
    UNION ALL SELECT lane, due_at FROM message_default WHERE due_at >= '{{1}}' AND due_at < '{{2}}'
) AS misplaced GROUP BY 1
"""
# In the order of audit_headers.sql.
_FAULTS: Final = (faults.MARKED, faults.LATE, faults.NEWER, faults.DUE, faults.NUMBER)


class _Record(asyncpg.Record):  # type: ignore[misc]  # the driver has no types
    """A row with its columns as attributes, like Spark's rows."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def run(options: Options) -> AuditReport:
    """Run one audit. Raises StoreLost, BadStoreUrl, SchemaOutdated."""
    began = time.monotonic()
    report, targets, unseen = asyncio.run(_judged(options))
    report = job.check_destinations(report, targets, options, unseen)
    return replace(report, seconds=round(time.monotonic() - began, 3))


async def _judged(options: Options) -> tuple[AuditReport, list[CheckedTarget], list[str]]:
    """Return the report, the destinations to check on the broker, and a description of destinations left out."""
    patience = {"statement_timeout": "0", "lock_timeout": "30s"}
    async with (
        read_connection(options.store.reveal(), "audit", "delayer audit", patience) as connection,
        connection.transaction(isolation="repeatable_read", readonly=True),
    ):
        await connection.execute(extract.LOCK)
        return await _judge(partial(connection.fetch, record_class=_Record, timeout=DAY_MS / 1000), options)


async def _judge(rows: Any, options: Options) -> tuple[AuditReport, list[CheckedTarget], list[str]]:
    """Audit one snapshot. ``rows`` runs a statement on it. Raises the driver's errors."""
    store = AuditedStore.of(*[await rows(sql) for sql in extract.READ])
    reached_ms = store.now_ms
    counted, segments, partitions = await rows(read("audit_places")), await rows(_SEGMENTS), await rows(_PARTITIONS)
    places = [row for row in counted if row.lane is not None]
    figures = rules.figures_of(store, places, {row.lane: row.messages for row in places if row.kind == PACKED})
    totals = rules.totals_of(figures, places, segments)

    # Sample at most 10,000 pages (8 KB) of waiting rows, and as many of held rows. The sample's last row is the sum.
    [(held_pages,)] = await rows(_HELD_PAGES)
    shares = [min(10_000 / max(pages, 1), 1.0) for pages in (sum(pages for *_, pages in partitions), held_pages)]
    *sample, whole = await rows(read("audit_sample"), *shares)
    scale = (totals.waiting + totals.held) / max(whole.messages or 0, 1)
    totals = replace(totals, size=totals.size + round(whole.size * scale), keyed=round(whole.keyed * scale))
    due = {HOUR_MS: coming.spread(segments)}
    due[HOUR_MS].update({row.start_ms: row.messages for row in counted if row.lane is None})
    due |= await _slots(rows, due[HOUR_MS], reached_ms, options.release_rate)
    mean = totals.size / max(totals.waiting + totals.held + totals.packed, 1)
    destinations = [_share(row, scale) for row in sample if row.waiting]
    forecast = _forecast(reached_ms, options.release_rate, due, mean, destinations)

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
        rules.INTEGRITY: [
            Finding(rules.INTEGRITY, "violation", subject, n, first, next=faults.NEXT[faults.PARTITION])
            for subject, n, first in await _misplaced(rows, partitions)
        ],
        rules.OVERDUE: rules.late_ones(late, limited, figures, options.paced),
        rules.LANES: rules.lanes(store, figures, first_due),
        rules.REPEATS: [],
        rules.KEYS: [],
        rules.SCHEDULES: rules.schedules(store),
        rules.INBOX: rules.inbox(store),
        rules.PEAKS: coming.peaks(forecast),
        **{rule.name: [] for rule in options.own_rules},
    }
    skipped = {
        rules.INTEGRITY: "bytes, checksums and properties of messages",
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


async def _misplaced(rows: Any, partitions: Iterable[Any]) -> list[Any]:
    """Find rows outside their day's partition, by lane: subject, messages, first due instant, as Finding takes them."""
    found: list[Any] = []
    for name, bound, _ in partitions:
        day = day_of(name)
        if day is not None and bound != "FOR VALUES FROM ('{}') TO ('{}')".format(*bounds_of(day)):
            found += await rows(_MISPLACED.format(name, *bounds_of(day)))
    return found


async def _slots(rows: Any, hours: Mapping[int, int], now_ms: int, rate: float) -> dict[int, Counter[int]]:
    """Count messages by minute of the near future, and by minute and second of each hour that may have a peak. A peak
    takes over a minute longer than its width (coming.peaks), so an hour that drains within a minute has none."""
    found: dict[int, Counter[int]] = {1_000: Counter(), MINUTE_MS: Counter()}
    busy = [hour for hour, messages in hours.items() if messages > 60 * rate]
    wanted = [(width, hour, hour + HOUR_MS) for hour in busy for width in found]
    for width, first_ms, after_ms in [(MINUTE_MS, *coming.spans(now_ms)[0]), *wanted]:
        found[width] |= Counter(dict(await rows(_SLOTS.format(width), first_ms, after_ms)))
    return found


def _forecast(
    now_ms: int, rate: float, due: Mapping[int, Mapping[int, int]], mean: float, destinations: list[Share]
) -> Calendar:
    """Build the forecast from ``due``: message counts by width and start. ``mean``: bytes per message."""
    bars = {
        width: coming.fullest_first(Bar(start_ms, width, n, round(n * mean)) for start_ms, n in due[width].items())
        for width in sorted(due)
    }
    listed = tuple(destinations[: coming.DESTINATIONS])
    more = len(destinations) - len(listed)
    return replace(coming.build_calendar(now_ms, rate, bars), destinations=listed, destinations_more=more)


def _share(row: Any, scale: float) -> Share:
    messages, size = max(round(row.waiting * scale), 1), round(row.size * scale)
    return Share(messages, size, row.first_due_ms, row.last_due_ms, b"", row.to_exchange, row.to_key)


def _target(row: Any, scale: float) -> CheckedTarget:
    messages, held = max(round(row.messages * scale), 1), round((row.messages - row.waiting) * scale)
    return CheckedTarget(row.to_exchange, row.to_key, messages, row.due_ms, held)
