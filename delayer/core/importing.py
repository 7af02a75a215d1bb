"""Legacy imports as values: what other systems still hold, on its way into this one. Pure.

    staging ──staged──> running ──all of it committed──> done
       └───────────────────┴──told to──> aborted

*Staging* takes what is meant out of everybody else's reach, or notes what there is to read. *Running* commits batch
after batch, the soonest due first; the source loses a batch only when it is committed. A run that was interrupted goes
on where its last commit stands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from delayer.core.hold import Hold
from delayer.core.message import Parcel, Target

SOON_MS: Final = 60_000
"""What is due within this, or is overdue, may be in the hands of the system that it is taken from."""


UNREADABLE: Final = "unreadable"
"""Why a record is left that nobody can read."""
BEHIND: Final = "behind too many that are not meant: not looked at"
"""Why messages of a queue are left that were not reached."""
UNGIVEN: Final = "not handed out by their broker in time: not looked at"
CONSUMED: Final = "in queues that somebody else consumes: not looked at, unless they are named"
UNHELD: Final = "in queues that hold nothing for a time: not looked at, unless they are named"
OWN: Final = "in queues of delayer's own ({}): never taken"
FOR_PEOPLE: Final = frozenset({UNREADABLE, BEHIND, UNGIVEN, CONSUMED})
"""Of the reasons why messages are left those that were not wanted: somebody has to know of them."""
MOST_REASONS: Final = 100
"""Reasons that are told one by one: a file may have one for each of its messages."""
OTHER_REASONS: Final = "for other reasons"
MOST_GOALS: Final = 100_000
"""Destinations that a survey tells one by one: its memory does not grow with the backlog."""
MORE_GOALS: Final = f"destinations beyond the first {MOST_GOALS:,} are asked about when their messages come"


class Phase(StrEnum):
    """Where a run stands."""

    STAGING = "staging"
    RUNNING = "running"
    DONE = "done"
    ABORTED = "aborted"


class Item(NamedTuple):
    """One message. ``hold``: why the import holds it; None where it waits like others."""

    parcel: Parcel
    hold: Hold | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """The next messages, soonest due first. ``progress`` is committed with them; ``again``: how many were met that are
    committed already, and only have to be removed."""

    items: Sequence[Item]
    progress: str
    again: int = 0


@dataclass(frozen=True, slots=True)
class Meant:
    """Which messages of a source are meant: due at ``cutoff_ms`` or later, and of those the ``limit`` soonest."""

    cutoff_ms: int | None = None
    limit: int | None = None

    def includes(self, due_ms: int) -> bool:
        return self.cutoff_ms is None or due_ms >= self.cutoff_ms

    def as_dict(self) -> dict[str, int]:
        said = {"cutoff_ms": self.cutoff_ms, "limit": self.limit}
        return {name: value for name, value in said.items() if value is not None}


@dataclass(slots=True)
class Goal:
    """How many messages go to one destination, and when the first of them is due; None where only a run can tell.
    ``unfit``: how many of them would be held, whatever the broker says of the destination."""

    messages: int
    first_due_ms: int | None
    unfit: int = 0


def count_reason(reasons: dict[str, int], why: str, messages: int = 1) -> None:
    """Count messages by the reason why they are held."""
    if why not in reasons and len(reasons) >= MOST_REASONS:
        why = OTHER_REASONS
    reasons[why] = reasons.get(why, 0) + messages


def soonest(one_ms: int | None, other_ms: int | None) -> int | None:
    """The sooner of two instants, of which each may be unknown."""
    return other_ms if one_ms is None else one_ms if other_ms is None else min(one_ms, other_ms)


@dataclass(slots=True)
class Survey:
    """What a source holds, without changing anything there. ``messages``: those that are meant; None where only a run
    can tell. ``unfit``: why some of them would be held, wherever they go, and how many; as far as the source was
    asked. ``left``: why others stay, and how many. ``remarks``: for people. ``doubts``: those of them that a run has
    to tell as well, because something may be lacking, or come in twice. ``brought``: imports that brought the same
    before. ``superseded``: how many would not be parked, as others wait under their keys."""

    messages: int | None = 0
    first_due_ms: int | None = None
    last_due_ms: int | None = None
    goals: dict[Target, Goal] = field(default_factory=dict)
    unfit: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    brought: list[int] = field(default_factory=list)
    superseded: int = 0

    def add(
        self, target: Target, first_due_ms: int, last_due_ms: int | None = None, messages: int = 1, problem: str = ""
    ) -> None:
        """Count messages of one destination. ``problem``: why they would be held wherever they go, if they would."""
        last_due_ms = first_due_ms if last_due_ms is None else last_due_ms
        self.messages = (self.messages or 0) + messages
        self.first_due_ms = soonest(self.first_due_ms, first_due_ms)
        self.last_due_ms = last_due_ms if self.last_due_ms is None else max(self.last_due_ms, last_due_ms)
        self.expect(target, messages, first_due_ms)
        if problem:
            count_reason(self.unfit, problem, messages)
            if (goal := self.goals.get(target)) is not None:
                goal.unfit += messages

    def expect(self, target: Target, messages: int, first_due_ms: int | None = None) -> None:
        """Note that messages go to one destination, which may be known before they are counted."""
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

    @property
    def for_people(self) -> bool:
        return not FOR_PEOPLE.isdisjoint(self.left)

    def leave(self, why: str, messages: int = 1) -> None:
        if messages:
            self.left[why] = self.left.get(why, 0) + messages


@dataclass(frozen=True, slots=True)
class Run:
    """One import as the store knows it. ``parameters`` never hold a password. ``token``: no other run has it, of no
    store. ``superseded``: messages that were not parked, as others wait under their keys."""

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


class NotARewrite(ValueError):
    """It completes "expected …"."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One ``s/pattern/replacement/flags``, as sed has it: of destinations such as ``queue@MACHINE``."""

    pattern: re.Pattern[str]
    replacement: str
    everywhere: bool
    text: str

    def __call__(self, name: str) -> str:
        return self.pattern.sub(self.replacement, name, count=0 if self.everywhere else 1)


