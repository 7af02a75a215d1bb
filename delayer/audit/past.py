"""Reports from the history: lateness by route and hour, the largest numbers of releases against the forecast,
destinations that get worse, and delays that a publisher may have given in the wrong unit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from delayer.audit.extract import Extract
from delayer.audit.findings import Bar, Calendar, Capacity, OddDelays, Past, PastHour, PastRoute, Worse
from delayer.core.units import DAY_MS, HOUR_MS, MINUTE_MS

HOURS: Final = 31 * 24
"""The report has the hours of this span before the snapshot, for all routes together and for each listed route."""
ROUTES: Final = 10
"""The report lists so many routes at most, those with most messages."""
LISTED: Final = 20
"""Each list has so many destinations at most."""
FEWEST: Final = 20
"""Two spans of a destination are compared if each has so many messages that were released or held."""

# Only a released message has a lateness. A message that was released early counts as on time.
_FIGURES: Final = """
count_if(what = 'released') AS released, count_if(what = 'held') AS held, count_if(what = 'cancelled') AS cancelled,
percentile_approx(late, 0.5) AS p50_ms, percentile_approx(late, 0.99) AS p99_ms, max(late) AS worst_ms
"""
_ROWS: Final = f"""
(SELECT *, at_ms - pmod(at_ms, {HOUR_MS}) AS start_ms, if(what = 'released', greatest(late_ms, 0), NULL) AS late
 FROM history)
"""


def told(store: Extract, forecast: Calendar) -> Past | None:
    """The report of the extract's history; None if the history has no rows. Spark's errors pass."""
    [whole] = store.rows(f"SELECT min(at_ms) AS first_ms, max(at_ms) AS last_ms, {_FIGURES} FROM {_ROWS}")
    if whole.first_ms is None:
        return None
    since_ms = store.now_ms - HOURS * HOUR_MS
    largest = store.rows(f"SELECT route, {_FIGURES} FROM {_ROWS} GROUP BY 1 ORDER BY count(*) DESC, 1 LIMIT {ROUTES}")
    of_routes = store.rows(f"""
        SELECT route, start_ms, {_FIGURES} FROM {_ROWS} WHERE start_ms >= {since_ms}
        AND route IN ({", ".join(f"X'{bytes(row.route).hex()}'" for row in largest)}) GROUP BY 1, 2 ORDER BY 1, 2""")
    hours = store.rows(f"SELECT start_ms, {_FIGURES} FROM {_ROWS} WHERE start_ms >= {since_ms} GROUP BY 1 ORDER BY 1")
    return Past(
        first_ms=whole.first_ms,
        last_ms=whole.last_ms,
        whole=_hour(whole, whole.first_ms),
        hours=tuple(_hour(row, row.start_ms) for row in hours),
        routes=tuple(
            PastRoute(
                bytes(row.route),
                _hour(row, whole.first_ms),
                tuple(_hour(one, one.start_ms) for one in of_routes if one.route == row.route),
            )
            for row in largest
        ),
        capacity=tuple(_capacity(store, forecast, width) for width in (1_000, MINUTE_MS, HOUR_MS)),
        worse=_worse(store),
        odd=_odd(store),
    )


def _hour(row: Any, start_ms: int) -> PastHour:
    late = (row.p50_ms or 0, row.p99_ms or 0, row.worst_ms or 0)
    return PastHour(start_ms, row.released, row.held, row.cancelled, *late)


def _capacity(store: Extract, forecast: Calendar, width: int) -> Capacity:
    """The largest number of messages released, and the largest number due, within one span of ``width`` ms."""
    rows = store.rows(f"""
        SELECT at_ms - pmod(at_ms, {width}) AS start_ms, count(*) AS messages FROM history WHERE what = 'released'
        GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT 1""")
    known: Iterable[Any] = (*forecast.peaks, *forecast.minutes, *forecast.hours)
    coming = max((one for one in known if one.width_ms == width), key=lambda one: one.messages, default=None)
    return Capacity(
        width,
        Bar(rows[0].start_ms, width, rows[0].messages, 0) if rows else None,
        Bar(coming.start_ms, width, coming.messages, coming.size) if coming is not None else None,
    )


def _worse(store: Extract) -> tuple[Worse, ...]:
    """Destinations whose last day is worse than the time before it. Their share of held messages doubled and is 1 % at
    least, or their 99th percentile of lateness doubled and is a second at least."""
    rows = store.rows(f"""
        WITH spans AS (
            SELECT to_exchange, to_key, at_ms >= {store.now_ms - DAY_MS} AS recent, {_FIGURES}
            FROM {_ROWS} GROUP BY 1, 2, 3 HAVING count_if(what <> 'cancelled') >= {FEWEST}
        )
        SELECT n.to_exchange, n.to_key, n.released + n.held AS messages,
               b.held / (b.released + b.held) AS held_before, n.held / (n.released + n.held) AS held_now,
               coalesce(b.p99_ms, 0) AS p99_before, coalesce(n.p99_ms, 0) AS p99_now
        FROM spans AS n JOIN spans AS b ON n.to_exchange = b.to_exchange AND n.to_key = b.to_key
        WHERE n.recent AND NOT b.recent""")
    found = [
        Worse(
            bytes(row.to_exchange), bytes(row.to_key), row.messages, round(row.held_before, 4), round(row.held_now, 4),
            row.p99_before, row.p99_now,
        )
        for row in rows
        if (row.held_now >= 0.01 and row.held_now >= 2 * row.held_before)
        or (row.p99_now >= 1_000 and row.p99_now >= 2 * row.p99_before)
    ]  # fmt: skip
    return tuple(sorted(found, key=lambda one: (-one.messages, one.to_exchange, one.to_key))[:LISTED])


def _odd(store: Extract) -> tuple[OddDelays, ...]:
    """Destinations with delays that are a thousandth of the route's median (seconds in a field of milliseconds), or a
    thousand times the median, within a factor of two. A route with a median below a second is left out."""
    rows = store.rows(f"""
        WITH known AS (SELECT * FROM history WHERE delay_ms > 0),
        usual AS (SELECT route, percentile_approx(delay_ms, 0.5) AS usual_ms FROM known GROUP BY route),
        told AS (
            SELECT k.*, u.usual_ms,
                   CASE WHEN delay_ms BETWEEN usual_ms / 2000 AND usual_ms / 500 THEN -1
                        WHEN delay_ms BETWEEN usual_ms * 500 AND usual_ms * 2000 THEN 1 ELSE 0 END AS side
            FROM known AS k JOIN usual AS u ON k.route = u.route WHERE u.usual_ms >= 1000
        )
        SELECT route, to_exchange, to_key, usual_ms, count(*) AS messages,
               count_if(side < 0) AS short, percentile_approx(if(side < 0, delay_ms, NULL), 0.5) AS short_ms,
               count_if(side > 0) AS long, percentile_approx(if(side > 0, delay_ms, NULL), 0.5) AS long_ms
        FROM told GROUP BY 1, 2, 3, 4 HAVING greatest(short, long) > 0
        ORDER BY greatest(short, long) DESC, 1, 2, 3 LIMIT {LISTED}""")
    return tuple(
        OddDelays(
            bytes(row.route), bytes(row.to_exchange), bytes(row.to_key), row.messages, max(row.short, row.long),
            row.short_ms if row.short >= row.long else row.long_ms, row.usual_ms,
        )
        for row in rows
    )  # fmt: skip
