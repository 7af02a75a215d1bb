"""The findings of an audit, and the report around them. Pure values that go to JSON.

Sizes (``size``) are bytes of bodies and properties, instants epoch milliseconds.

A *violation* is a broken promise, or one that will break when the message is due. It makes `delayer audit` exit with 1.
A *warning* is worth a look and may be right as it is. docs/backlog.md says which is which.

Names that came over AMQP are bytes and need not be UTF-8. They travel through JSON by ``surrogateescape``, and
:func:`as_text` makes them fit to print.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

Severity = Literal["violation", "warning"]
VERSION: Final = 1
"""The version of the JSON form."""


WAITING, HELD, PACKED = "waiting", "held", "segment"
"""Kinds of messages: a row of ``message``, a row of ``held``, inside a segment."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. ``subject``: the place, such as "lane 3". ``count``: its messages or keys.
    ``first_due_ms``: the due instant of its first message, epoch ms. ``details``: JSON values; ``details["examples"]``
    are some ids of messages. ``next``: the next step for a person, with commands between backticks."""

    rule: str
    severity: Severity
    subject: str
    count: int
    first_due_ms: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    next: str = ""


@dataclass(frozen=True, slots=True)
class LaneFigures:
    """One lane. ``alive``: None if unknown, because a replica does not see the locks. ``counters`` has every kind.
    ``waiting`` and ``held``: rows counted one by one. ``packed``: live messages in its segments."""

    number: int
    owner: str
    alive: bool | None
    counters: Mapping[str, int]
    waiting: int
    held: int
    packed: int = 0


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums of the whole store. ``expected``: waiting messages by the counters (the law of conservation). ``waiting``:
    rows found. ``packed``: live messages in ``segments``. ``size``: bytes of all their bodies and properties.
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
    """A bar of the histogram of due times: ``width_ms`` from ``start_ms`` on. ``unread``: those of its messages in
    segments that do not read back. Their hours are estimates by the segments' headers."""

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
    """The messages of one route, or of one destination (then ``to_exchange`` and ``to_key`` are set).

    ``verdict``: a ``Verdict`` (broker.route_check), how the broker would treat them now. ``way``: the route, or the
    reason; empty without an answer of the broker (audit.rules).
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
    """The forecast. Minutes and hours cover the near future (audit.coming), days everything. Routes and destinations
    with the most messages are listed; ``…_more`` is the number of the others."""

    release_rate: float
    minutes: tuple[Bar, ...] = ()
    hours: tuple[Bar, ...] = ()
    days: tuple[Bar, ...] = ()
    peaks: tuple[Peak, ...] = ()
    routes: tuple[Share, ...] = ()
    routes_more: int = 0
    destinations: tuple[Share, ...] = ()
    destinations_more: int = 0


PastRow = Mapping[str, Any]
"""A row of a query over the history, as docs/backlog.md has it."""


@dataclass(frozen=True, slots=True)
class Past:
    """The history from ``first_ms`` to ``last_ms`` (audit.past). ``whole``: all of it. ``hours``: of the last month.
    ``routes``: the largest, each with its whole and its hours. ``capacity``: the most that was released and the most
    that is due within some widths. ``worse``: destinations that got worse. ``odd``: those with delays that look wrong.
    """

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
    """A rule and the numbers of its findings. ``skipped``: why it was not run, or empty. ``unlisted``: its findings
    beyond the bound for each rule, which the report leaves out."""

    rule: str
    violations: int
    warnings: int
    skipped: str = ""
    unlisted: int = 0


def run_of(rule: str, found: Iterable[Finding], skipped: str = "") -> tuple[RuleRun, list[Finding]]:
    """The line of a rule among the rules, and the findings that a report lists: a hundred, violations first."""
    ordered = sorted(found, key=lambda one: (one.severity == "warning", -one.count, one.subject))
    violations = sum(one.severity == "violation" for one in ordered)
    listed = ordered[:100]
    return RuleRun(rule, violations, len(ordered) - violations, skipped, len(ordered) - len(listed)), listed


@dataclass(frozen=True, slots=True)
class AuditReport:
    """An audit. ``store_now_ms``: the store's clock at the snapshot; on a replica that was ``behind_ms`` behind, the
    instant that it had reached. ``sample``: the share of rows read (None: all). ``seconds``: the time that the audit
    took. ``quick``: by counters, indexes and headers (audit.quick); sizes, routes and destinations are estimates.
    ``past``: what the history tells; None without one."""

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
        """ASCII JSON on one line."""
        return json.dumps(asdict(self), default=lambda name: name.decode("utf-8", "surrogateescape"))
