"""Values that Python's own types cannot tell apart."""

from __future__ import annotations


class Timestamp(int):
    """An AMQP timestamp (field type ``T``, or the ``timestamp`` property): whole seconds since the epoch."""

    __slots__ = ()


class KeyGroup(bytes):
    """Every key that begins with these bytes; they are not empty."""

    __slots__ = ()
