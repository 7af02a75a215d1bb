"""Reports from the history: lateness by route and hour, peak releases against the forecast, destinations that get
worse, and delays that a publisher may have set in the wrong unit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from delayer.audit.extract import Extract
from delayer.audit.findings import Bar, Calendar, Past, PastRow
from delayer.core.units import DAY_MS, HOUR_MS, MINUTE_MS

HOURS: Final = 31 * 24
"""Hours before the snapshot that the report covers, for all routes together and for each listed route."""
ROUTES: Final = 10
"""Maximum number of routes in the report, largest first."""
LISTED: Final = 20
"""Maximum number of destinations per list."""
FEWEST: Final = 20
"""Compare two spans of a destination only if each has this many released or held messages."""

# Only a released message has a lateness, unless it was due when it was parked. One released early counts as on time.
_FIGURES: Final = """
count_if(what = 'released') AS released, count_if(what = 'held') AS held, count_if(what = 'cancelled') AS cancelled,
coalesce(percentile_approx(late, 0.5), 0) AS p50_ms, coalesce(percentile_approx(late, 0.99), 0) AS p99_ms,
coalesce(max(late), 0) AS worst_ms
"""
_ROWS: Final = f"""
(SELECT *, at_ms - pmod(at_ms, {HOUR_MS}) AS hour_ms,
        if(what = 'released' AND coalesce(delay_ms, 1) > 0, greatest(late_ms, 0), NULL) AS late
 FROM history)
"""


def build_history_report(store: Extract, forecast: Calendar) -> Past | None:
    """Report on the extract's history; None if it has no rows. Lets Spark's errors pass."""
    whole = _rows(store, f"SELECT min(at_ms) AS start_ms, {_FIGURES}, max(at_ms) AS last_ms FROM {_ROWS}")[0]
    first_ms, last_ms = whole["start_ms"], whole.pop("last_ms")
    if first_ms is None:
        return None
    recent = f"hour_ms >= {store.now_ms - HOURS * HOUR_MS}"
    largest = _rows(
        store,
        f"SELECT route, {first_ms} AS start_ms, {_FIGURES} FROM {_ROWS}"
        f" GROUP BY route ORDER BY count(*) DESC, route LIMIT {ROUTES}",
    )
    listed = ", ".join(f"X'{row['route'].hex()}'" for row in largest)
    of_routes: dict[bytes, list[PastRow]] = {row["route"]: [] for row in largest}
    for row in _rows(
        store,
        f"SELECT route, hour_ms AS start_ms, {_FIGURES} FROM {_ROWS} WHERE {recent} AND route IN ({listed})"
        " GROUP BY 1, 2 ORDER BY 1, 2",
    ):
        of_routes[row.pop("route")].append(row)
    return Past(
        first_ms=first_ms,
        last_ms=last_ms,
        whole=whole,
        hours=_rows(store, f"SELECT hour_ms AS start_ms, {_FIGURES} FROM {_ROWS} WHERE {recent} GROUP BY 1 ORDER BY 1"),
        routes=[{"route": (of := row.pop("route")), "whole": row, "hours": of_routes[of]} for row in largest],
        capacity=[_capacity(store, forecast, width) for width in (1_000, MINUTE_MS, HOUR_MS)],
        worse=_rows(store, _WORSE.format(store.now_ms - DAY_MS)),
        odd=_rows(store, _ODD),
    )


def _rows(store: Extract, sql: str) -> list[dict[str, Any]]:
    return [
        {name: bytes(value) if isinstance(value, bytearray) else value for name, value in row.asDict().items()}
        for row in store.rows(sql)
    ]


def _capacity(store: Extract, forecast: Calendar, width: int) -> PastRow:
    """Find the most messages released, and the most due, within a span of ``width`` ms."""
    rows = store.rows(f"""
        SELECT at_ms - pmod(at_ms, {width}) AS start_ms, count(*) AS messages FROM history WHERE what = 'released'
        GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT 1""")
    known: Iterable[Any] = (*forecast.peaks, *forecast.minutes, *forecast.hours)
    coming = max((one for one in known if one.width_ms == width), key=lambda one: one.messages, default=None)
    return {
        "width_ms": width,
        "released": Bar(rows[0].start_ms, width, rows[0].messages, 0) if rows else None,
        "coming": Bar(coming.start_ms, width, coming.messages, coming.size) if coming is not None else None,
    }


# Destinations whose last day is worse than before: their share of held messages doubled and is at least 1 %, or their
# 99th percentile of lateness doubled and is at least a second.
_WORSE: Final = f"""
WITH spans AS (
    SELECT to_exchange, to_key, at_ms >= {{}} AS recent, {_FIGURES}
    FROM {_ROWS} GROUP BY 1, 2, 3 HAVING count_if(what <> 'cancelled') >= {FEWEST}
), told AS (
    SELECT n.to_exchange, n.to_key, n.released + n.held AS messages,
           round(b.held / (b.released + b.held), 4) AS held_before,
           round(n.held / (n.released + n.held), 4) AS held_now, b.p99_ms AS p99_before_ms, n.p99_ms AS p99_now_ms
    FROM spans AS n JOIN spans AS b ON n.to_exchange = b.to_exchange AND n.to_key = b.to_key
    WHERE n.recent AND NOT b.recent
)
SELECT * FROM told
WHERE held_now >= greatest(0.01, 2 * held_before) OR p99_now_ms >= greatest(1000, 2 * p99_before_ms)
ORDER BY messages DESC, to_exchange, to_key LIMIT {LISTED}
"""
# Destinations whose delays are a thousandth of the route's median (seconds in a milliseconds field), or a thousand
# times the median, within a factor of two. Skips routes with a median below a second.
_ODD: Final = f"""
WITH known AS (SELECT * FROM history WHERE delay_ms > 0),
usual AS (SELECT route, percentile_approx(delay_ms, 0.5) AS usual_ms FROM known GROUP BY route),
told AS (
    SELECT k.*, u.usual_ms,
           CASE WHEN delay_ms BETWEEN usual_ms / 2000 AND usual_ms / 500 THEN -1
                WHEN delay_ms BETWEEN usual_ms * 500 AND usual_ms * 2000 THEN 1 ELSE 0 END AS side
    FROM known AS k JOIN usual AS u ON k.route = u.route WHERE u.usual_ms >= 1000
), found AS (
    SELECT route, to_exchange, to_key, usual_ms, count(*) AS messages,
           count_if(side < 0) AS short, percentile_approx(if(side < 0, delay_ms, NULL), 0.5) AS short_ms,
           count_if(side > 0) AS long, percentile_approx(if(side > 0, delay_ms, NULL), 0.5) AS long_ms
    FROM told GROUP BY 1, 2, 3, 4
)
SELECT route, to_exchange, to_key, messages, greatest(short, long) AS odd,
       if(short >= long, short_ms, long_ms) AS odd_ms, usual_ms
FROM found WHERE greatest(short, long) > 0 ORDER BY odd DESC, route, to_exchange, to_key LIMIT {LISTED}
"""
