"""The ordered operations that an intake passes to a backlog, and the fold to one operation for each key.

An operation is a :class:`Parcel`, to be parked, or a :class:`Cancel`. A parcel with a key replaces the waiting message
of that key, or yields to it (KeyMode). Operations on one key apply in order, so only one for each key in a batch has to
reach the store: the rest act on messages that the store never sees. :func:`fold` finds those that remain, and the
cancels that met a message. Once the store knows what waits under their keys, :meth:`Fold.settle` applies the modes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from delayer.core.message import REPLACE, KeyGroup, Parcel


@dataclass(frozen=True, slots=True)
class Cancel:
    """Delete the waiting or held message of this key, or those of this key group. The cancel is not delivered."""

    key: bytes | KeyGroup
    undelayed = False


Operation = Parcel | Cancel


class Applied(NamedTuple):
    """The effect of a batch of operations. ``cancelled``: the positions of single-key cancels that met a message."""

    cancelled: frozenset[int] = frozenset()


@dataclass(slots=True)
class Term:
    """The time in which one process applies operations with keys. Terms follow one another. ``seen``: the epoch of the
    intake when the term's first delivery arrived. ``epoch``: the epoch to which the term's first batch with keys raised
    it. Then a batch of an earlier term fails, however late it reaches the store."""

    seen: int
    epoch: int | None = None


@dataclass(slots=True)
class Fold:
    """The result of folding a batch."""

    kept: list[Parcel] = field(default_factory=list)
    """The messages to write, in the order of the batch, at most one for each key."""
    dropped: list[Parcel] = field(default_factory=list)
    """The messages replaced or cancelled later in the batch, and those that yield. They count as parked and
    cancelled."""
    keys: set[bytes] = field(default_factory=set)
    """Every key in the batch. The store deletes the messages that wait under them, except those under :attr:`yielding`
    ones, then settles the batch and writes ``kept``."""
    joining: set[bytes] = field(default_factory=set)
    """The keys under which the message in ``kept`` yields to the one in the store, or continues its burst. No operation
    of the batch before it ended that one."""
    groups: list[KeyGroup] = field(default_factory=list)
    """Key groups whose waiting messages the store also deletes."""
    met: set[int] = field(default_factory=set)
    """The positions of cancels that met a message of the batch."""
    open: dict[bytes, int] = field(default_factory=dict)
    """By key, the position of a cancel with nothing before it in the batch. The store finds out if it met a message."""

    @property
    def yielding(self) -> set[bytes]:
        """The keys under which the message of the batch is dropped if one waits in the store."""
        return {parcel.key for parcel in self.kept if parcel.mode.keep and parcel.key in self.joining}

    def settle(self, waiting: Mapping[bytes, int | None], now_ms: int) -> Fold:
        """Return what is left once the modes are applied. ``waiting``: the keys under which a message waited in the
        store, each with the start of its burst, in epoch ms; None for a held one, whose burst is over. If the ceiling
        has passed already, the message is due now, and not late."""
        left = replace(self, kept=[], dropped=[*self.dropped])
        for parcel in self.kept:
            keep, ceiling_ms = parcel.mode
            joins = parcel.key in self.joining and parcel.key in waiting
            if keep and joins:
                left.dropped.append(parcel)
            elif ceiling_ms is None:
                left.kept.append(parcel)
            else:
                first_ms = waiting[parcel.key] if joins and parcel.key is not None else None
                latest_ms = max(now_ms, (now_ms if first_ms is None else first_ms) + ceiling_ms)
                left.kept.append(parcel._replace(due_ms=min(parcel.due_ms, latest_ms), since_ms=first_ms))
        return left

    def applied(self, deleted: frozenset[bytes] | set[bytes]) -> Applied:
        """Return the result, once the store has ``deleted`` the waiting messages of these keys."""
        return Applied(frozenset(self.met | {at for key, at in self.open.items() if key in deleted}))


def fold(operations: Sequence[Operation]) -> Fold:
    """Resolve ``operations`` by key and by key group.

    >>> first, second = (Parcel(0, b"", b"", b"", None, b"", body, b"k") for body in (b"1", b"2"))
    >>> left = fold([first, Cancel(b"k"), second, Cancel(b"other")])
    >>> [parcel.body for parcel in left.kept], left.met, left.open
    ([b'2'], {1}, {b'other': 3})
    """
    left = Fold()
    kept: list[Parcel | None] = []
    waiting: dict[bytes, int | None] = {}  # By key seen so far: the place of its waiting message in ``kept``, if any.

    def drop(key: bytes) -> bool:
        place = waiting[key]
        if place is None:
            return False
        left.dropped.append(kept[place])  # type: ignore[arg-type]  # a place is dropped once
        left.joining.discard(key)
        kept[place] = waiting[key] = None
        return True

    def keep(parcel: Parcel) -> None:
        if (key := parcel.key) is not None:
            if parcel.mode.keep and waiting.get(key) is not None:
                left.dropped.append(parcel)
                return
            joins = key in left.joining if key in waiting else not key.startswith(tuple(left.groups))
            if key in waiting:
                drop(key)
            if joins and parcel.mode != REPLACE:
                left.joining.add(key)
            waiting[key] = len(kept)
        kept.append(parcel)

    for at, operation in enumerate(operations):
        if isinstance(operation, Parcel):
            keep(operation)
        elif isinstance(group := operation.key, KeyGroup):
            left.groups.append(group)
            for key in waiting:
                if key.startswith(group):
                    drop(key)
        elif operation.key in waiting:
            if drop(operation.key):
                left.met.add(at)
        else:
            waiting[operation.key] = None
            if not any(map(operation.key.startswith, left.groups)):  # Else nothing waits there any more.
                left.open[operation.key] = at
    left.keys.update(waiting)
    left.kept = [parcel for parcel in kept if parcel is not None]
    return left
