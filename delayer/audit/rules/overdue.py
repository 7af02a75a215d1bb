"""Overdue: messages whose due instant has passed, and lanes that nobody owns. Pure.

A held message's due time has passed by its nature: of these it is asked when they were to be tried again. Messages of a
route with ``max_rate`` wait past their time because somebody limited it: worth a word, and how long they will take.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from delayer.audit.findings import Finding, LaneFigures, Severity, shown
from delayer.audit.rules.evidence import Evidence
from delayer.audit.rules.message import GRACE_MS, HELD, PACED, PACKED, STUCK_MS, WAITING
from delayer.audit.rules.tally import Tally, combined

RULE, LANES = "overdue", "lanes"
_AGES: Final = (
    (7 * 86_400_000, "7 d"),
    (86_400_000, "1 d"),
    (STUCK_MS, "1 h"),
    (600_000, "10 min"),
    (GRACE_MS, "1 min"),
)
ADOPTED_MS: Final = 60_000
"""Daemons adopt a lane at least 120 s before something in it is due (store/outlook.py); half of that was enough."""
STUCK: Final = frozenset(name for age, name in _AGES if age >= STUCK_MS)
_ROUTES = 5
_SUBJECTS: Final = {
    WAITING: "lane {}",
    PACKED: "segments of lane {}",
    PACED: "lane {}: of routes with max_rate",
    HELD: "lane {}: held, and not tried again in time",
}


def age(due_ms: int, now_ms: int) -> str | None:
    """For how long at least it is overdue; None if it is not worth a word."""
    late = now_ms - due_ms
    if late < GRACE_MS:
        return None
    return next(name for least, name in _AGES if late >= least)


def findings(evidence: Evidence, lanes: list[LaneFigures], paced: Mapping[bytes, int]) -> list[Finding]:
    """Overdue messages: of a lane without an owner nobody will release them. Those with an owner may be on their way:
    a violation only from STUCK_MS on. Segments are restored by any daemon, so one owner anywhere will do for them."""
    alive: dict[int, bool | None] = {lane.number: lane.alive for lane in lanes}
    anybody = any(alive.values()) or (None if None in alive.values() else False)
    found = []
    for (number, where), ages in sorted(_by_lane(evidence).items()):
        owned = anybody if where == PACKED else alive.get(number, False)
        total = _sum(ages)
        stuck = owned is False or (where != PACED and any(name in STUCK for name in ages))
        details = {"ages": {name: ages[name].messages for _, name in _AGES if name in ages}, "owned": owned}
        if where in (WAITING, PACED):
            routes = evidence.overdue_routes(number, where)[:_ROUTES]
            details["routes"] = {shown(name): count for name, count in routes}
        if where == PACED:
            rates = {name: paced[name] for name, _ in routes if name in paced}
            details["max_rate"] = {shown(name): rate for name, rate in rates.items()}
        subject = _SUBJECTS[where].format(number)
        severity: Severity = "violation" if stuck else "warning"
        found.append(Finding(RULE, severity, subject, total.messages, total.first_due_ms, details))
    return found


def lane_findings(evidence: Evidence, lanes: list[LaneFigures], known: frozenset[int], now_ms: int) -> list[Finding]:
    """Lanes that need an owner and have none: daemons adopt them in time, if there are any. What is due later may well
    wait in a lane without one. A lane without a row in the table of lanes is never adopted."""
    found = []
    for lane in lanes:
        first = evidence.first_due(lane.number)
        if lane.number not in known:
            if count := lane.waiting + lane.held:
                subject = f"lane {lane.number}: not in the table of lanes"
                found.append(Finding(LANES, "violation", subject, count, first))
        elif lane.alive is False and first is not None and first <= now_ms + ADOPTED_MS:
            details = {"last_owner": lane.owner}
            subject = f"lane {lane.number}: no owner, and messages are due"
            found.append(Finding(LANES, "warning", subject, lane.waiting, first, details))
    return found


def _by_lane(evidence: Evidence) -> dict[tuple[int, str], dict[str, Tally]]:
    found: dict[tuple[int, str], dict[str, Tally]] = {}
    for key, tally in evidence.of("overdue"):
        found.setdefault((key.number, key.first.decode()), {})[key.second.decode()] = tally
    return found


def _sum(ages: dict[str, Tally]) -> Tally:
    first, *rest = ages.values()
    for tally in rest:
        first = combined(first, tally)
    return first
