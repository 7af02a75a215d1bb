"""The report about destinations, from the broker's answers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Final

from delayer.audit.findings import Finding, Report, Severity, Share, run_of, shown
from delayer.broker.route_check import Asked, Route, Target, Verdict

RULE: Final = "destinations"
NAMED: Final = 20
"""Keys of one exchange that get a finding each, the soonest due first. The others share one finding, because an
application with order numbers as keys has millions."""

_Row = tuple[Target, Route]


def with_destinations(report: Report, asked: Asked) -> Report:
    """The report with the rule "destinations" in it: its findings, its line among the rules, and a verdict in each row
    of the calendar's destinations."""
    run, listed = run_of(RULE, findings(asked.routes), _skipped(asked))
    answers = {(target.exchange, target.routing_key): answer for target, answer in asked.routes}
    rows = tuple(_judged(share, answers) for share in report.calendar.destinations)
    return replace(
        report,
        calendar=replace(report.calendar, destinations=rows),
        rules=(*(one for one in report.rules if one.rule != RULE), run),
        findings=(*(one for one in report.findings if one.rule != RULE), *listed),
    )


def findings(routes: Iterable[_Row]) -> list[Finding]:
    """Violations for messages that would be held. Warnings for messages that only an alternate exchange would take, and
    for destinations whose messages are all held already."""
    told = [(target, answer) for target, answer in routes if answer.verdict.bad or answer.verdict is Verdict.ALTERNATE]
    told.sort(key=lambda row: (row[1].verdict.value, row[0].exchange, row[0].first_due_ms, row[0].routing_key))
    found: list[Finding] = []
    for (verdict, exchange), group in groupby(told, key=lambda row: (row[1].verdict, row[0].exchange)):
        rows = list(group)
        if exchange and verdict in (Verdict.MISSING, Verdict.CLOSED):
            found.append(_finding(f"exchange {_quoted(exchange)}", rows))
            continue
        found += [_finding(subject(target.exchange, target.routing_key), [(target, a)]) for target, a in rows[:NAMED]]
        if rest := rows[NAMED:]:
            where = f"exchange {_quoted(exchange)}" if exchange else "default exchange"
            found.append(_finding(f"{where}, {len(rest):,} more routing keys", rest))
    severity = {"violation": 0, "warning": 1}
    return sorted(found, key=lambda one: (severity[one.severity], one.first_due_ms or 0, one.subject))


def subject(exchange: bytes, key: bytes) -> str:
    """A destination in words."""
    if not exchange:
        return f"queue {_quoted(key)}"
    return f"exchange {_quoted(exchange)}, key {_quoted(key)}"


def _finding(subject: str, rows: Sequence[_Row]) -> Finding:
    verdict, way = rows[0][1].verdict, rows[0][1].way
    messages, held = sum(target.messages for target, _ in rows), sum(target.held for target, _ in rows)
    severity: Severity = "violation" if verdict.bad and held < messages else "warning"
    details: dict[str, Any] = {"verdict": verdict.value, "why": way}
    if held:
        details["held_already"] = held
    if len(rows) > 1:
        details["keys"] = len(rows)
        details["routing_keys"] = [shown(target.routing_key) for target, _ in rows[:10]]
    return Finding(RULE, severity, subject, messages, min(target.first_due_ms for target, _ in rows), details)


def _judged(share: Share, answers: dict[tuple[bytes, bytes], Route]) -> Share:
    answer = answers.get((share.exchange, share.routing_key), Route(Verdict.NOT_ASKED))
    return replace(share, verdict=answer.verdict.value, way=answer.way)


def _skipped(asked: Asked) -> str:
    """The questions without an answer, and why; empty if every question has its answer."""
    counts = asked.counts
    parts = []
    for verdict in (Verdict.NOT_ASKED, Verdict.UNKNOWN, Verdict.DEPENDS):
        if verdict.value in counts:
            parts.append(f"{verdict.value} for {counts[verdict.value]:,} of {sum(counts.values()):,} messages")
    return "; ".join([*parts, *asked.remarks])


def _quoted(name: bytes) -> str:
    return f'"{shown(name)}"'
