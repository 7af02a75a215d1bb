"""Segments: does each read back, and do all of them hold what the counters say was compacted? Pure."""

from __future__ import annotations

from delayer.audit.findings import Finding, Severity
from delayer.audit.rules import damage
from delayer.audit.rules.evidence import Evidence
from delayer.audit.rules.message import Context, Segment

RULE = "segments"
UNREADABLE = "does not read back"
DUE = "its first and last due time are not those of its messages"
IDS = "its first and last id are not those of its messages: a cancel would miss them"
SIZE = "its messages have another size than it says"
LATE = "it was not restored in time"
MARKED = "a daemon could not restore it"
CANCELLED = "its count of cancelled messages is not that of its tombstones"
EMPTY = "all of its messages are cancelled, and it is still there"
FOREIGN = "it counts messages as cancelled that are not in it: it cannot be restored"
ORPHANED = "tombstones of a segment that is not there"

_SEVERITY: dict[str, Severity] = {EMPTY: "warning", ORPHANED: "warning"}


def faults(segment: Segment, context: Context) -> tuple[str, ...]:
    """What is wrong with one segment. One that does not read back is not asked what came out of it."""
    if segment.lane is None:
        return (ORPHANED,) if context.whole else ()
    live = segment.messages - segment.cancelled
    found = []
    if segment.fault is not None:
        found.append(UNREADABLE)
    elif segment.broken_ms is not None:
        found.append(MARKED)
    elif live > 0 and segment.first_due_ms < context.now_ms + context.restored_ms:
        found.append(LATE)
    found += _of_cancelled(segment, live)
    if segment.fault is None and segment.unpacked is not None:
        found += [fault for fault, said, came_out in _told(segment) if said != came_out]
    return tuple(found)


def _of_cancelled(segment: Segment, live: int) -> list[str]:
    if segment.cancelled != segment.tombstones:
        return [CANCELLED]
    if segment.live is not None and segment.live != live:
        return [FOREIGN]
    return [EMPTY] if live <= 0 else []


def _told(segment: Segment) -> tuple[tuple[str, object, object], ...]:
    """What it says of its messages, and what they are."""
    return (
        (
            DUE,
            (segment.first_due_ms, segment.last_due_ms),
            (segment.found_first_due_ms, segment.found_last_due_ms),
        ),
        (IDS, (segment.first_id, segment.last_id), (segment.found_first_id, segment.found_last_id)),
        (SIZE, segment.raw_bytes, segment.found_raw_bytes),
    )


def findings(evidence: Evidence) -> list[Finding]:
    """The segments' own faults, but for those that damage to one of the two tables would explain."""
    found = []
    unread = damage.unread(evidence)
    for key, tally in evidence.of("segment fault"):
        fault = key.first.decode()
        if (fault == ORPHANED and "segment" in unread) or (fault == CANCELLED and "segment_cancelled" in unread):
            continue
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
