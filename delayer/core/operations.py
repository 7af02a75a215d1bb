"""The ordered operations that an intake passes to a backlog, and the fold to one operation for each key.

An operation is a :class:`Parcel`, to be parked, or a :class:`Cancel`. A parcel with a key replaces the waiting message
of that key. Operations on one key apply in order, so only the last for each key in a batch has to reach the store: the
rest act on messages that the store never sees. :func:`fold` finds the last ones, and the cancels that met a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from delayer.core.message import KeyGroup, Parcel


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
    """The messages replaced or cancelled later in the batch. They count as parked and cancelled."""
    keys: set[bytes] = field(default_factory=set)
    """Every key in the batch. The store deletes the messages that wait under them, then writes ``kept``."""
    groups: list[KeyGroup] = field(default_factory=list)
    """Key groups whose waiting messages the store also deletes."""
    met: set[int] = field(default_factory=set)
    """The positions of cancels that met a message of the batch."""
    open: dict[bytes, int] = field(default_factory=dict)
    """By key, the position of a cancel with nothing before it in the batch. The store finds out if it met a message."""

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
        kept[place] = waiting[key] = None
        return True

    for at, operation in enumerate(operations):
        if isinstance(operation, Parcel):
            if (key := operation.key) is not None:
                if key in waiting:
                    drop(key)
                waiting[key] = len(kept)
            kept.append(operation)
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
