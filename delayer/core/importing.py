"""Imports from other systems, as values. Pure.

    staging ──staged──> running ──all of it committed──> done
       └───────────────────┴──on request──> aborted

*Staging* moves the matching messages away from other consumers, or records what to read. *Running* commits batch after
batch by due time, and the source drops a batch only after its commit. An interrupted run resumes at its last commit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from delayer.core.hold import Hold
from delayer.core.message import Parcel, Target
from delayer.core.units import MINUTE_MS

SOON_MS: Final = MINUTE_MS
"""The source system may already be processing messages that are overdue or due within this time."""


class Left(StrEnum):
    """Why messages stay in their source."""

    UNREADABLE = "unreadable"
    BEFORE_CUTOFF = "due before the cutoff"
    BEYOND_LIMIT = "beyond the limit"
    BEHIND = "behind too many messages that do not match: not examined"
    UNGIVEN = "not delivered by their broker in time: not examined"
    DELAYED = "that their broker delays itself: not examined before they are due"
    UNSEEN = "queues may hold messages that their broker delays itself: no management URL, answer or count yet"


FOR_PEOPLE: Final = frozenset({Left.UNREADABLE, Left.BEHIND, Left.UNGIVEN, Left.DELAYED})
"""Reasons that an operator must see, because these messages stay against the operator's wish."""
MOST_REASONS: Final = 100
"""Limit of reasons reported one by one. A file may have a different reason for each of its messages."""
OTHER_REASONS: Final = "for other reasons"
MOST_GOALS: Final = 100_000
"""Limit of destinations that a survey reports one by one, so that its memory does not grow with the backlog."""
MORE_GOALS: Final = f"destinations beyond the first {MOST_GOALS:,} are checked only by the run"


class Phase(StrEnum):
    STAGING = "staging"
    RUNNING = "running"
    DONE = "done"
    ABORTED = "aborted"


class ImportItem(NamedTuple):
    """One message. ``hold``: why the import holds it; None for a waiting message. ``schedule``: the line of a schedule
    (format/lines.py), whose occurrence the parcel is; None for a message."""

    parcel: Parcel
    hold: Hold | None = None
    schedule: bytes | None = None


@dataclass(frozen=True, slots=True)
class ImportBatch:
    """The next messages, by due time. ``progress`` is committed with them. ``again``: how many committed messages the
    source still had; it only has to remove them."""

    items: Sequence[ImportItem]
    progress: str
    again: int = 0


