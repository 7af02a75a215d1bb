"""The findings of an audit, and the report around them. Pure values that convert to JSON.

Sizes (``size``) are bytes of bodies and properties, instants epoch milliseconds.

A *violation* is a promise that is broken, or will be when the message is due; `delayer audit` then exits with 1. A
*warning* deserves a check but may be fine. docs/backlog.md says which is which.

Names from AMQP are bytes that need not be UTF-8. JSON carries them by ``surrogateescape``, and :func:`as_text` makes
them printable.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

Severity = Literal["violation", "warning"]
VERSION: Final = 1
"""Version of the JSON format."""


WAITING, HELD, PACKED = "waiting", "held", "segment"
"""Kinds of messages: a row of ``message``, a row of ``held``, part of a segment."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding. ``subject``: the place, such as "lane 3". ``count``: its messages or keys. ``first_due_ms``: the due
    instant of its first message, epoch ms. ``details``: JSON values; ``details["examples"]`` lists some message ids.
    ``next``: the operator's next step, with commands in backticks."""

    rule: str
    severity: Severity
    subject: str
    count: int
    first_due_ms: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    next: str = ""


@dataclass(frozen=True, slots=True)
class LaneFigures:
    """A lane. ``alive``: None if unknown, because a replica does not show locks. ``counters`` has every kind.
    ``waiting``, ``held``: rows counted one by one. ``packed``: live messages in its segments."""

    number: int
    owner: str
    alive: bool | None
    counters: Mapping[str, int]
    waiting: int
    held: int
    packed: int = 0


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of the store. ``expected``: waiting messages by the counters (the law of conservation). ``waiting``: rows
    found. ``packed``: live messages in ``segments``. ``size``: bytes of all their bodies and properties.
    ``packed_bytes``: bytes of the segments as stored."""

    waiting: int
    expected: int
    held: int
    segments: int
    packed: int
    size: int
    packed_bytes: int
    keyed: int
    first_due_ms: int | None
    last_due_ms: int | None


@dataclass(frozen=True, slots=True)
class Bar:
    """A histogram bar of due times: ``width_ms`` from ``start_ms`` on. ``unread``: its messages in unreadable segments,
    whose hours are estimated from the segments' headers."""

    start_ms: int
    width_ms: int
    messages: int
    size: int
    unread: int = 0


@dataclass(frozen=True, slots=True)
class Peak:
    """A second, minute or hour in which many messages are due, and the time to release them at the report's rate."""

    start_ms: int
    width_ms: int
    messages: int
    size: int
    drain_seconds: float


@dataclass(frozen=True, slots=True)
class Share:
    """The messages of a route, or of a destination (then ``to_exchange`` and ``to_key`` are set).

    ``verdict``: how the broker would treat them now (broker.route_check.Verdict). ``way``: the route, or the reason;
    empty without an answer from the broker (audit.rules).
    """

    messages: int
    size: int
    first_due_ms: int
    last_due_ms: int
    route: bytes = b""
    to_exchange: bytes = b""
    to_key: bytes = b""
    verdict: str = ""
    way: str = ""


@dataclass(frozen=True, slots=True)
class Calendar:
    """The forecast. Minutes and hours cover the near future (audit.coming), days everything. Lists the largest routes
    and destinations; ``…_more`` counts the rest."""

    release_rate: float
    minutes: tuple[Bar, ...] = ()
    hours: tuple[Bar, ...] = ()
    days: tuple[Bar, ...] = ()
    peaks: tuple[Peak, ...] = ()
    routes: tuple[Share, ...] = ()
    routes_more: int = 0
    destinations: tuple[Share, ...] = ()
    destinations_more: int = 0

    @property
    def unread(self) -> int:
        """The messages in unreadable segments."""
        return sum(day.unread for day in self.days)


PastRow = Mapping[str, Any]
"""A row of a query over the history, as in docs/backlog.md."""


@dataclass(frozen=True, slots=True)
class Past:
    """The history from ``first_ms`` to ``last_ms`` (audit.past). ``whole``: all of it. ``hours``: the last month's.
    ``routes``: the largest, each with its whole and its hours. ``capacity``: the largest numbers released and due, by
    width of time. ``worse``: destinations that got worse. ``odd``: destinations with suspicious delays."""

    first_ms: int
    last_ms: int
    whole: PastRow
    hours: Sequence[PastRow]
    routes: Sequence[PastRow]
    capacity: Sequence[PastRow]
    worse: Sequence[PastRow]
    odd: Sequence[PastRow]


@dataclass(frozen=True, slots=True)
class RuleRun:
    """A rule and the numbers of its findings. ``skipped``: why it did not run, or empty. ``unlisted``: findings that
    the report leaves out because it limits their number per rule. ``count``: the sum of the counts of its violations,
    or of its warnings if it has no violation."""

    rule: str
    violations: int
    warnings: int
    skipped: str = ""
    unlisted: int = 0
    count: int = 0

    @property
    def severity(self) -> Severity | None:
        return "violation" if self.violations else "warning" if self.warnings else None


def run_of(rule: str, found: Iterable[Finding], skipped: str = "") -> tuple[RuleRun, list[Finding]]:
    """Build a rule's line and the findings that a report lists: at most a hundred, violations first."""
    ordered = sorted(found, key=lambda one: (one.severity == "warning", -one.count, one.subject))
    violations = sum(one.severity == "violation" for one in ordered)
    listed = ordered[:100]
    count = sum(one.count for one in ordered[: violations or None])
    return RuleRun(rule, violations, len(ordered) - violations, skipped, len(ordered) - len(listed), count), listed


@dataclass(frozen=True, slots=True)
class AuditReport:
    """An audit. ``store_now_ms``: the store's clock at the snapshot; on a replica that lags by ``behind_ms``, the
    instant it had reached. ``sample``: the share of rows read; None means all. ``seconds``: the audit's duration.
    ``quick``: based on counters, indexes and headers (audit.quick), with sizes, routes and destinations estimated.
    ``past``: None without history."""

    store_now_ms: int
    seconds: float
    sample: float | None
    totals: Totals
    lanes: tuple[LaneFigures, ...]
    calendar: Calendar
    rules: tuple[RuleRun, ...]
    findings: tuple[Finding, ...]
    behind_ms: int = 0
    quick: bool = False
    past: Past | None = None
    version: int = VERSION

    @property
    def violations(self) -> int:
        return sum(run.violations for run in self.rules)

    @property
    def warnings(self) -> int:
        return sum(run.warnings for run in self.rules)

    def to_json(self) -> str:
        """Format as ASCII JSON on one line."""
        return json.dumps(asdict(self), default=lambda name: name.decode("utf-8", "surrogateescape"))
