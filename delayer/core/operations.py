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
    undelayed = False  # Every plan (plan.py) states this: whether it is for a message that asks for no delay.


Operation = Parcel | Cancel


class Applied(NamedTuple):
    """The effect of a batch. ``cancelled``: the positions of the cancels of one key that removed a message."""

    cancelled: frozenset[int] = frozenset()


@dataclass(slots=True)
class Term:
    """The right of one subscription to apply operations with keys. ``seen``: ``intake`` in the table ``store``, as last
    read when the term began. ``epoch``: that number once the term's first batch with keys has raised it; None before.
    From then on the store rejects batches with keys of every earlier term, however late they arrive."""

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
    """Every key in the batch. The store deletes the waiting and held messages of these keys, except the keys in
    :attr:`yielding`. Then it settles the batch and writes ``kept``."""
    joining: set[bytes] = field(default_factory=set)
    """The keys whose message in ``kept`` depends on what waits in the store: by its mode it is dropped if a message
    waits (keep), or continues that message's burst (debounce). Without the keys whose stored message an earlier
    operation of the batch replaced or cancelled."""
    groups: list[KeyGroup] = field(default_factory=list)
    """Key groups whose waiting messages the store also deletes."""
    met: set[int] = field(default_factory=set)
    """The positions of cancels that met a message of the batch."""
    open: dict[bytes, int] = field(default_factory=dict)
    """By key, the position of its cancel, if no operation before it in the batch concerns that key. Only the store can
    tell whether this cancel removes a message."""

    @property
    def yielding(self) -> set[bytes]:
        """The keys whose message in ``kept`` is dropped if another waits in the store."""
        return {parcel.key for parcel in self.kept if parcel.mode.keep and parcel.key in self.joining}

    def settle(self, waiting: Mapping[bytes, int | None], now_ms: int) -> Fold:
        """Apply the modes, and return what is left. ``waiting``: for each key whose message waited or was held in the
        store, when that message's burst began, in epoch ms; None if it was held, which ends a burst. A message whose
        ceiling has passed already is due now, so it is not late."""
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
    # Not as in :meth:`Fold.settle`: for each key of the batch so far, the place of its message in ``kept``; None if the
    # batch has cancelled it.
    waiting: dict[bytes, int | None] = {}

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
            # Whether no operation so far affects the message that waits in the store under this key.
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
            if not any(map(operation.key.startswith, left.groups)):  # Else that group's cancel removed it.
                left.open[operation.key] = at
    left.keys.update(waiting)
    left.kept = [parcel for parcel in kept if parcel is not None]
    return left
