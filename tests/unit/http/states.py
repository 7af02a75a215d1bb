"""The state of a daemon, for tests of health, metrics and the page."""

from __future__ import annotations

from typing import Any

from delayer.core.counters import Counters
from delayer.http.view import ConnectionState, DaemonState
from delayer.store import schema
from delayer.store.admin.stats import InboxCount, LaneOverview, StoreOverview
from delayer.store.segments.catalog import OverdueSegments, SegmentTotals

LINE = ConnectionState(connected=True, blocked=False, connects=1)


def state(counters: Counters | None = None, **more: Any) -> DaemonState:
    """A healthy daemon in store mode."""
    healthy: dict[str, Any] = {
        "mode": "store",
        "routes": ["orders.in", "mail.in"],
        "started_ms": 1_800_000_000_000,
        "consuming": {"delays": True},
        "intake": "active",
        "connections": dict.fromkeys(("intake", "publish"), LINE),
        "store": True,
        "lanes": [1, 2, 7],
        "usable": True,
        "refusal": "",
        "stalled": [],
        "stuck": [],
        "unsettled": {},
        "unsteady": {},
        "topology": "",
        "restart_needed": [],
        "counters": counters or Counters(),
        "recent": [],
    }
    return DaemonState(**healthy | more)


def overview(
    found: str | None = schema.HEAD,
    lanes: list[LaneOverview] | None = None,
    packed: SegmentTotals | None = None,
    late: OverdueSegments | None = None,
    inbox: InboxCount | None = InboxCount(),  # noqa: B008 - a value
) -> StoreOverview:
    """The result of a query to the store."""
    packed, late = packed or SegmentTotals(), late or OverdueSegments()
    return StoreOverview(found, schema.HEAD, 10_000, lanes or [], packed, late, inbox)