@dataclass(frozen=True, slots=True)
class ImportSelection:
    """The messages to import: the first ``limit`` of those due from ``cutoff_ms``. Schedules are no messages, so all of
    them are imported. ``rewrites`` rename destinations."""

    cutoff_ms: int | None = None
    limit: int | None = None
    rewrites: Sequence[Rewrite] = ()

    def includes(self, due_ms: int) -> bool:
        return self.cutoff_ms is None or due_ms >= self.cutoff_ms

    def as_dict(self) -> dict[str, object]:
        rewrites = [one.text for one in self.rewrites] or None
        return given(cutoff_ms=self.cutoff_ms, limit=self.limit, rewrite=rewrites)

    def redirected(self, item: ImportItem) -> ImportItem:
        """Return the message with its destination renamed."""
        if not self.rewrites:
            return item
        return item._replace(parcel=item.parcel._replace(target=self.retargeted(item.parcel.target)))

    def retargeted(self, target: Target) -> Target:
        """Apply all rewrites to the exchange, or at the default exchange to the queue."""
        exchange, routing_key = target
        if exchange:
            return Target(self._renamed(exchange), routing_key)
        return Target(exchange, self._renamed(routing_key))

    def renamed(self, name: str) -> str:
        """Apply all rewrites to the name."""
        for rewrite in self.rewrites:
            name = rewrite(name)
        return name

    def _renamed(self, name: bytes) -> bytes:
        return self.renamed(name.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


@dataclass(slots=True)
class Goal:
    """A destination: its number of messages, and the first due time (None: only a run can find out). ``unfit``: how
    many of the messages would be held for their own faults."""

    messages: int
    first_due_ms: int | None
    unfit: int = 0


def count_reason(reasons: dict[str, int], why: str, messages: int = 1) -> None:
    """Count messages under the reason why they are held."""
    if why not in reasons and len(reasons) >= MOST_REASONS:
        why = OTHER_REASONS
    reasons[why] = reasons.get(why, 0) + messages


def soonest(one_ms: int | None, other_ms: int | None) -> int | None:
    """The earlier of two times; None means unknown."""
    return other_ms if one_ms is None else one_ms if other_ms is None else min(one_ms, other_ms)


@dataclass(slots=True)
class Survey:
    """A report of a source's content, made without changing it.

    ``messages``: the number of matching messages. ``schedules``: those of an export, which all come. ``unfit``: why
    some of the examined messages would be held at any destination, with counts. ``left``: why other messages stay, with
    counts. ``remarks``: notes for operators. ``doubts``: the remarks about possibly missing or repeated messages, which
    a run also reports. ``brought``: why a run needs ``--again``, or ""."""

    messages: int = 0
    schedules: int = 0
    first_due_ms: int | None = None
    last_due_ms: int | None = None
    goals: dict[Target, Goal] = field(default_factory=dict)
    unfit: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    brought: str = ""

    def add(
        self, target: Target, due_ms: int, problem: str = "", *, messages: int = 1, last_due_ms: int | None = None
    ) -> None:
        """Count messages due from ``due_ms`` at one destination. ``problem``: why any destination would hold them."""
        self.messages += messages
        self.first_due_ms = soonest(self.first_due_ms, due_ms)
        self.last_due_ms = max(self.last_due_ms or 0, last_due_ms or due_ms)
        self.expect(target, messages, due_ms)
        if problem:
            count_reason(self.unfit, problem, messages)
            if (goal := self.goals.get(target)) is not None:
                goal.unfit += messages

    def expect(self, target: Target, messages: int, first_due_ms: int | None = None) -> None:
        """Count messages of one destination, but not in the survey's totals."""
        goal = self.goals.get(target)
        if goal is not None:
            goal.messages += messages
            goal.first_due_ms = soonest(goal.first_due_ms, first_due_ms)
        elif len(self.goals) < MOST_GOALS:
            self.goals[target] = Goal(messages, first_due_ms)
        elif MORE_GOALS not in self.remarks:
            self.remarks.append(MORE_GOALS)

    def doubt(self, text: str) -> None:
        self.remarks.append(text)
        self.doubts.append(text)

    def leave(self, why: str, messages: int = 1) -> None:
        if messages:
            self.left[why] = self.left.get(why, 0) + messages


@dataclass(frozen=True, slots=True)
class Run:
    """One import, as recorded in the store. ``parameters`` never contain a password. ``token`` is unique over all runs
    of all stores. ``superseded``: messages not parked because other messages wait under their keys."""

    id: int
    source: str
    parameters: Mapping[str, object]
    phase: Phase
    who: str
    began_ms: int
    staged: int | None = None
    parked: int = 0
    held: int = 0
    progress: str | None = None
    token: str = ""
    superseded: int = 0

    @property
    def committed(self) -> int:
        return self.parked + self.held + self.superseded


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One ``s/pattern/replacement/`` for destinations such as ``queue@MACHINE``. It replaces the first match."""

    pattern: re.Pattern[str]
    replacement: str
    text: str

    def __call__(self, name: str) -> str:
        return self.pattern.sub(self.replacement, name, count=1)


def given(**parameters: object) -> dict[str, object]:
    """Keep the parameters that are not None."""
    return {name: value for name, value in parameters.items() if value is not None}


def read_rewrite(text: str) -> Rewrite:
    """Parse ``s/@.*//``, in the syntax of Python's ``re.sub``. Any punctuation can replace the slashes. Raises
    ValueError with the expected form.

    >>> read_rewrite("s/@.*//")("sales@SERVER7")
    'sales'
    """
    expected = "an expression such as s/@.*//"
    found = _EXPRESSION.fullmatch(text)
    if found is None:
        raise ValueError(expected)
    _, pattern, replacement = found.groups()
    try:
        compiled = re.compile(pattern)
        # Check that the referenced groups exist; a pattern without a match would not reveal a missing group.
        re.compile(f"{pattern}|").sub(replacement, "")
    except (re.error, IndexError) as error:
        raise ValueError(f"{expected}; this one does not compile: {error}") from None
    return Rewrite(compiled, replacement, text)


_EXPRESSION: Final = re.compile(r"s([^\w\\])((?:(?!\1).)*)\1((?:(?!\1).)*)\1", re.DOTALL)
