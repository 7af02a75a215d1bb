"""The audit's rules. Each rule queries the extract in SQL and turns the rows into findings.

docs/backlog.md explains each rule and its violations. Spark's tasks count the messages, so results have few rows. The
rule "destinations" runs last, when the broker has answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from delayer.audit import faults
from delayer.audit.coming import calendar, peaks
from delayer.audit.errors import JobMisused
from delayer.audit.extract import AuditedStore, Extract
from delayer.audit.findings import (
    HELD,
    PACKED,
    WAITING,
    AuditReport,
    Finding,
    LaneFigures,
    RuleRun,
    Severity,
    Share,
    Totals,
    run_of,
)
from delayer.broker.route_check import CheckedTarget, RouteVerdict, RouteVerdicts, Verdict
from delayer.core.message import as_text
from delayer.core.readable import counted
from delayer.core.units import HOUR_MS, MINUTE_MS
from delayer.store.admin.stats import LANE_KINDS, waiting_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from delayer.audit.job import Options
    from delayer.config.model import AuditRuleTable

GRACE_MS: Final = MINUTE_MS
"""A message counts as overdue only after this time, because its release may be under way until then."""
STUCK_MS: Final = HOUR_MS
"""An overdue message is a violation after this time, even if its lane has an owner."""
TAKEN_MS: Final = MINUTE_MS
"""A free lane is a finding if a message is due within this time. Daemons acquire such a lane within 10 s."""
EXAMPLES: Final = 5
"""Maximum number of ids that a finding names."""

CONSERVATION, SEGMENTS, INTEGRITY, OVERDUE = "conservation", "segments", "integrity", "overdue"
LANES, REPEATS, KEYS, SCHEDULES, INBOX, PEAKS = "lanes", "repeats", "keys", "schedules", "inbox", "peaks"
RULES: Final = (CONSERVATION, SEGMENTS, INTEGRITY, OVERDUE, LANES, REPEATS, KEYS, SCHEDULES, INBOX, PEAKS)
BY_MESSAGE: Final = (INTEGRITY, OVERDUE, REPEATS, KEYS)
"""The rules that need every message."""


def judge(store: Extract, options: Options) -> AuditReport:
    """Judge an extract. Lets Spark's errors pass."""
    places = store.rows("""
        SELECT lane, kind, count(*) AS messages, count(key) AS keyed, sum(size) AS size,
               min(due_ms) AS first_due_ms, max(due_ms) AS last_due_ms
        FROM messages GROUP BY lane, kind""")
    of_segments = store.rows("""
        SELECT lane, count(*) AS segments, sum(messages) AS packed, sum(packed_bytes) AS packed_bytes
        FROM segment GROUP BY lane""")
    packed = {row.lane: row.packed for row in of_segments}
    if not store.whole:  # Sum the unpacked messages, not the headers of all segments.
        packed = {place.lane: place.messages for place in places if place.kind == PACKED}
    figures = figures_of(store, places, packed)
    totals = totals_of(figures, places, of_segments)
    coming = calendar(store, options.release_rate)
    first_due = {place.lane: place.first_due_ms for place in places if place.kind == WAITING}
    whole = store.whole
    found = {
        CONSERVATION: conservation(figures) if whole else [],
        SEGMENTS: [*segments(store, options.restored_ms), *(law_of_segments(figures) if whole else [])],
        INTEGRITY: integrity(store),
        OVERDUE: overdue(store, figures, options.paced),
        LANES: lanes(store, figures, first_due),
        REPEATS: repeats(store) if whole else [],
        KEYS: keys(store) if whole else [],
        SCHEDULES: schedules(store),
        INBOX: inbox(store),
        PEAKS: peaks(coming),
        **{rule.name: own(store, rule) for rule in options.own_rules},
    }
    skipped = {}
    if coming.unread:
        unread = f"{counted(coming.unread, 'message')} in unreadable segments"
        skipped = dict.fromkeys((*BY_MESSAGE, *(rule.name for rule in options.own_rules)), unread)
        skipped[PEAKS] = "within unreadable segments, whose messages count evenly for each of their hours"
    if not whole:
        why = "a sample was read, and this rule needs the whole store"
        skipped |= dict.fromkeys((CONSERVATION, REPEATS, KEYS), why)
    sample = None if whole else store.sample
    return AuditReport(
        store.now_ms, 0.0, sample, totals, tuple(figures), coming, *ruled(found, skipped), behind_ms=store.behind_ms
    )


