"""Conservation: everything that came in is out or still here, to the message. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from delayer.audit.findings import Finding, LaneFigures
from delayer.store.status import KINDS, waiting

RULE = "conservation"


def findings(lanes: list[LaneFigures]) -> list[Finding]:
    """parked + restored = released + cancelled + compacted + held + waiting, for each lane: held and waiting are
    counted row by row and compared with what the counters say. If it holds for each, it holds for all; if not, all of
    them together say whether messages are missing, or only in another lane than the counters have them in."""
    found: list[Finding] = []
    for lane in lanes:
        found += _off(f"lane {lane.number}", lane.waiting, lane.held, lane.counters)
    if found and len(lanes) > 1:
        counters = {kind: sum(lane.counters[kind] for lane in lanes) for kind in KINDS}
        found += _off("all lanes", sum(lane.waiting for lane in lanes), sum(lane.held for lane in lanes), counters)
    return found


def _off(where: str, waits: int, held: int, counters: Mapping[str, int]) -> Iterator[Finding]:
    for what, expected, rows in (("waiting", waiting(counters), waits), ("held", counters["held"], held)):
        if rows != expected:
            details = {"expected": expected, "found": rows, "counters": dict(counters)}
            yield Finding(RULE, "violation", f"{where}: {what}", abs(rows - expected), None, details)
