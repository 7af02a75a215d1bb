"""Names, verdicts and advice of a report, for the console and the page. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from delayer.audit.findings import AuditReport, Finding, Peak, Severity, Share
from delayer.broker.route_check import Verdict
from delayer.core.filters import own_name
from delayer.core.readable import counted, duration, instant, readable

_WIDTHS: Final = {1_000: "second", 60_000: "minute", 3_600_000: "hour", 86_400_000: "day"}


def width(width_ms: int) -> str:
    """Name a width: ``second``, ``minute``, ``hour`` or ``day``, else its length."""
    return _WIDTHS.get(width_ms, duration(width_ms / 1000))


def late(ms: float) -> str:
    return duration(ms / 1000)


def name(raw: bytes | str, empty: str = "(empty)") -> str:
    """Format a name from AMQP on one line, with invisible characters escaped and passwords masked."""
    return readable(raw) if raw else empty


def destination(exchange: bytes, key: bytes) -> str:
    return f"{name(exchange)} · {name(key)}" if exchange else f"queue {name(key)}"


_TONES: Final = {
    Verdict.ROUTED.value: "good",
    Verdict.ALTERNATE.value: "warn",
    **{verdict.value: "bad" for verdict in Verdict if verdict.bad},
}


def tone(share: Share) -> str:
    """Rate the broker's verdict on a destination as good, warn or bad; empty if it is unclear."""
    return _TONES.get(share.verdict, "")


def destinations(report: AuditReport) -> list[Share]:
    """Pick the destinations to show. Destinations that would not accept their messages come first, even the
    smallest."""
    return sorted(report.calendar.destinations, key=lambda one: tone(one) != "bad")


def peaks(report: AuditReport) -> list[Peak]:
    """Pick the peaks to show: those that take at least a second to drain, and 5 % of the longest."""
    longest = max((peak.drain_seconds for peak in report.calendar.peaks), default=0.0)
    return [peak for peak in report.calendar.peaks if peak.drain_seconds >= max(1.0, 0.05 * longest)]


class Group(NamedTuple):
    """The findings of a rule and severity that share a next step. ``unlisted``: how many more there are."""

    severity: Severity
    advice: RuleAdvice
    next: str
    findings: tuple[Finding, ...]
    unlisted: int


def groups(report: AuditReport) -> Iterator[Group]:
    """Group the findings, violations first. A rule's first group carries its unlisted findings."""
    unlisted = {run.rule: run.unlisted for run in report.rules}
    together: dict[tuple[Severity, str, str], list[Finding]] = {}
    for one in sorted(report.findings, key=lambda one: one.severity == "warning"):
        together.setdefault((one.severity, one.rule, one.next), []).append(one)
    for (severity, rule, step), found in together.items():
        yield Group(severity, advice(rule), step, tuple(found), unlisted.pop(rule, 0))


def verdict(report: AuditReport) -> str:
    """Sum up the audit in one line."""
    return f"{counted(report.violations, 'violation')}, {counted(report.warnings, 'warning')}"


def behind(report: AuditReport) -> str:
    """Note how far a replica lags; empty if it does not."""
    if report.behind_ms < 1_000:
        return ""
    lag = duration(report.behind_ms / 1000)
    return f"Read from a replica {lag} behind its primary: judged as of the instant that it had come to."


def unread(report: AuditReport) -> str:
    """Note the messages in unreadable segments; empty if there are none."""
    messages = report.calendar.unread
    told = f"{counted(messages, 'message')} in unreadable segments; their hours are estimates from the headers."
    return told if messages else ""


def sampled(report: AuditReport) -> str:
    """Note the rows that were not read; empty if the whole store was."""
    if report.quick:
        return (
            "A quick audit, of counters, indexes and headers. Sizes, routes and destinations are estimates from a "
            "sample of rows. `delayer audit --deep` reads every message."
        )
    if report.sample is None:
        return ""
    read = report.totals.waiting + report.totals.packed
    return (
        f"A sample: about {report.sample * 100:.3g} % of the pages, with {read:,} waiting messages. Their numbers are "
        "not scaled up; held messages, segments and counters are all of them."
    )


def details(table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Format a finding's details as rows, without empty values."""
    for key, value in table.items():
        if value in (None, "", [], (), {}):
            continue
        label = readable(str(key)).replace("_", " ")
        if key.endswith("_ms") and isinstance(value, int) and not isinstance(value, bool):
            yield label.removesuffix(" ms"), instant(value)
        elif key.endswith("_seconds") and isinstance(value, int | float):
            yield label.removesuffix(" seconds"), duration(value)
        elif key == "examples":
            ids = [id_ for one in value for id_ in (one if isinstance(one, list | tuple) else (one,))]
            yield label, ", ".join(own_name(str(id_)) for id_ in ids)
        else:
            yield label, _detail(value)


def _detail(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{readable(str(key))}: {_detail(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(str(one) if type(one) is int else _detail(one) for one in value)  # Ids have no commas.
    return readable(value if isinstance(value, str | bytes) else str(value))


class RuleAdvice(NamedTuple):
    """``title`` of the rule, and what a finding ``means``."""

    title: str
    means: str


def advice(rule: str) -> RuleAdvice:
    """Return the advice on a rule, including the users' own rules."""
    return ADVICE.get(rule) or RuleAdvice(rule, "A rule of your own, from the configuration ([[audit.rule]]).")


ADVICE: Final[dict[str, RuleAdvice]] = {
    "conservation": RuleAdvice(
        "Conservation",
        "The messages that left and those that are here do not add up to those that came in. Counters and rows of one "
        "snapshot disagree.",
    ),
    "segments": RuleAdvice(
        "Segments",
        "The content of a segment differs from its header (count, digest or ranges), or it is unreadable. Or "
        "no daemon restored it in time. The store keeps its bytes, and no other message waits for it.",
    ),
    "integrity": RuleAdvice(
        "Integrity",
        "Rows whose bytes differ from the parked ones, cannot be decoded, are of an unknown format, or lie in the "
        "wrong partition: a daemon holds such a message and does not send it.",
    ),
    "overdue": RuleAdvice("Overdue", "Messages are past their due time and still here."),
    "lanes": RuleAdvice(
        "Lanes without an owner",
        "No daemon owns these lanes. Their messages stay until a daemon takes them. A running daemon does that within "
        "seconds when a message is due soon.",
    ),
    "repeats": RuleAdvice(
        "Repeats",
        "The same message is here more than once (same `message_id`, destination, due time and body), and will be "
        "delivered as often. One id of the store must never be in two places.",
    ),
    "destinations": RuleAdvice(
        "Destinations that cannot take them",
        "If these messages were due now, the broker would not take them: they would be held and tried again, not "
        "lost. Some may be held already.",
    ),
    "keys": RuleAdvice(
        "Keys",
        "A key (`x-delay-key`) stands for a message that is not there, or not for the message that has it. A "
        "replacement or a cancel by that key would miss.",
    ),
    "schedules": RuleAdvice(
        "Schedules",
        "A schedule and its next occurrence, which waits as a message, do not agree. One transaction writes both, so "
        "something else has changed rows.",
    ),
    "inbox": RuleAdvice(
        "SQL inbox",
        "Applications sent messages by SQL more than a minute ago, and no daemon has moved them to where they wait.",
    ),
    "peaks": RuleAdvice("Peaks", "More messages are due at one time than daemons can release at once."),
}