def ruled(
    found: Mapping[str, Iterable[Finding]], skipped: Mapping[str, str]
) -> tuple[tuple[RuleRun, ...], tuple[Finding, ...]]:
    """Split what was found into rule runs and findings. ``skipped``: by rule, why it was skipped."""
    runs = [run_of(rule, some, skipped.get(rule, "")) for rule, some in found.items()]
    return tuple(run for run, _ in runs), tuple(one for _, some in runs for one in some)


def figures_of(store: AuditedStore, places: Iterable[Any], packed: Mapping[int, int]) -> list[LaneFigures]:
    """Build the figures of every lane that the lane table, a counter or a row names. ``places``: rows of lane, kind and
    messages. ``packed``: live messages in each lane's segments."""
    known = {lane.number: lane for lane in store.lanes}
    counts = {(place.lane, place.kind): place.messages for place in places}
    numbers = {*known, *packed, *(number for number, _ in store.counters), *(number for number, _ in counts)}
    return [
        LaneFigures(
            number=number,
            owner=known[number].owner if number in known else "",
            alive=known[number].alive if number in known else False,
            counters={kind: store.counters.get((number, kind), 0) for kind in LANE_KINDS},
            waiting=counts.get((number, WAITING), 0),
            held=counts.get((number, HELD), 0),
            packed=packed.get(number, 0),
        )
        for number in sorted(numbers)
    ]


def totals_of(figures: Iterable[LaneFigures], places: Sequence[Any], of_segments: Iterable[Any]) -> Totals:
    """Sum ``places`` (lane, kind, messages, keyed, size, first_due_ms, last_due_ms) and ``of_segments``."""
    coming = [place for place in places if place.kind != HELD]
    return Totals(
        waiting=sum(lane.waiting for lane in figures),
        expected=sum(waiting_of(lane.counters) for lane in figures),
        held=sum(lane.held for lane in figures),
        segments=sum(row.segments for row in of_segments),
        packed=sum(lane.packed for lane in figures),
        size=sum(place.size for place in places),
        packed_bytes=sum(row.packed_bytes for row in of_segments),
        keyed=sum(place.keyed for place in places),
        first_due_ms=min((place.first_due_ms for place in coming), default=None),
        last_due_ms=max((place.last_due_ms for place in coming), default=None),
    )


def _found(
    store: Extract,
    rule: str,
    rows: str,
    severity: Severity = "violation",
    *,
    step: str = "",
    examples: str = "examples",
) -> list[Finding]:
    """Make a finding of each row (subject, fault, messages, due_ms, id) of a query. Its details list the lowest ids
    under ``examples``. ``step`` replaces the fault's next step."""
    told = store.rows(f"""
        SELECT subject, min(fault) AS fault, sum(messages) AS messages, min(due_ms) AS first_due_ms,
               array_sort(collect_set(CASE WHEN nth <= {EXAMPLES} THEN id END)) AS examples
        FROM (SELECT *, row_number() OVER (PARTITION BY subject ORDER BY id) AS nth FROM ({rows}))
        WHERE subject IS NOT NULL GROUP BY subject""")
    return [
        Finding(
            rule, severity, one.subject, one.messages, one.first_due_ms, {examples: one.examples},
            step or faults.NEXT[one.fault],
        )
        for one in told
    ]  # fmt: skip


OWN_COLUMNS: Final = "CAST(subject AS STRING) AS subject, CAST(id AS BIGINT) AS id, CAST(due_ms AS BIGINT) AS due_ms"


def own(store: Extract, rule: AuditRuleTable) -> list[Finding]:
    rows = f"SELECT {OWN_COLUMNS}, '' AS fault, 1 AS messages FROM ({rule.sql})"
    return _found(store, rule.name, rows, rule.severity, step=rule.next or "See the rule in the configuration.")


