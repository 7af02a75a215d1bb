"""Values that Python's own types cannot tell apart, or keep together."""

from __future__ import annotations

from typing import NamedTuple


class Timestamp(int):
    """An AMQP timestamp (field type ``T``, or the ``timestamp`` property): whole seconds since the epoch."""

    __slots__ = ()


class KeyGroup(bytes):
    """Every key that begins with these bytes; they are not empty."""

    __slots__ = ()


class TakenOut(NamedTuple):
    """The keys whose waiting messages were cancelled. ``unsure``: those of messages that are not tried any more, but
    that their destination perhaps has (core/hold.py)."""

    keys: frozenset[bytes] = frozenset()
    unsure: frozenset[bytes] = frozenset()
