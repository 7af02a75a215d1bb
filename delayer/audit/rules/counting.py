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
from delayer.audit.rules.message import HELD, Context, Message, Segment
from delayer.audit.rules.standouts import Standouts
from delayer.audit.rules.tally import Key, Partial, Tallies, Tally

BOUND: Final = 50_000
"""Keys that one portion of rows is counted under before they are handed on: about 20 MB."""


def counted(messages: Iterable[Message], context: Context, bound: int = BOUND) -> Iterator[Partial]:
    """The tallies of ``messages``, some keys more than once. Holds ``bound`` keys at most."""
    tallies = Tallies(bound)
    standouts = Standouts()
    for message in messages:
        tally = Tally(1, message.body_bytes + len(message.properties), message.due_ms, message.due_ms)
        where = message.where.encode()
        tallies.add(Key("lane", message.lane, where), tally)
        properties = integrity.parsed(message)
        for fault in integrity.faults(message, properties, context):
            tallies.add(Key("fault", message.lane, where, fault.encode()), tally._replace(examples=(message.id,)))
        if context.whole:
            yield Key(repeats.ID, message.id), tally
            fingerprint = repeats.fingerprint(message, properties)
            if fingerprint is not None:
                yield Key(repeats.MESSAGE, 0, fingerprint), tally._replace(examples=(message.id,))
        if message.key is not None:
            tallies.add(_KEYED, tally)
        if message.where != HELD:
            _count_waiting(message, tally, tallies, context)
            standouts.add(message, tally.size)
        if tallies.full:
            yield from tallies.drain()
    yield from tallies.drain()
    yield from standouts.drain()


_KEYED = Key("keyed")


def _count_waiting(message: Message, tally: Tally, tallies: Tallies, context: Context) -> None:
    """What is asked of messages that have their due time before them, as it should be."""
    tallies.add(Key("second", message.due_ms // 1000), tally)
    tallies.add(Key("route", 0, message.route), tally)
    tallies.add(Key("target", 0, message.to_exchange, message.to_key), tally)
    age = overdue.age(message.due_ms, context.now_ms)
    if age is not None:
        tallies.add(Key("overdue", message.lane, message.where.encode(), age.encode()), tally)
        tallies.add(Key("overdue route", message.lane, message.route), tally)


def counted_segments(found: Iterable[Segment], context: Context) -> Iterator[Partial]:
    """The tallies of segments: few, so they are handed on at the end."""
    tallies = Tallies(BOUND)
    for segment in found:
        live = segment.messages - segment.cancelled
        tally = Tally(1, segment.packed_bytes, segment.first_due_ms, segment.last_due_ms)
        if segment.lane is not None:
            tallies.add(Key("segments", segment.lane), tally)
            tallies.add(Key("packed", segment.lane), tally._replace(messages=live))
        for fault in segments.faults(segment, context):
            key = Key("segment fault", -1 if segment.lane is None else segment.lane, fault.encode())
            tallies.add(key, tally._replace(messages=max(live, 0), examples=(segment.id,)))
        if tallies.full:
            yield from tallies.drain()
    yield from tallies.drain()
