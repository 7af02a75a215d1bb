"""A summary of the history: how many messages were released, held and cancelled, and how late, by hour and by route."""

from __future__ import annotations

from typing import Final

from delayer.audit.extract import Extract
from delayer.audit.findings import Past, PastRow
from delayer.core.units import HOUR_MS

HOURS: Final = 31 * 24
"""The summary has this number of hours before the snapshot."""
ROUTES: Final = 10
"""Maximum number of routes, those with most messages."""

# Only a released message has a lateness. A message that was released early counts as on time.
_FIGURES: Final = """
count_if(what = 'released') AS released, count_if(what = 'held') AS held, count_if(what = 'cancelled') AS cancelled,
coalesce(percentile_approx(late, 0.5), 0) AS p50_ms, coalesce(percentile_approx(late, 0.99), 0) AS p99_ms,
coalesce(max(late), 0) AS worst_ms
"""
_ROWS: Final = "(SELECT *, if(what = 'released', greatest(late_ms, 0), NULL) AS late FROM history)"


def summarize(store: Extract) -> Past | None:
    """The summary of the extract's history; None if the history has no rows. Spark's errors pass."""
    [[first_ms, last_ms]] = store.rows("SELECT min(at_ms), max(at_ms) FROM history")
    if first_ms is None:
        return None
    return Past(
        first_ms=first_ms,
        last_ms=last_ms,
        whole=_rows(store, f"SELECT {_FIGURES} FROM {_ROWS}")[0],
        hours=_rows(
            store,
            f"SELECT at_ms - pmod(at_ms, {HOUR_MS}) AS start_ms, {_FIGURES} FROM {_ROWS}"
            f" WHERE at_ms >= {store.now_ms - HOURS * HOUR_MS} GROUP BY 1 ORDER BY 1",
        ),
        routes=_rows(
            store, f"SELECT route, {_FIGURES} FROM {_ROWS} GROUP BY route ORDER BY count(*) DESC, route LIMIT {ROUTES}"
        ),
    )


def _rows(store: Extract, sql: str) -> list[PastRow]:
    return [
        {name: bytes(value) if isinstance(value, bytearray) else value for name, value in row.asDict().items()}
        for row in store.rows(sql)
    ]
