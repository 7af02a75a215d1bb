"""Findings from the broker's answers about destinations."""

from __future__ import annotations

from delayer.audit.rules import destinations, with_destinations
from delayer.broker.route_check import CheckedTarget, RouteVerdict, RouteVerdicts, Verdict
from tests.unit.audit import audit_reports

ROUTED, MISSING, NOWHERE = RouteVerdict(Verdict.ROUTED), RouteVerdict(Verdict.MISSING), RouteVerdict(Verdict.UNROUTABLE)


def target(exchange: bytes, key: bytes, messages: int = 1, first_due_ms: int = 1_000) -> CheckedTarget:
    return CheckedTarget(exchange, key, messages, first_due_ms)


def test_deliverable_and_unknown_destinations_give_no_finding() -> None:
    for verdict in (Verdict.ROUTED, Verdict.UNKNOWN, Verdict.NOT_ASKED):
        assert destinations([(target(b"x", b"k"), RouteVerdict(verdict))]) == []


def test_a_missing_exchange_is_one_finding_for_all_its_keys() -> None:
    rows = [(target(b"gone", b"k%d" % n, 10, 5_000 - n), MISSING) for n in range(50)]
    (found,) = destinations(rows)
    assert (found.severity, found.subject) == ("violation", 'exchange "gone"')
    assert (found.count, found.first_due_ms) == (500, 4_951)
    assert found.details["keys"] == 50
    assert found.details["routing_keys"][0] == "k49", "the soonest first"


def test_each_missing_queue_and_unrouted_key_is_a_finding() -> None:
    rows = [(target(b"", b"q%d" % n, 1, n), MISSING) for n in range(25)]
    found = destinations([*rows, (target(b"x", b"a.b"), NOWHERE)])
    subjects = {one.subject for one in found}
    assert subjects == {'exchange "x", key "a.b"', *(f'queue "q{n}"' for n in range(25))}
    assert sum(one.count for one in found) == 26


def test_an_alternate_is_a_warning() -> None:
    rows = [
        (target(b"x", b"k", first_due_ms=1), RouteVerdict(Verdict.ALTERNATE, "spare")),
        (target(b"y", b"k"), MISSING),
    ]
    warning, violation = destinations(rows)
    assert (violation.severity, violation.subject) == ("violation", 'exchange "y"')
    assert (warning.severity, warning.details["why"]) == ("warning", "spare")


def test_a_destination_with_only_held_messages_is_a_warning() -> None:
    held = CheckedTarget(b"lost.out", b"k", 3, 1_000, held=3)
    (found,) = destinations([(held, MISSING)])
    assert (found.severity, found.subject, found.count) == ("warning", 'exchange "lost.out"', 3)
    assert found.details["held_already"] == 3
    (found,) = destinations([(held, MISSING), (target(b"lost.out", b"waits"), MISSING)])
    assert (found.severity, found.count, found.details["held_already"]) == ("violation", 4, 3)
    assert destinations([(held, ROUTED)]) == [], "the exchange was declared since"


def test_the_report_gets_a_line_findings_and_verdicts() -> None:
    before = audit_reports.empty()
    full = audit_reports.full()
    shares = full.calendar.destinations
    asked = RouteVerdicts(
        tuple((target(one.to_exchange, one.to_key, one.messages, one.first_due_ms), ROUTED) for one in shares[1:]),
        ("only the soonest were asked about",),
    )
    report = with_destinations(full, asked)
    assert [one.verdict for one in report.calendar.destinations] == ["not asked"] + ["routed"] * (len(shares) - 1)
    (run,) = [one for one in report.rules if one.rule == "destinations"]
    assert (run.violations, run.warnings, run.skipped) == (0, 0, "only the soonest were asked about")
    assert [one for one in report.findings if one.rule == "destinations"] == [], "the new verdicts replace the old ones"
    unasked = with_destinations(
        before, RouteVerdicts(((target(b"x", b"k", 3), RouteVerdict(Verdict.NOT_ASKED)),), ("out of reach",))
    )
    assert unasked.rules[-1].skipped == "not asked for 3 of 3 messages; out of reach"


def test_a_hundred_findings_are_listed_and_the_rest_counted() -> None:
    asked = RouteVerdicts(tuple((target(b"gone-%d" % n, b"k"), MISSING) for n in range(130)))
    report = with_destinations(audit_reports.empty(), asked)
    assert len(report.findings) == 100
    assert (report.rules[-1].violations, report.rules[-1].unlisted) == (130, 30)


def test_hostile_names_are_fit_for_json() -> None:
    (found,) = destinations([(target(b"\xff<script>", b"\x00"), MISSING)])
    assert found.subject == 'exchange "\\xff<script>"'