REPLIES: Final = "rewrite_reply_to"


def rewriting(rewrites: Sequence[Rewrite], name: str = "rewrite") -> dict[str, object]:
    """As parameters of a run."""
    return {name: [one.text for one in rewrites]} if rewrites else {}


def renamed(name: bytes, rewrites: Sequence[Rewrite]) -> bytes:
    """A name after all of these, in their order."""
    if not rewrites:
        return name
    text = name.decode("utf-8", "surrogateescape")
    for rewrite in rewrites:
        text = rewrite(text)
    return text.encode("utf-8", "surrogateescape")


def redirected(item: Item, rewrites: Sequence[Rewrite]) -> Item:
    """The same message to where its destination, the exchange or at the default exchange the queue, is renamed to."""
    if not rewrites:
        return item
    return item._replace(parcel=item.parcel._replace(target=retargeted(item.parcel.target, rewrites)))


def retargeted(target: Target, rewrites: Sequence[Rewrite]) -> Target:
    """The destination after these."""
    exchange, routing_key = target
    if exchange:
        return Target(renamed(exchange, rewrites), routing_key)
    return Target(exchange, renamed(routing_key, rewrites))


def read_rewrite(text: str) -> Rewrite:
    """Read ``s/@.*//``; any character may stand in place of the slashes; flags ``g`` and ``i``. The pattern is
    Python's, the replacement sed's (``&``, ``\\1``). Raises NotARewrite.

    >>> read_rewrite("s/@.*//")("sales@SERVER7")
    'sales'
    """
    expected = "an expression such as s/@.*//"
    found = _EXPRESSION.fullmatch(text)
    if found is None:
        raise NotARewrite(f"{expected}, with flags of g and i only")
    delimiter = found["delimiter"]
    pattern, replacement = (found[name].replace(f"\\{delimiter}", delimiter) for name in ("pattern", "replacement"))
    try:
        compiled = re.compile(pattern, re.IGNORECASE if "i" in found["flags"].lower() else 0)
        template = _BACK_REFERENCE.sub(_in_python, replacement)
        # Whether its groups exist; of a pattern that matches nothing this is not seen otherwise.
        re.compile(f"(?:{pattern})|").sub(template, "")
    except (re.error, IndexError) as error:
        raise NotARewrite(f"{expected}; this one does not compile: {error}") from None
    return Rewrite(compiled, template, "g" in found["flags"], text)


_EXPRESSION: Final = re.compile(
    r"s(?P<delimiter>[^a-zA-Z0-9\\\n])(?P<pattern>(?:\\.|(?!(?P=delimiter))[^\\])*)(?P=delimiter)"
    r"(?P<replacement>(?:\\.|(?!(?P=delimiter))[^\\])*)(?P=delimiter)(?P<flags>[giI]*)",
    re.DOTALL,
)
_BACK_REFERENCE: Final = re.compile(r"&|\\(.)", re.DOTALL)


def _in_python(found: re.Match[str]) -> str:
    if found[0] == "&":
        return r"\g<0>"
    return rf"\g<{found[1]}>" if found[1].isdigit() else found[1].replace("\\", "\\\\")
