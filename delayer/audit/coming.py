"""The forecast: how much is due when, from which routes, for which destinations, and the peaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from delayer.audit import faults
from delayer.audit.extract import Extract
from delayer.audit.findings import HELD, Bar, Calendar, Finding, Peak, Share
from delayer.broker.route_check import CheckedTarget
from delayer.core.readable import instant
from delayer.core.units import DAY_MS, HOUR_MS, MINUTE_MS

RELEASE_RATE: Final = 14_000.0
"""Messages per second: half of what one daemon released on two cores shared with broker and database, 512 bytes each
(docs/performance.md). ``--release-rate`` replaces it with a measured rate."""


_UNREAD: Final = """
SELECT messages, first_due_ms, last_due_ms FROM segment
WHERE id IN (SELECT segment FROM segment_message WHERE id IS NULL)
"""


def calendar(store: Extract, release_rate: float) -> Calendar:
    """Build the forecast. ``release_rate``: messages per second."""
    minutes, _ = spans(store.now_ms)
    due = {
        1_000: _due(store, 1_000),
        MINUTE_MS: _due(store, MINUTE_MS, *minutes),
        HOUR_MS: _with_unread(_due(store, HOUR_MS, -1 << 62, 1 << 62), spread(store.rows(_UNREAD))),
    }
    routes, routes_more = _groups(store, ("route",), ROUTES)
    destinations, destinations_more = _groups(store, ("to_exchange", "to_key"), DESTINATIONS)
    return replace(
        build_calendar(store.now_ms, release_rate, due),
        routes=routes,
        routes_more=routes_more,
        destinations=destinations,
        destinations_more=destinations_more,
    )


ROUTES, DESTINATIONS = 50, 200
"""Maximum number of routes and destinations listed, largest first."""


def spans(now_ms: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the spans for which minutes and hours are shown."""
    minutes = (now_ms - HOUR_MS) // MINUTE_MS * MINUTE_MS, now_ms + DAY_MS
    return minutes, ((now_ms - DAY_MS) // HOUR_MS * HOUR_MS, now_ms + 31 * DAY_MS)


def build_calendar(now_ms: int, release_rate: float, due: Mapping[int, list[Bar]]) -> Calendar:
    """Build the forecast, without routes and destinations, from bars by width, fullest first, including all hours."""
    minutes, hours = spans(now_ms)
    return Calendar(
        release_rate=release_rate,
        minutes=_within(due[MINUTE_MS], *minutes),
        hours=_within(due[HOUR_MS], *hours),
        days=_days(due[HOUR_MS], now_ms),
        peaks=_peaks(due, release_rate),
    )


def spread(segments: Iterable[Any]) -> Counter[int]:
    """Count messages by hour from segment headers, spreading each segment evenly over its hours. Two messages may be
    centuries apart, so a segment fills at most one hour per message."""
    found: Counter[int] = Counter()
    for one in segments:
        first_ms, last_ms = sorted((one.first_due_ms, one.last_due_ms))  # A header may be wrong.
        starts = range(first_ms // HOUR_MS * HOUR_MS, last_ms + 1, HOUR_MS)
        slots = min(len(starts), one.messages)
        for n in range(slots):
            found[starts[n * len(starts) // slots]] += one.messages * (n + 1) // slots - one.messages * n // slots
    return found


def _with_unread(hours: Iterable[Bar], unread: Mapping[int, int]) -> list[Bar]:
    """Add the messages of unreadable segments to ``hours``; fullest first."""
    found = {bar.start_ms: bar for bar in hours}
    for start_ms, messages in unread.items():
        bar = found.get(start_ms, Bar(start_ms, HOUR_MS, 0, 0))
        found[start_ms] = replace(bar, messages=bar.messages + messages, unread=messages)
    return fullest_first(found.values())


def fullest_first(bars: Iterable[Bar]) -> list[Bar]:
    return sorted(bars, key=lambda bar: (-bar.messages, bar.start_ms))


def _due(store: Extract, width: int, first: int = 0, last: int = -1) -> list[Bar]:
    """Query the bars of ``width`` ms due from ``first`` to ``last``, and the ten fullest; fullest first."""
    rows = store.rows(f"""
        WITH due AS (
            SELECT due_ms - pmod(due_ms, {width}) AS start_ms, count(*) AS messages, sum(size) AS size
            FROM messages WHERE kind <> '{HELD}' GROUP BY 1
        )
        SELECT * FROM due WHERE start_ms BETWEEN {first} AND {last}
        UNION (SELECT * FROM due ORDER BY messages DESC, start_ms LIMIT 10)""")
    return fullest_first(Bar(row.start_ms, width, row.messages, row.size) for row in rows)


def _within(bars: Iterable[Bar], first: int, last: int) -> tuple[Bar, ...]:
    return tuple(sorted((bar for bar in bars if first <= bar.start_ms <= last), key=lambda bar: bar.start_ms))


def _days(hours: Iterable[Bar], now_ms: int) -> tuple[Bar, ...]:
    """Draw a bar for each day. The bars at the edges include everything farther away."""
    first, last = ((now_ms + days * DAY_MS) // DAY_MS * DAY_MS for days in (-400, 4000))
    found: dict[int, Bar] = {}
    for hour in hours:
        start_ms = min(max(hour.start_ms // DAY_MS * DAY_MS, first), last)
        day = found.get(start_ms, Bar(start_ms, DAY_MS, 0, 0))
        sums = day.messages + hour.messages, day.size + hour.size, day.unread + hour.unread
        found[start_ms] = Bar(start_ms, DAY_MS, *sums)
    return tuple(found[start_ms] for start_ms in sorted(found))


def _peaks(rows: Mapping[int, list[Bar]], rate: float) -> tuple[Peak, ...]:
    """Pick the ten fullest seconds, minutes and hours, sorted by how far their release exceeds their width. A minute
    needs over twice the messages of each listed second in it; otherwise each peak would appear three times."""
    found: list[Peak] = []
    for width, most in rows.items():
        for row in most[:10]:
            inside = (p.messages for p in found if row.start_ms <= p.start_ms < row.start_ms + width)
            if 2 * max(inside, default=0) < row.messages:
                found.append(Peak(row.start_ms, width, row.messages, row.size, round(row.messages / rate, 3)))
    found.sort(key=lambda peak: (peak.width_ms / 1000 - peak.drain_seconds, peak.start_ms))
    return tuple(found)


def _groups(store: Extract, names: Sequence[str], limit: int) -> tuple[tuple[Share, ...], int]:
    """Return the ``limit`` largest groups of waiting messages, and the number of other groups."""
    by, of = ", ".join(names), f"FROM messages WHERE kind <> '{HELD}'"
    rows = store.rows(f"""
        SELECT count(*) AS messages, sum(size), min(due_ms), max(due_ms), {by}
        {of} GROUP BY {by} ORDER BY messages DESC, {by} LIMIT {limit}""")
    shares = tuple(Share(*row[:4], **dict[str, Any]((name, bytes(row[name])) for name in names)) for row in rows)
    if len(rows) < limit:
        return shares, 0
    [[groups]] = store.rows(f"SELECT count(DISTINCT {by}) {of}")
    return shares, groups - limit


def targets(store: Extract, limit: int) -> list[CheckedTarget]:
    """List the distinct destinations of waiting and held messages: the ``limit`` due soonest."""
    rows = store.rows(f"""
        SELECT to_exchange, to_key, count(*) AS messages, min(due_ms) AS first_due_ms, count_if(kind = '{HELD}') AS held
        FROM messages GROUP BY to_exchange, to_key ORDER BY first_due_ms, to_exchange, to_key LIMIT {limit}""")
    return [
        CheckedTarget(bytes(row.to_exchange), bytes(row.to_key), row.messages, row.first_due_ms, row.held)
        for row in rows
    ]


def peaks(coming: Calendar) -> list[Finding]:
    """Report peaks that take over a minute longer than their width, because their last messages are that late."""
    return [
        Finding(
            "peaks",
            "warning",
            f"{instant(peak.start_ms)}: {peak.messages:,} due in {peak.width_ms // 1000:,} s",
            peak.messages,
            peak.start_ms,
            {"drain_seconds": peak.drain_seconds, "release_rate": coming.release_rate},
            faults.NEXT[faults.PEAK],
        )
        for peak in coming.peaks
        if peak.drain_seconds - peak.width_ms / 1000 > 60.0
    ]
