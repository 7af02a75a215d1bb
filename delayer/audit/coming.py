"""The forecast: how much is due when, from which routes, for which destinations, and the peaks."""

from __future__ import annotations

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
"""Messages a second: half of what one daemon released on two cores shared with broker and database, 512 bytes each
(docs/performance.md). ``--release-rate`` replaces it by a measured one."""
ROUTES, DESTINATIONS = 50, 200
"""How many of them the forecast lists, the largest first."""


def calendar(store: Extract, release_rate: float) -> Calendar:
    """The forecast. ``release_rate``: messages a second."""
    minutes, _ = spans(store.now_ms)
    due = {
        1_000: _due(store, 1_000),
        MINUTE_MS: _due(store, MINUTE_MS, *minutes),
        HOUR_MS: _due(store, HOUR_MS, -1 << 62, 1 << 62),
    }
    routes, routes_more = _largest(store, ("route",), ROUTES)
    destinations, destinations_more = _largest(store, ("to_exchange", "to_key"), DESTINATIONS)
    drawn = draw(store.now_ms, release_rate, due, destinations, destinations_more)
    return replace(drawn, routes=tuple(routes), routes_more=routes_more)


def spans(now_ms: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The spans that minutes and hours are shown of."""
    minutes = (now_ms - HOUR_MS) // MINUTE_MS * MINUTE_MS, now_ms + DAY_MS
    return minutes, ((now_ms - DAY_MS) // HOUR_MS * HOUR_MS, now_ms + 31 * DAY_MS)


def draw(
    now_ms: int,
    release_rate: float,
    due: Mapping[int, Sequence[Bar]],
    destinations: Sequence[Share],
    destinations_more: int,
) -> Calendar:
    """The forecast from the bars of each width, the fullest first; all hours are among them. ``destinations``: those to
    list. ``destinations_more``: the number of the rest."""
    minutes, hours = spans(now_ms)
    return Calendar(
        release_rate=release_rate,
        minutes=_within(due[MINUTE_MS], *minutes),
        hours=_within(due[HOUR_MS], *hours),
        days=_days(due[HOUR_MS], now_ms),
        peaks=_peaks(due, release_rate),
        destinations=tuple(destinations),
        destinations_more=destinations_more,
    )


def _due(store: Extract, width: int, first: int = 0, last: int = -1) -> list[Bar]:
    """The bars of ``width`` ms from ``first`` to ``last``, and the ten fullest of all. The fullest come first."""
    rows = store.rows(f"""
        WITH due AS (
            SELECT due_ms - pmod(due_ms, {width}) AS start_ms, count(*) AS messages, sum(size) AS size
            FROM messages WHERE kind <> '{HELD}' GROUP BY 1
        )
        SELECT * FROM due WHERE start_ms BETWEEN {first} AND {last}
        UNION (SELECT * FROM due ORDER BY messages DESC, start_ms LIMIT 10)
        ORDER BY messages DESC, start_ms""")
    return [Bar(row.start_ms, width, row.messages, row.size) for row in rows]


def _within(bars: Iterable[Bar], first: int, last: int) -> tuple[Bar, ...]:
    shown = (bar for bar in bars if first <= bar.start_ms <= last)
    return tuple(sorted(shown, key=lambda bar: bar.start_ms))


def _days(hours: Iterable[Bar], now_ms: int) -> tuple[Bar, ...]:
    """A bar for each day. The bars at the edges hold everything that is farther away."""
    first, last = ((now_ms + days * DAY_MS) // DAY_MS * DAY_MS for days in (-400, 4000))
    found: dict[int, Bar] = {}
    for hour in hours:
        start_ms = min(max(hour.start_ms // DAY_MS * DAY_MS, first), last)
        day = found.get(start_ms, Bar(start_ms, DAY_MS, 0, 0))
        found[start_ms] = Bar(start_ms, DAY_MS, day.messages + hour.messages, day.size + hour.size)
    return tuple(found[start_ms] for start_ms in sorted(found))


def _peaks(due: Mapping[int, Sequence[Bar]], rate: float) -> tuple[Peak, ...]:
    """The ten fullest seconds, minutes and hours, first the ones that take longest beyond their width. A minute is
    listed only if it has over twice the messages of each listed second in it. Otherwise each peak would appear three
    times."""
    found: list[Peak] = []
    for width, fullest in due.items():
        for bar in fullest[:10]:
            inside = (p.messages for p in found if bar.start_ms <= p.start_ms < bar.start_ms + width)
            if 2 * max(inside, default=0) < bar.messages:
                found.append(Peak(bar.start_ms, width, bar.messages, bar.size, round(bar.messages / rate, 3)))
    found.sort(key=lambda peak: (peak.width_ms / 1000 - peak.drain_seconds, peak.start_ms))
    return tuple(found)


def _largest(store: Extract, by: Sequence[str], limit: int) -> tuple[list[Share], int]:
    """The ``limit`` largest groups of waiting messages, and the number of the other groups."""
    names, waiting = ", ".join(by), f"FROM messages WHERE kind <> '{HELD}'"
    rows = store.rows(f"""
        SELECT {names}, count(*) AS messages, sum(size) AS size, min(due_ms) AS first_due_ms, max(due_ms) AS last_due_ms
        {waiting} GROUP BY {names} ORDER BY messages DESC, {names} LIMIT {limit}""")
    shares = []
    for row in rows:
        group: dict[str, Any] = {name: bytes(row[name]) for name in by}
        shares.append(Share(row.messages, row.size, row.first_due_ms, row.last_due_ms, **group))
    if len(rows) < limit:
        return shares, 0
    [[groups]] = store.rows(f"SELECT count(DISTINCT {names}) {waiting}")
    return shares, groups - limit


def targets(store: Extract, limit: int) -> list[CheckedTarget]:
    """The distinct destinations of waiting and held messages, the ``limit`` soonest due of them."""
    rows = store.rows(f"""
        SELECT to_exchange, to_key, count(*) AS messages, min(due_ms) AS first_due_ms, count_if(kind = '{HELD}') AS held
        FROM messages GROUP BY to_exchange, to_key ORDER BY first_due_ms, to_exchange, to_key LIMIT {limit}""")
    return [
        CheckedTarget(bytes(row.to_exchange), bytes(row.to_key), row.messages, row.first_due_ms, row.held)
        for row in rows
    ]


def peaks(coming: Calendar) -> list[Finding]:
    """Findings for peaks that take over a minute longer than their width: their last messages are that late."""
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
