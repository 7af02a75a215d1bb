"""Conservation: everything that came in is out or still here, to the message. Pure."""

from __future__ import annotations

from delayer.audit.findings import Finding, LaneFigures
from delayer.store.status import waiting

RULE = "conservation"


def findings(lanes: list[LaneFigures]) -> list[Finding]:
    """parked + restored = released + cancelled + compacted + held + waiting, for each lane: held and waiting are
    counted row by row and compared with what the counters say. If it holds for each, it holds for all."""
    found = []
    for lane in lanes:
        for what, counters, rows in (
            ("waiting", waiting(lane.counters), lane.waiting),
            ("held", lane.counters["held"], lane.held),
        ):
            if rows != counters:
                details = {"expected": counters, "found": rows, "counters": dict(lane.counters)}
                found.append(
                    Finding(RULE, "violation", f"lane {lane.number}: {what}", abs(rows - counters), None, details)
                )
    return found
