"""From rows to the report: the counting in one place, the judging in another. Pure.

Spark runs :func:`counted`, :func:`summarized` and the others on executors (delayer/audit/judging.py), and comes here
with what is left; :func:`evidence_of` does the same over lists. A test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from delayer.audit.findings import (
    Bar,
    Calendar,
    Finding,
    LaneFigures,
    Peak,
    Report,
    RuleRun,
    Severity,
    Share,
    Totals,
)
from delayer.audit.rules import checks
from delayer.audit.rules.checks import Claim, Damage
from delayer.audit.rules.counting import SECOND_MS, WIDTHS, counted, counted_segments, merged, summarized
from delayer.audit.rules.model import (
    HELD,
    PACKED,
    WAITING,
    Context,
    Evidence,
    Key,
    Lane,
    Message,
    Segment,
    Tally,
    combined,
)
from delayer.store.admin.stats import KINDS, waiting

PEAKS: Final = "peaks"
RELEASE_RATE: Final = 14_000.0
"""Messages a second that one daemon released on two cores shared with broker and database, 512 bytes each
(docs/performance.md). Whoever knows the own rate says so."""
_UNITS: Final = {"second": SECOND_MS, "minute": WIDTHS["minute"].ms, "hour": WIDTHS["hour"].ms}


def calendar_of(evidence: Evidence, release_rate: float) -> Calendar:
    """``release_rate`` in messages a second. Raises ValueError unless it is above zero."""
    if not release_rate > 0:
        raise ValueError(f"release rate: expected messages a second, more than 0, found {release_rate:g}")
    return Calendar(
        release_rate=release_rate,
        minutes=_bars(evidence, "minute"),
        hours=_bars(evidence, "hour"),
        days=_bars(evidence, "day"),
        peaks=_peaks(evidence, release_rate),
        routes=_shares(evidence, "route"),
        routes_more=evidence.more("route"),
        destinations=_shares(evidence, "target"),
        destinations_more=evidence.more("target"),
    )


def peak_findings(calendar: Calendar) -> list[Finding]:
    """Peaks that take longer than SLOW_SECONDS."""
    # A peak that takes longer than this to release is worth a warning: the last of its messages are that late.
    return [
        Finding(
            PEAKS,
            "warning",
            f"{instant(peak.start_ms)}: {peak.messages:,} due in {peak.width_ms // 1000:,} s",
            peak.messages,
            peak.start_ms,
            {"drain_seconds": peak.drain_seconds, "release_rate": calendar.release_rate},
        )
        for peak in calendar.peaks
        if peak.drain_seconds - peak.width_ms / 1000 > 60.0
    ]


def instant(ms: int) -> str:
    """RFC 3339 where the year has four digits."""
    if not 0 <= ms <= 253_402_300_799_000:
        return f"{ms} ms"
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _bars(evidence: Evidence, name: str) -> tuple[Bar, ...]:
    width = WIDTHS[name].ms
    return tuple(
        Bar(key.number * width, width, tally.messages, tally.size) for key, tally in evidence.of(f"{name} bar")
    )


def _peaks(evidence: Evidence, rate: float) -> tuple[Peak, ...]:
    """The PEAKS fullest seconds, minutes and hours, those first that take longest beyond their own width. A minute is
    listed only if it has much more than each listed second of it, or every peak would be there three times."""
    found: list[Peak] = []
    for name, width in _UNITS.items():
        for key, tally in evidence.of(name):
            start = key.number * width
            inside = (p.messages for p in found if start <= p.start_ms < start + width)
            if 2 * max(inside, default=0) < tally.messages:
                found.append(Peak(start, width, tally.messages, tally.size, round(tally.messages / rate, 3)))
    found.sort(key=lambda peak: (peak.width_ms / 1000 - peak.drain_seconds, peak.start_ms))
    return tuple(found)


def _shares(evidence: Evidence, kind: str) -> tuple[Share, ...]:
    return tuple(
        Share(tally.messages, tally.size, tally.first_due_ms, tally.last_due_ms, key.first)
        if kind == "route"
        else Share(
            tally.messages,
            tally.size,
            tally.first_due_ms,
            tally.last_due_ms,
            exchange=key.first,
            routing_key=key.second,
        )
        for key, tally in evidence.of(kind)
    )


INTEGRITY: Final = "integrity"
RULES: Final = (
    checks.CONSERVATION,
    checks.SEGMENTS,
    INTEGRITY,
    checks.OVERDUE,
    checks.LANES,
    checks.REPEATS,
    checks.KEYS,
    PEAKS,
)
OF_THE_WHOLE: Final = frozenset({checks.CONSERVATION, checks.REPEATS, checks.KEYS})
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
    summary = [
        *summarized(partials, context.now_ms),
        *counted_segments(found, context),
        *checks.judged_claims(sorted(claims)),
    ]
    summary += summarized(sorted(checks.counted_damage(damaged)), context.now_ms)
    return Evidence(merged(summary))


def report(
    evidence: Evidence,
    lanes: Iterable[Lane],
    counters: Mapping[tuple[int, str], int],
    context: Context,
    *,
    release_rate: float = RELEASE_RATE,
    sample: float | None = None,
    behind_ms: int = 0,
    seconds: float = 0.0,
) -> Report:
    """The report of one audit; ``counters`` by lane and kind. ``sample`` None: of the whole (as ``context`` says).
    ``behind_ms``: how far a replica was behind its primary."""
    known = {lane.number: lane for lane in lanes}
    figures = _figures(evidence, known, counters, whole=context.whole)
    coming = calendar_of(evidence, release_rate)
    found: dict[str, list[Finding]] = {
        checks.SEGMENTS: checks.segment_findings(evidence),
        INTEGRITY: [*checks.damage_findings(INTEGRITY, evidence, context), *_integrity(evidence)],
        checks.OVERDUE: checks.overdue_findings(evidence, figures, context.paced),
        checks.LANES: checks.lane_findings(evidence, figures, frozenset(known), context.now_ms),
        PEAKS: peak_findings(coming),
    }
    totals = _totals(evidence, figures)
    unread = checks.unread_tables(evidence)
    if context.whole and "segment" not in unread:
        sums = [sum(lane.counters[kind] for lane in figures) for kind in ("compacted", "restored")]
        found[checks.SEGMENTS] += checks.segment_law(totals.packed, sums[0], sums[1])
    of_the_whole: dict[str, Callable[[], list[Finding]]] = {
        checks.CONSERVATION: lambda: checks.conservation_findings(figures),
        checks.REPEATS: lambda: checks.repeat_findings(evidence),
        checks.KEYS: lambda: checks.key_findings(evidence),
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
            found[checks.KEYS] = why
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