def check_own(spark: SparkSession, rules: Sequence[AuditRuleTable]) -> None:
    """Check the users' rules on empty views, before any data is read. Raises JobMisused."""
    from pyspark.errors import PySparkException  # noqa: PLC0415 - needs the extra

    names = [*RULES, DESTINATIONS]
    for rule in rules:
        if rule.name in names:
            raise JobMisused(f"audit.rule {rule.name}: expected a name that no other rule has")
        names.append(rule.name)
        try:
            spark.sql(f"SELECT {OWN_COLUMNS} FROM ({rule.sql})").schema  # noqa: B018 - plans the query
        except PySparkException as error:
            reason = next(iter(str(error).strip().splitlines()), "no reason given")
            raise JobMisused(
                f"audit.rule {rule.name}: expected a SELECT with subject, id and due_ms. Spark says: {reason}"
            ) from None


def conservation(figures: list[LaneFigures]) -> list[Finding]:
    """Check that parked + restored = released + cancelled + compacted + held + waiting, for each lane. Held and waiting
    rows are counted, the rest are counters. If only the sum of all lanes agrees, no message is missing, but some are in
    another lane than the counters say."""
    found = [one for lane in figures for one in _off(f"lane {lane.number}", lane.waiting, lane.held, lane.counters)]
    if found and len(figures) > 1:
        counters = {kind: sum(lane.counters[kind] for lane in figures) for kind in LANE_KINDS}
        found += _off("all lanes", sum(lane.waiting for lane in figures), sum(lane.held for lane in figures), counters)
    return found


def _off(where: str, waits: int, held: int, counters: Mapping[str, int]) -> Iterator[Finding]:
    for what, expected, rows in (("waiting", waiting_of(counters), waits), ("held", counters["held"], held)):
        if rows != expected:
            details = {"expected": expected, "found": rows, "counters": dict(counters)}
            step = faults.NEXT[faults.FEWER if rows < expected else faults.MORE]
            yield Finding(CONSERVATION, "violation", f"{where}: {what}", abs(rows - expected), None, details, step)


def segments(store: Extract, restored_ms: int) -> list[Finding]:
    """Compare the headers of segments with their unpacked messages."""
    rows = f"""
        WITH found AS (
            SELECT segment, max(if(id IS NULL, get(faults, 0), NULL)) AS unreadable,
                   array_sort(collect_list(id)) AS ids, min(due_ms) AS first_due_ms, max(due_ms) AS last_due_ms,
                   sum(size) AS raw_bytes
            FROM segment_message GROUP BY segment
        ), joined AS (
            SELECT s.id, s.lane, s.first_due_ms AS due_ms, s.broken_ms, s.messages, f.unreadable,
                   f.first_due_ms < s.first_due_ms OR f.last_due_ms > s.last_due_ms OR s.cancelled = 0
                       AND (f.first_due_ms > s.first_due_ms OR f.last_due_ms < s.last_due_ms) AS other_due,
                   array_sort(s.ids) <> f.ids AS other_ids,
                   s.raw_bytes <> f.raw_bytes AS other_size
            FROM segment AS s LEFT JOIN found AS f ON s.id = f.segment
        )
        SELECT concat('lane ', lane, ': ', fault) AS subject, fault, id, due_ms, messages
        FROM joined LATERAL VIEW explode(array(
            CASE WHEN unreadable IS NOT NULL THEN unreadable WHEN broken_ms IS NOT NULL THEN '{faults.MARKED}'
                 WHEN due_ms < {store.now_ms + restored_ms} THEN '{faults.LATE}' END,
            CASE WHEN unreadable IS NULL AND other_due THEN '{faults.DUE}' END,
            CASE WHEN unreadable IS NULL AND other_ids THEN '{faults.IDS}' END,
            CASE WHEN unreadable IS NULL AND other_size THEN '{faults.SIZE}' END
        )) AS fault"""
    return _found(store, SEGMENTS, rows, examples="segments")


