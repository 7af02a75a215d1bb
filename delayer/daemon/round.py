"""What the daemon knows of its topology on the broker, as a value, and how each finding changes it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from delayer.broker.errors import MAJORITY
from delayer.core.topology import Binding, TopologyPart
from delayer.daemon.store_bond import DELETED

KEPT_ROUNDS: Final = 5
"""For how many rounds without an answer of the management API its last answer about majorities stays valid. The API may
be on the node that died, and never return."""
SHOWN: Final = 5
"""Maximum number of parts that a log line names."""
SILENT: Final = "see the broker's log and `rabbitmq-diagnostics cluster_status`: a node hangs, or is overloaded"


@dataclass(frozen=True, slots=True)
class Round:
    """What is known after a finding.

    ``reason``: why the topology is not in place, or "" as far as this is known. ``advice``: the next step. ``missing``:
    parts that were declared before, and that the declaration under way found missing. ``lost``: those that the last
    complete declaration restored. ``again``: those of them that the previous declaration had restored as well.
    ``unlogged``: lost parts that no log line names yet, because their declaration failed. ``silent``: the broker left
    the last round unanswered. ``minorities``: as in :class:`MajorityCount`, by the last known answers. ``uncounted``:
    rounds since the management API last reported them. ``suspect``: the intake queue was silent when it was last
    queried.
    """

    reason: str = ""
    advice: str = ""
    declared: frozenset[TopologyPart] = frozenset()
    missing: tuple[TopologyPart, ...] = ()
    lost: tuple[TopologyPart, ...] = ()
    again: tuple[TopologyPart, ...] = ()
    unlogged: tuple[TopologyPart, ...] = ()
    silent: bool = False
    minorities: Mapping[str, str] = field(default_factory=dict)
    uncounted: int = 0
    suspect: bool = False


@dataclass(frozen=True, slots=True)
class Missing:
    """A declaration begins, and these parts are missing."""

    parts: Collection[TopologyPart]


@dataclass(frozen=True, slots=True)
class Declared:
    """The declaration succeeded. The topology has these parts."""

    parts: Iterable[TopologyPart]


@dataclass(frozen=True, slots=True)
class Failed:
    """The topology cannot be kept in place."""

    reason: str
    advice: str


@dataclass(frozen=True, slots=True)
class Kept:
    """The topology is in place. The declaration was not one of the regular rounds, or it restored what was gone."""


@dataclass(frozen=True, slots=True)
class MajorityCount:
    """A round restored nothing again.

    ``minorities``: our queues without a majority of their members, each with a description; None if the management API
    did not report them. ``answer``: why the intake queue has no majority by its own answer, if ``minorities`` does not
    name it; "" if it has a majority, None if it could not be queried.
    """

    intake: str
    minorities: Mapping[str, str] | None
    answer: str | None


@dataclass(frozen=True, slots=True)
class Silence:
    """The broker left a round unanswered on an open connection. A single one may be due to an election."""

    reason: str


RoundEvent = Missing | Declared | Failed | Kept | MajorityCount | Silence


def after(before: Round, found: RoundEvent) -> Round:
    """Return what is known once ``found`` happened."""
    state = before
    match found:
        case Missing(parts):
            missing = tuple(dict.fromkeys(part for part in parts if part in before.declared))
            return replace(before, missing=missing, unlogged=tuple(dict.fromkeys((*before.unlogged, *missing))))
        case Declared(parts):
            again = tuple(part for part in before.missing if part in before.lost)
            state = replace(before, declared=frozenset(parts), lost=before.missing, again=again)
            return replace(state, missing=(), unlogged=())
        case Silence() if not before.silent:
            return replace(before, silent=True)
        case Silence(silence):
            reason, advice = f"not known, because two rounds got no answer: {silence}", SILENT
        case Failed(reason, advice):
            pass
        case Kept() if before.again:
            reason, advice = f"lost again after the daemon restored it: {names_of(before.again)}", DELETED
        case Kept() | MajorityCount():
            state = before if isinstance(found, Kept) else _counted(before, found)
            reason, advice = _first(state.minorities.values(), "; "), MAJORITY
    reason = reason and f"the topology is not in place: {reason}"
    return replace(state, reason=reason, advice=advice, silent=isinstance(found, Silence))


def _counted(before: Round, found: MajorityCount) -> Round:
    uncounted = 0 if found.minorities is not None else before.uncounted + 1
    known = before.minorities if found.minorities is None else found.minorities
    now, suspect = {} if uncounted > KEPT_ROUNDS else dict(known), before.suspect
    if found.minorities is None or found.intake not in found.minorities:
        was = before.minorities.get(found.intake, "")
        if found.answer is None:
            now[found.intake] = was
        else:  # A first silence may be due to an election.
            now[found.intake] = found.answer if was or suspect else ""
            suspect = bool(found.answer)
    minorities = {name: reason for name, reason in now.items() if reason}
    return replace(before, minorities=minorities, uncounted=uncounted, suspect=suspect)


def names_of(parts: Collection[TopologyPart]) -> str:
    """Name the first parts, for a log line."""
    return _first(f"{part.kind} {part if isinstance(part, Binding) else part.name}" for part in parts)


def _first(texts: Iterable[str], between: str = ", ") -> str:
    found = [*texts]
    more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return between.join(found[:SHOWN]) + more
