"""Segments: does each read back, and do all of them hold what the counters say was compacted? Pure."""

from __future__ import annotations

from delayer.audit.findings import Finding, Severity
from delayer.audit.rules.evidence import Evidence
from delayer.audit.rules.message import Context, Segment

RULE = "segments"
UNREADABLE = "does not read back"
COUNT = "other messages came out than were packed"
MARKED = "a daemon could not restore it"
CANCELLED = "its count of cancelled messages is not that of its tombstones"
EMPTY = "all of its messages are cancelled, and it is still there"
ORPHANED = "tombstones of a segment that is not there"

_SEVERITY: dict[str, Severity] = {EMPTY: "warning", ORPHANED: "warning"}


def faults(segment: Segment, context: Context) -> tuple[str, ...]:
    """What is wrong with one segment. One that does not read back is not asked what came out of it."""
    if segment.lane is None:
        return (ORPHANED,) if context.whole else ()
    found = []
    if segment.fault is not None:
        found.append(UNREADABLE)
    elif segment.unpacked is not None and segment.unpacked != segment.messages:
        found.append(COUNT)
    elif segment.broken_ms is not None:
        found.append(MARKED)
    if segment.cancelled != segment.tombstones:
        found.append(CANCELLED)
    elif segment.cancelled >= segment.messages:
        found.append(EMPTY)
    return tuple(found)


def findings(evidence: Evidence) -> list[Finding]:
    """The segments' own faults, and the law: compacted - restored = live messages in segments, over all lanes."""
    found = []
    for key, tally in evidence.of("segment fault"):
        fault = key.first.decode()
        where, first = (f"lane {key.number}: ", tally.first_due_ms) if key.number >= 0 else ("", None)
        details = {"segments": list(tally.examples)}
        severity = _SEVERITY.get(fault, "violation")
        found.append(Finding(RULE, severity, where + fault, tally.messages, first, details))
    return found


def law(packed: int, compacted: int, restored: int) -> list[Finding]:
    """``packed``: live messages in all segments; the others are the sums of the counters."""
    expected = compacted - restored
    if packed == expected:
        return []
    details = {"expected": expected, "found": packed, "compacted": compacted, "restored": restored}
    return [Finding(RULE, "violation", "all segments: compacted - restored", abs(packed - expected), None, details)]