def law_of_segments(figures: Iterable[LaneFigures]) -> list[Finding]:
    """Check that compacted - restored = live messages in segments, over all lanes."""
    packed, compacted = sum(lane.packed for lane in figures), sum(lane.counters["compacted"] for lane in figures)
    restored = sum(lane.counters["restored"] for lane in figures)
    expected = compacted - restored
    if packed == expected:
        return []
    details = {"expected": expected, "found": packed, "compacted": compacted, "restored": restored}
    fault, step = faults.PACKED_SUM, faults.NEXT[faults.PACKED_SUM]
    return [Finding(SEGMENTS, "violation", fault, abs(packed - expected), None, details, step)]


def integrity(store: Extract) -> list[Finding]:
    """List the defects of single messages that the readers found (source.look)."""
    rows = """
        SELECT concat('lane ', lane, ', ', kind, ': ', fault) AS subject, fault, id, due_ms, 1 AS messages
        FROM messages LATERAL VIEW explode(faults) AS fault"""
    return _found(store, INTEGRITY, rows)


_SUBJECTS: Final = {
    WAITING: "lane {}",
    PACKED: "segments of lane {}",
    faults.PACED: "lane {}: of routes with max_rate",
    HELD: f"lane {{}}: {faults.UNTRIED}",
}
_STEPS: Final = {faults.PACED: faults.PACED, HELD: faults.UNTRIED}


def overdue(store: Extract, figures: list[LaneFigures], paced: Mapping[bytes, int]) -> list[Finding]:
    """Find overdue messages. A lane's owner may be releasing them, so they are a violation only after STUCK_MS. In a
    lane without an owner they are a violation at once. Any daemon restores segments, so for segments an owner of any
    lane is enough."""
    limited = ", ".join(f"X'{route.hex()}'" for route in paced) or "NULL"
    late = f"""
        SELECT * FROM (
            SELECT lane, route, due_ms, if(kind = '{WAITING}' AND route IN ({limited}), '{faults.PACED}', kind) AS kind,
                   {store.now_ms} - if(kind = '{HELD}', retry_ms, due_ms) AS late_ms
            FROM messages
        ) WHERE late_ms >= {GRACE_MS}"""
    rows = store.rows(f"""
        SELECT lane, kind, count(*) AS messages, min(due_ms) AS first_due_ms, max(late_ms) AS late_ms
        FROM ({late}) GROUP BY lane, kind ORDER BY lane, kind""")
    routes = rows and store.rows(f"""
        SELECT lane, kind, route, count(*) AS messages
        FROM ({late}) GROUP BY lane, kind, route ORDER BY messages DESC, route LIMIT 500""")
    return late_ones(rows, routes, figures, paced)


