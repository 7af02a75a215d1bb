"""Why a delivery was late: the spans of time in which something was slow, and the rule that names a cause.

Late deliveries that overlap are one stall, because a queue that must drain makes messages late after its cause is over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

LONG_SECONDS = 0.02
"""Shorter spans are not recorded: no evidence is needed for a delivery that is less late than LATE_MS."""
LATE_MS = 50.0
JOINED_SECONDS = 0.05
"""Two late deliveries belong to one stall if no more than this is between them."""
COVERED = 0.5
"""The evidence of a cause must cover this share of the time for which the stall's worst delivery was late."""

MACHINE, BROKER, DATABASE, OURS, UNKNOWN = "machine", "broker", "database", "ours", "unknown"
CAUSES = (BROKER, DATABASE, MACHINE, OURS, UNKNOWN)
DISK = "confirm and commit of the probes"
RULES: tuple[tuple[str, str], ...] = (
    ("gc", OURS),
    ("lock wait", OURS),  # all sessions that lock rows of the store are delayer's
    ("steal", MACHINE),
    ("run queue", MACHINE),
    ("loop_lag", OURS),
    (DISK, MACHINE),
    ("confirm of the probe", BROKER),
    ("commit of the probe", DATABASE),
    ("COMMIT", DATABASE),
    ("CPU pressure", MACHINE),
    ("publish", BROKER),
    ("claim", OURS),
    ("settle", OURS),
)
"""Kinds of spans and their causes; the first kind that covers the worst delivery of a stall decides.

Direct evidence stands first. A probe that only sleeps tells a machine without CPU from a daemon that keeps its event
loop busy. If a probe of the broker and one of the database wait at the same time, the disk that they share is slow. The
daemon's own durations come last, since they are long whenever a server or the machine is. A claim that is slow while
the probe of the database is not has a statement that is slow, and statements are ours. A park delays no delivery, so
its duration is no cause.
"""


class Span(NamedTuple):
    """``what`` was slow from ``begin`` to ``end`` (epoch s)."""

    what: str
    begin: float
    end: float


class Stall(NamedTuple):
    """Some deliveries that were late together, from the first one's due time to the last arrival (epoch s)."""

    begin: float
    end: float
    deliveries: int
    worst_ms: float
    worst_due: float
    """When the latest of them was due (epoch s)."""

    @property
    def worst_arrival(self) -> float:
        return self.worst_due + self.worst_ms / 1000


def stalls(late: Iterable[tuple[float, float]]) -> list[Stall]:
    """Join late deliveries, each as due time and arrival in epoch ms."""
    found: list[Stall] = []
    for due_ms, at_ms in sorted(late):
        one = Stall(due_ms / 1000, at_ms / 1000, 1, at_ms - due_ms, due_ms / 1000)
        if found and one.begin <= found[-1].end + JOINED_SECONDS:
            last = found[-1]
            worst = max(last, one, key=lambda stall: stall.worst_ms)
            found[-1] = worst._replace(begin=last.begin, end=max(last.end, one.end), deliveries=last.deliveries + 1)
        else:
            found.append(one)
    return found


def merged(spans: Iterable[Span]) -> list[Span]:
    """Join the spans of each kind that overlap or touch."""
    found: list[Span] = []
    for one in sorted(spans):
        if found and found[-1].what == one.what and one.begin <= found[-1].end:
            found[-1] = found[-1]._replace(end=max(found[-1].end, one.end))
        else:
            found.append(one)
    return found


def covered(spans: Iterable[Span], begin: float, end: float) -> float:
    """The seconds between ``begin`` and ``end`` in which at least one of the spans was on."""
    total, until = 0.0, begin
    for one in sorted(spans, key=lambda span: span.begin):
        total += max(min(one.end, end) - max(one.begin, until), 0.0)
        until = max(until, min(one.end, end))
    return total


def together(what: str, some: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """The times in which one of ``some`` and one of ``others`` was on; each of both lists has no overlaps."""
    others = list(others)
    pairs = ((max(a.begin, b.begin), min(a.end, b.end)) for a in some for b in others)
    return [Span(what, begin, end) for begin, end in pairs if begin < end]


def weigh(stall: Stall, spans: Iterable[Span]) -> dict[str, float]:
    """The milliseconds that each kind of span covers between the due time and the arrival of the worst delivery.

    A long stall has a little of every kind somewhere, which explains no single delivery.
    """
    due, arrival = stall.worst_due, stall.worst_arrival
    by_kind: dict[str, list[Span]] = {}
    for one in spans:
        if one.begin < arrival and due < one.end:
            by_kind.setdefault(one.what, []).append(one)
    confirm, commit = by_kind.get("confirm of the probe", []), by_kind.get("commit of the probe", [])
    by_kind[DISK] = together(DISK, confirm, commit)
    found = {what: covered(some, due, arrival) * 1000 for what, some in by_kind.items()}
    return {what: round(ms, 1) for what, ms in found.items() if ms}


def cause_of(stall: Stall, evidence: dict[str, float]) -> tuple[str, str]:
    """The cause of a stall by RULES, and the kind of span that decided. ``evidence``: what :func:`weigh` found."""
    enough = stall.worst_ms * COVERED
    return next(((cause, what) for what, cause in RULES if evidence.get(what, 0.0) >= enough), (UNKNOWN, ""))


class Share(NamedTuple):
    """What one cause made late."""

    cause: str
    stalls: int
    deliveries: int
    worst_ms: float


def shares(attributed: Sequence[tuple[Stall, str]]) -> list[Share]:
    """A row for each cause; a cause of no stall has zeros."""
    found = []
    for cause in CAUSES:
        of_it = [stall for stall, named in attributed if named == cause]
        worst = max((stall.worst_ms for stall in of_it), default=0.0)
        found.append(Share(cause, len(of_it), sum(stall.deliveries for stall in of_it), worst))
    return found


_LINE = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}) UTC \[\d+\] \S* ?LOG:  (.*)$", re.MULTILINE)
_COMMIT = re.compile(r"duration: ([\d.]+) ms  (?:statement|execute [^:]*): COMMIT")
_LOCK = re.compile(r"process \d+ acquired \w+ on .* after ([\d.]+) ms")


def of_postgres(log: str) -> list[Span]:
    """Read slow commits, lock waits and checkpoints from a log with ``log_line_prefix = '%m [%p] %d '`` in UTC."""
    found: list[Span] = []
    checkpoint: datetime | None = None
    for stamp, text in _LINE.findall(log):
        end = datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S.%f").replace(tzinfo=UTC)
        for what, pattern in (("COMMIT", _COMMIT), ("lock wait", _LOCK)):
            if took := pattern.match(text):
                found.append(Span(what, (end - timedelta(milliseconds=float(took[1]))).timestamp(), end.timestamp()))
        if text.startswith("checkpoint starting"):
            checkpoint = end
        elif text.startswith("checkpoint complete") and checkpoint is not None:
            found.append(Span("checkpoint", checkpoint.timestamp(), end.timestamp()))
            checkpoint = None
    return found
