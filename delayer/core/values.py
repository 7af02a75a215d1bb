"""AMQP field values that Python's own types cannot tell apart."""

from __future__ import annotations


class Timestamp(int):
    """An AMQP timestamp (field type ``T``, or the ``timestamp`` property): whole seconds since the epoch."""

    __slots__ = ()