def late_ones(
    rows: Iterable[Any], routes: Iterable[Any], figures: Sequence[LaneFigures], paced: Mapping[bytes, int]
) -> list[Finding]:
    """Build the findings of :func:`overdue`. ``rows``: lane, kind, messages, first_due_ms, late_ms. ``routes``: lane,
    kind, route, messages, largest first."""
    alive = {lane.number: lane.alive for lane in figures}
    anybody = any(alive.values()) or (None if None in alive.values() else False)
    found = []
    for row in rows:
        owned = anybody if row.kind == PACKED else alive[row.lane]
        severity: Severity = "warning"
        if owned is False or (row.kind != faults.PACED and row.late_ms >= STUCK_MS):
            severity = "violation"
        details: dict[str, Any] = {"longest_seconds": row.late_ms // 1000, "owned": owned}
        if row.kind in (WAITING, faults.PACED):
            here = [one for one in routes if (one.lane, one.kind) == (row.lane, row.kind)][:5]
            details["routes"] = {as_text(bytes(one.route)): one.messages for one in here}
            if row.kind == faults.PACED:
                details["max_rate"] = {as_text(bytes(one.route)): paced[bytes(one.route)] for one in here}
        subject = _SUBJECTS[row.kind].format(row.lane)
        step = faults.NEXT[faults.UNOWNED if owned is False else _STEPS.get(row.kind, faults.OVERDUE)]
        found.append(Finding(OVERDUE, severity, subject, row.messages, row.first_due_ms, details, step))
    return found


def lanes(store: AuditedStore, figures: Iterable[LaneFigures], first_due: Mapping[int, int]) -> list[Finding]:
    """Find lanes without an owner whose messages are due soon (a warning, because a running daemon will acquire them),
    and lanes missing from the table (a violation, because none will). ``first_due``: the first due instant of each
    lane's waiting rows."""
    found = []
    known = {lane.number for lane in store.lanes}
    for lane in figures:
        first = first_due.get(lane.number)
        if lane.number not in known:
            if count := lane.waiting + lane.held:
                subject, step = f"lane {lane.number}: {faults.UNKNOWN_LANE}", faults.NEXT[faults.UNKNOWN_LANE]
                found.append(Finding(LANES, "violation", subject, count, first, next=step))
        elif lane.alive is False and first is not None and first <= store.now_ms + TAKEN_MS:
            details = {"last_owner": lane.owner}
            subject, step = f"lane {lane.number}: {faults.UNOWNED}", faults.NEXT[faults.UNOWNED]
            found.append(Finding(LANES, "warning", subject, lane.waiting, first, details, step))
    return found


def repeats(store: Extract) -> list[Finding]:
    """Find duplicate ids, and messages with several ids. Examples of the latter are pairs of first and last id."""
    questions: tuple[tuple[Severity, str, str, str, str], ...] = (
        ("violation", faults.ONE_ID, "id", "count(*) > 1", "id"),
        (
            "warning",
            faults.SAME,
            "fingerprint",
            "fingerprint IS NOT NULL AND min(id) < max(id)",
            "array(min(id), max(id))",
        ),
    )
    found = []
    for severity, fault, by, repeated, example in questions:
        rows = store.rows(f"""
            SELECT example, count(*) OVER () AS groups, sum(n) OVER () AS messages, min(due_ms) OVER () AS first_due_ms
            FROM (
                SELECT {by}, {example} AS example, count(*) AS n, min(due_ms) AS due_ms
                FROM messages GROUP BY {by} HAVING {repeated}
            ) ORDER BY n DESC, {by} LIMIT 20""")
        if rows:
            of, examples = rows[0], [row.example for row in rows]
            details = {"groups": of.groups, "surplus": of.messages - of.groups, "examples": examples}
            found.append(Finding(REPEATS, severity, fault, of.messages, of.first_due_ms, details, faults.NEXT[fault]))
    return found


def keys(store: Extract) -> list[Finding]:
    """Check that a cancel by key finds its message. Skips held messages (found only by id) and unreadable segments."""
    rows = f"""
        WITH readable AS (
            SELECT k.* FROM message_key AS k
            LEFT ANTI JOIN (SELECT segment FROM segment_message WHERE id IS NULL) AS u ON k.segment = u.segment
        ), claims AS (
            SELECT coalesce(m.key, k.key) AS key, m.id, m.due_ms, coalesce(m.kind <> '{HELD}', false) AS waits,
                   k.id AS pointed, k.due_ms AS pointed_ms,
                   m.id <=> k.id AND (m.kind = '{HELD}' OR (m.lane, m.due_ms) = (k.lane, k.due_ms)
                       AND m.segment <=> k.segment) AS met
            FROM (SELECT * FROM messages WHERE key IS NOT NULL) AS m FULL JOIN readable AS k ON m.key = k.key
        ), by_key AS (
            SELECT *, count_if(waits) OVER one AS waiting, bool_or(met) OVER one AS reached
            FROM claims WINDOW one AS (PARTITION BY key)
        )
        SELECT DISTINCT key, if(waits, id, pointed) AS id, if(waits, due_ms, pointed_ms) AS due_ms, 1 AS messages,
               CASE WHEN waits AND waiting > 1 THEN '{faults.COLLIDES}'
                    WHEN waits AND NOT met THEN '{faults.UNREACHABLE}'
                    WHEN waiting = 0 AND pointed IS NOT NULL AND NOT reached THEN '{faults.DANGLES}' END AS subject,
               subject AS fault
        FROM by_key"""
    return _found(store, KEYS, rows)


def schedules(store: AuditedStore) -> list[Finding]:
    """Report schedules that do not agree with their waiting occurrences."""
    return [
        Finding(SCHEDULES, "violation", fault, number, first_ms, {"schedules": names}, faults.NEXT[fault])
        for fault, number, first_ms, names in store.schedules
    ]


def inbox(store: AuditedStore) -> list[Finding]:
    """Report messages that no daemon moves out of the SQL inbox."""
    messages, first_ms = store.unread
    if not messages or first_ms is None:
        return []
    severity: Severity = "violation" if store.now_ms - first_ms >= STUCK_MS else "warning"
    return [Finding(INBOX, severity, faults.UNREAD, messages, first_ms, next=faults.NEXT[faults.UNREAD])]


DESTINATIONS: Final = "destinations"

_Row = tuple[CheckedTarget, RouteVerdict]


def with_destinations(report: AuditReport, asked: RouteVerdicts, unseen: Iterable[str] = ()) -> AuditReport:
    """Add the rule "destinations" to the report: its findings, its line among the rules, and a verdict for each
    destination in the calendar. ``unseen``: destinations that were not checked."""
    run, listed = run_of(DESTINATIONS, destinations(asked.routes), _skipped(asked, unseen))
    answers = {(target.exchange, target.routing_key): answer for target, answer in asked.routes}
    rows = tuple(_judged(share, answers) for share in report.calendar.destinations)
    return replace(
        report,
        calendar=replace(report.calendar, destinations=rows),
        rules=(*(one for one in report.rules if one.rule != DESTINATIONS), run),
        findings=(*(one for one in report.findings if one.rule != DESTINATIONS), *listed),
    )


def destinations(routes: Iterable[_Row]) -> list[Finding]:
    """Report messages that would be held as violations. Warn of messages that only an alternate exchange would accept,
    and of destinations whose messages are all held already. A missing or internal exchange makes one finding."""
    told = [(target, answer) for target, answer in routes if answer.verdict.bad or answer.verdict is Verdict.ALTERNATE]
    told.sort(key=lambda row: (row[1].verdict.value, row[0].exchange, row[0].first_due_ms, row[0].routing_key))
    found: list[Finding] = []
    for (verdict, exchange), group in groupby(told, key=lambda row: (row[1].verdict, row[0].exchange)):
        if exchange and verdict in (Verdict.MISSING, Verdict.CLOSED):
            found.append(_finding(f"exchange {_quoted(exchange)}", list(group)))
        else:
            where = f"exchange {_quoted(exchange)}, key" if exchange else "queue"
            found += [_finding(f"{where} {_quoted(row[0].routing_key)}", [row]) for row in group]
    return found


def _finding(subject: str, rows: Sequence[_Row]) -> Finding:
    verdict, way = rows[0][1].verdict, rows[0][1].way
    messages, held = sum(target.messages for target, _ in rows), sum(target.held for target, _ in rows)
    severity: Severity = "violation" if verdict.bad and held < messages else "warning"
    details: dict[str, Any] = {"verdict": verdict.value, "why": way}
    if held:
        details["held_already"] = held
    if len(rows) > 1:
        details["keys"] = len(rows)
        details["routing_keys"] = [as_text(target.routing_key) for target, _ in rows[:10]]
    first_due_ms, step = min(target.first_due_ms for target, _ in rows), faults.NEXT[verdict.value]
    return Finding(DESTINATIONS, severity, subject, messages, first_due_ms, details, step)


def _judged(share: Share, answers: dict[tuple[bytes, bytes], RouteVerdict]) -> Share:
    answer = answers.get((share.to_exchange, share.to_key), RouteVerdict(Verdict.NOT_ASKED))
    return replace(share, verdict=answer.verdict.value, way=answer.way)


def _skipped(asked: RouteVerdicts, unseen: Iterable[str]) -> str:
    """Say which destinations have no verdict, and why; "" if all have one."""
    counts = asked.counts
    parts = []
    for verdict in (Verdict.NOT_ASKED, Verdict.UNKNOWN):
        if verdict.value in counts:
            parts.append(f"{verdict.value} for {counts[verdict.value]:,} of {sum(counts.values()):,} messages")
    return "; ".join([*parts, *asked.remarks, *unseen])


def _quoted(name: bytes) -> str:
    return f'"{as_text(name)}"'
