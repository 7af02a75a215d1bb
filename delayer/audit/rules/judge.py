"""From rows to the report: the counting in one place, the judging in another. Pure.

Spark runs :func:`counted`, :func:`summarized` and the others on executors (delayer/audit/tallying.py), and comes here
with what is left; :func:`evidence_of` does the same over lists. A test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from delayer.audit.findings import Finding, LaneFigures, Report, RuleRun, Severity, Totals
from delayer.audit.rules import calendar, conservation, damage, keys, overdue, repeats, segments
from delayer.audit.rules.counting import counted, counted_segments
from delayer.audit.rules.damage import Damage
from delayer.audit.rules.evidence import Evidence
from delayer.audit.rules.keys import Claim
from delayer.audit.rules.message import HELD, PACKED, WAITING, Context, Lane, Message, Segment
from delayer.audit.rules.summary import merged, summarized
from delayer.audit.rules.tally import Key, Tally, combined
from delayer.store.status import KINDS, waiting

INTEGRITY: Final = "integrity"
RULES: Final = (
    conservation.RULE,
    segments.RULE,
    INTEGRITY,
    overdue.RULE,
    overdue.LANES,
    repeats.RULE,
    keys.RULE,
    calendar.RULE,
)
OF_THE_WHOLE: Final = frozenset({conservation.RULE, repeats.RULE, keys.RULE})
"""Rules that say nothing about a sample; and neither does the law of segments."""
LISTED: Final = 100
"""Findings of one rule that a report has, violations first."""


def evidence_of(
    messages: Iterable[Message],
    found: Iterable[Segment],
    claims: Iterable[Claim],
    context: Context,
    damaged: Iterable[Damage] = (),
) -> Evidence:
    """Everything counted, from rows in any order."""
    partials = sorted(counted(messages, context))
    summary = [*summarized(partials, context.now_ms), *counted_segments(found, context), *keys.judged(sorted(claims))]
    summary += summarized(sorted(damage.counted(damaged)), context.now_ms)
    return Evidence(merged(summary))


def report(
    evidence: Evidence,
    lanes: Iterable[Lane],
    counters: Mapping[tuple[int, str], int],
    context: Context,
    *,
    release_rate: float = calendar.RELEASE_RATE,
    sample: float | None = None,
    behind_ms: int = 0,
    seconds: float = 0.0,
) -> Report:
    """The report of one audit; ``counters`` by lane and kind. ``sample`` None: of the whole (as ``context`` says).
    ``behind_ms``: how far a replica was behind its primary."""
    known = {lane.number: lane for lane in lanes}
    figures = _figures(evidence, known, counters, whole=context.whole)
    coming = calendar.calendar(evidence, release_rate)
    found: dict[str, list[Finding]] = {
        segments.RULE: segments.findings(evidence),
        INTEGRITY: [*damage.findings(INTEGRITY, evidence, context), *_integrity(evidence)],
        overdue.RULE: overdue.findings(evidence, figures, context.paced),
        overdue.LANES: overdue.lane_findings(evidence, figures, frozenset(known), context.now_ms),
        calendar.RULE: calendar.findings(coming),
    }
    totals = _totals(evidence, figures)
    unread = damage.unread(evidence)
    if context.whole and "segment" not in unread:
        sums = [sum(lane.counters[kind] for lane in figures) for kind in ("compacted", "restored")]
        found[segments.RULE] += segments.law(totals.packed, sums[0], sums[1])
    of_the_whole: dict[str, Callable[[], list[Finding]]] = {
        conservation.RULE: lambda: conservation.findings(figures),
        repeats.RULE: lambda: repeats.findings(evidence),
        keys.RULE: lambda: keys.findings(evidence),
    }
    skipped = _skipped(context, unread)
    found |= {rule: judged() for rule, judged in of_the_whole.items() if rule not in skipped}
    listed = {rule: sorted(of, key=_weight)[:LISTED] for rule, of in found.items()}
    return Report(
        store_now_ms=context.now_ms,
        seconds=seconds,
        sample=sample,
        behind_ms=behind_ms,
        totals=totals,
        lanes=tuple(figures),
        calendar=coming,
        rules=tuple(
            _run(rule, found.get(rule, ()), len(listed.get(rule, ())), skipped.get(rule, "")) for rule in RULES
        ),
        findings=tuple(each for rule in RULES for each in listed.get(rule, ())),
    )


def _weight(found: Finding) -> tuple[bool, int, str]:
    return found.severity == "warning", -found.count, found.subject


def _run(rule: str, found: Sequence[Finding], listed: int, skipped: str) -> RuleRun:
    violations = sum(each.severity == "violation" for each in found)
    return RuleRun(rule, violations, len(found) - violations, skipped, unlisted=len(found) - listed)


def _skipped(context: Context, unread: Mapping[str, str]) -> dict[str, str]:
    """Which rules are not run, and why. Rows that the database could not read are no rows that are missing."""
    if not context.whole:
        return dict.fromkeys(OF_THE_WHOLE, "a sample was read: this is asked of the whole")
    found = {}
    for table, place in unread.items():
        why = f"table {table} could not be read as a whole ({place}): see integrity"
        if table == "message_key":
            found[keys.RULE] = why
        elif table == "held" or table in context.partitions or table == "message_default":
            found |= dict.fromkeys(OF_THE_WHOLE, why)
    return found


def _integrity(evidence: Evidence) -> list[Finding]:
    severity: Severity = "violation"
    return [
        Finding(
            INTEGRITY,
            severity,
            f"lane {key.number}, {key.first.decode()}: {key.second.decode()}",
            tally.messages,
            tally.first_due_ms,
            {"examples": list(tally.examples)},
        )
        for key, tally in evidence.of("fault")
    ]


def _figures(
    evidence: Evidence, known: Mapping[int, Lane], counters: Mapping[tuple[int, str], int], *, whole: bool
) -> list[LaneFigures]:
    """Every lane that the table of lanes, a counter or a row names. Of a sample ``packed`` is what was unpacked of it,
    as ``waiting`` is, and not what all segments say."""
    counts = {(key.number, key.first.decode()): tally.messages for key, tally in evidence.of("lane")}
    numbers = {*known, *(number for number, _ in counters), *(number for number, _ in counts)}
    numbers |= {key.number for key, _ in evidence.of("segments")}
    return [
        LaneFigures(
            number=number,
            owner=known[number].owner if number in known else "",
            alive=known[number].alive if number in known else False,
            counters={kind: counters.get((number, kind), 0) for kind in KINDS},
            waiting=counts.get((number, WAITING), 0),
            held=counts.get((number, HELD), 0),
            packed=evidence.messages(Key("packed", number)) if whole else counts.get((number, PACKED), 0),
        )
        for number in sorted(numbers)
    ]


def _totals(evidence: Evidence, lanes: list[LaneFigures]) -> Totals:
    size, coming = 0, None
    for key, tally in evidence.of("lane"):
        size += tally.size
        if key.first.decode() in (WAITING, PACKED):
            coming = tally if coming is None else combined(coming, tally)
    packed: list[Tally] = [tally for _, tally in evidence.of("segments")]
    return Totals(
        waiting=sum(lane.waiting for lane in lanes),
        expected=sum(waiting(lane.counters) for lane in lanes),
        held=sum(lane.held for lane in lanes),
        segments=sum(tally.messages for tally in packed),
        packed=sum(lane.packed for lane in lanes),
        size=size,
        packed_bytes=sum(tally.size for tally in packed),
        keyed=evidence.messages(Key("keyed")),
        first_due_ms=None if coming is None else coming.first_due_ms,
        last_due_ms=None if coming is None else coming.last_due_ms,
    )
