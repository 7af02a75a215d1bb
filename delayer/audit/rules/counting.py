"""Under which keys each message and each segment is counted: all that the rules want of the rows, in one pass. Pure.

kinds of keys       number        first             second
  lane              lane          where it stands
  fault             lane          where it stands   what is wrong (integrity)
  overdue           lane          where it stands   how late
  overdue route     lane          the route
  keyed
  second            of its due
  route                           the route
  target                          exchange          routing key
  repeat                          fingerprint
  id                the id
  oldest, farthest, largest       id, everything else about it
  segments          lane
  segment fault     lane          what is wrong
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from delayer.audit.rules import integrity, overdue, repeats, segments
from delayer.audit.rules.message import HELD, PACKED, WAITING, Context, Message, Segment
from delayer.audit.rules.standouts import Standouts
from delayer.audit.rules.tally import Key, Partial, Tallies, Tally

BOUND: Final = 50_000
"""Keys that one portion of rows is counted under before they are handed on: about 20 MB."""


def counted(messages: Iterable[Message], context: Context, bound: int = BOUND) -> Iterator[Partial]:
    """The tallies of ``messages``, some keys more than once. Holds ``bound`` keys, and a few more, at most."""
    tallies = Tallies(bound)
    standouts = Standouts()
    for message in messages:
        where = _WHERE[message.where]
        due_ms = message.due_ms
        size = message.body_bytes + len(message.properties)
        tallies.add(("lane", message.lane, where, b""), size, due_ms)
        properties = integrity.parsed(message)
        for fault in integrity.faults(message, properties, context):
            key = ("fault", message.lane, where, fault.encode())
            tallies.add(key, size, due_ms)
            tallies.name(key, message.id)
        if context.whole:
            fingerprint = repeats.fingerprint(message, properties)
            if fingerprint is not None:
                yield Key(repeats.MESSAGE, 0, fingerprint), Tally(1, size, due_ms, due_ms, (message.id,))
        if message.key is not None:
            tallies.add(_KEYED, size, due_ms)
        if message.retry_ms is not None:
            _count_late(message, message.retry_ms, size, tallies, context)
        if where != _HELD:
            _count_waiting(message, size, tallies, context)
            standouts.add(message, size)
        if tallies.full:
            yield from tallies.drain()
    yield from tallies.drain()
    yield from standouts.drain()


_WHERE: Final = {where: where.encode() for where in (WAITING, HELD, PACKED)}
_HELD: Final = _WHERE[HELD]
_KEYED: Final = ("keyed", 0, b"", b"")


def _count_waiting(message: Message, size: int, tallies: Tallies, context: Context) -> None:
    """What is asked of messages that have their due time before them, as it should be."""
    due_ms = message.due_ms
    tallies.add(("second", due_ms // 1000, b"", b""), size, due_ms)
    tallies.add(("route", 0, message.route, b""), size, due_ms)
    tallies.add(("target", 0, message.to_exchange, message.to_key), size, due_ms)
    if due_ms < context.now_ms:
        _count_late(message, due_ms, size, tallies, context)


def _count_late(message: Message, expected_ms: int, size: int, tallies: Tallies, context: Context) -> None:
    age = overdue.age(expected_ms, context.now_ms)
    if age is not None:
        tallies.add(("overdue", message.lane, _WHERE[message.where], age.encode()), size, message.due_ms)
        if message.where == WAITING:
            tallies.add(("overdue route", message.lane, message.route, b""), size, message.due_ms)


def identified(messages: Iterable[Message]) -> Iterator[Partial]:
    """Each message under its id. Apart from the others, because Spark does this one without Python."""
    for message in messages:
        size = message.body_bytes + len(message.properties)
        yield Key(repeats.ID, message.id), Tally(1, size, message.due_ms, message.due_ms)


def counted_segments(found: Iterable[Segment], context: Context) -> Iterator[Partial]:
    """The tallies of segments."""
    for segment in found:
        live = segment.messages - segment.cancelled
        tally = Tally(1, segment.packed_bytes, segment.first_due_ms, segment.last_due_ms)
        if segment.lane is not None:
            yield Key("segments", segment.lane), tally
            yield Key("packed", segment.lane), tally._replace(messages=live)
        affected = max(live, 0) if segment.lane is not None else segment.tombstones
        for fault in segments.faults(segment, context):
            key = Key("segment fault", -1 if segment.lane is None else segment.lane, fault.encode())
            yield key, tally._replace(messages=affected, examples=(segment.id,))
