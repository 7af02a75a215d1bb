"""Readiness and liveness as tables."""

from __future__ import annotations

from typing import Any

import pytest

from delayer.http.health import not_alive, not_ready
from delayer.store import schema
from delayer.store.admin.stats import LANE_KINDS, InboxCount, LaneOverview, StoreOverview
from delayer.store.segments.catalog import OverdueSegments
from tests.unit.http.states import LINE, overview, state

GOOD, OLD, NONE = overview(), overview("9999"), overview(None)
COUNTERS = dict.fromkeys(LANE_KINDS, 0)
LANES = [LaneOverview(n, "", n < 4, COUNTERS, 1, None, stuck_ms=(n - 1) * 40_000) for n in range(1, 5)]
DUE = {"delays": True, "delays.due": False}
BLOCKED, CUT = ({"publish": line} for line in (LINE._replace(blocked=True), LINE._replace(connected=False)))
STILL = "lane {} has had due messages for {}, and releases none"
UNCLAIMED = "lane 7 has settled no claim for 30 s"
UNSETTLED = "queue 'delays': nothing that was read from it was settled for 42 s"
STUCK = "nothing is delivered: "
PACKED = "compacted messages are due, and not restored: see `restoring interrupted` in the log"
UNREAD = "the SQL inbox is not read: a message in it was sent 42 s ago"
AWAY: dict[str, Any] = {"consuming": {"delays": False}}


@pytest.mark.parametrize(
    ("seen", "store", "reasons"),
    [
        (state(), GOOD, []),
        (state(**AWAY), GOOD, ["queue 'delays' is not consumed"]),
        (state(consuming={}), GOOD, ["queue 'delays' is not consumed"]),
        (state(usable=False), GOOD, ["no lane of the store is owned"]),
        # Lane 3 is another daemon's, and lane 4 is free.
        (state(), overview(lanes=LANES), [STILL.format(2, "40 s"), STILL.format(4, "2 min")]),
        (state(), None, ["the store is out of reach, or refuses us: connect: refused"]),
        (state(), OLD, [f"the store's schema is 9999, expected {schema.HEAD}"]),
        (state(), NONE, [f"the store's schema is missing, expected {schema.HEAD}"]),
        (state(stalled=["lane 3"]), GOOD, ["loop 'lane 3' stands still"]),
        # Native mode is ready without the store: the messages in it are released when the store is back.
        (state(mode="native", usable=False), None, []),
        (state(mode="native"), OLD, []),
        # But a lane may have messages with keys, and those parked before the mode was switched.
        (state(mode="native"), overview(lanes=LANES[:2]), [STILL.format(2, "40 s")]),
        (
            state(mode="native", refusal="the broker is not this store's"),
            None,
            ["nothing leaves the store: the broker is not this store's"],
        ),
        (state(mode="native", **AWAY), None, ["queue 'delays' is not consumed"]),
        (state(consuming=DUE), GOOD, ["queue 'delays.due' is not consumed"]),
        (state(stuck=[2, 7]), overview(lanes=LANES), [STILL.format(2, "40 s"), UNCLAIMED, STILL.format(4, "2 min")]),
        (state(unsettled={"delays": 42.0}), GOOD, [UNSETTLED]),
        (state(mode="native", unsettled={"delays": 42.0}), None, [UNSETTLED]),
        (state(unsteady={"delays": "no confirm"}), GOOD, ["queue 'delays': some messages cannot go on: no confirm"]),
        (state(), overview(late=OverdueSegments(1, 5, 9_999)), [PACKED]),
        (state(), overview(late=OverdueSegments(1, 5, 10_001)), []),
        (state(), overview(inbox=InboxCount(3, 42_000, read=False)), [UNREAD]),
        (state(mode="native"), overview(inbox=InboxCount(3, 42_000, read=False)), [UNREAD]),
        (state(), overview(inbox=InboxCount(3, 29_000, read=False)), []),
        (state(), overview(inbox=InboxCount(3, 42_000)), []),
        (state(), overview(inbox=None), []),
        (state(connections=BLOCKED), GOOD, [f"{STUCK}the broker accepts no publishes (a resource alarm)"]),
        (state(connections=CUT), GOOD, [f"{STUCK}no connection to publish by"]),
    ],
    ids=range(28),
)
def test_ready(seen: dict[str, Any], store: StoreOverview | None, reasons: list[str]) -> None:
    assert not_ready(seen, "delays", store, "connect: refused") == reasons


def test_a_stalled_loop_is_not_alive() -> None:
    assert not_alive(state()) == []
    assert not_alive(state(stalled=["delays", "lane 1"])) == [
        "loop 'delays' stands still",
        "loop 'lane 1' stands still",
    ]
