"""Under which keys each message and each segment is counted: all that the rules want of the rows, in one pass. Pure.

kinds of keys       number        first             second
  id                the id
  lane              lane          where it stands
  keyed
  second            of its due
  route                           the route
  target                          exchange          routing key
  fault             lane          where it stands   what is wrong (integrity)
  repeat                          fingerprint
  overdue           lane          where it stands   how late
  overdue route     lane          the route         waiting, or paced
  oldest, farthest, largest       id, everything else about it
  segments          lane
  segment fault     lane          what is wrong
  damage                          table             where, and why (damage)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from delayer.audit.rules import integrity, overdue, repeats, segments
from delayer.audit.rules.message import HELD, PACED, PACKED, WAITING, Context, Message, Segment
from delayer.audit.rules.standouts import Standouts
from delayer.audit.rules.tally import Key, Partial, Tallies, Tally

BOUND: Final = 50_000
"""Keys that one portion of rows is counted under before they are handed on: about 20 MB."""


def counted(messages: Iterable[Message], context: Context, bound: int = BOUND) -> Iterator[Partial]:
    """The tallies of ``messages``. Some keys come more than once; holds ``bound`` of them, and a few more, at most."""
    tallies = Tallies(bound)
    standouts = Standouts()
    for message in messages:
        due_ms, size = message.due_ms, message.body_bytes + len(message.properties)
        properties = integrity.parsed(message)
        for fault in integrity.faults(message, properties, context):
            key = ("fault", message.lane, _WHERE[message.where], fault.encode())
            tallies.add(key, size, due_ms)
            tallies.name(key, message.id)
        tallies.add(("lane", message.lane, _WHERE[message.where], b""), size, due_ms)
        if message.key is not None:
            tallies.add(("keyed", 0, b"", b""), size, due_ms)
        if context.whole:
            yield Key(repeats.ID, message.id), Tally(1, size, due_ms, due_ms)
            fingerprint = repeats.fingerprint(message, properties)
            if fingerprint is not None:
                yield Key(repeats.MESSAGE, 0, fingerprint), Tally(1, size, due_ms, due_ms, (message.id,))
        if message.where != HELD:
            standouts.add(message, size)
            tallies.add(("second", due_ms // 1000, b"", b""), size, due_ms)
            tallies.add(("route", 0, message.route, b""), size, due_ms)
            tallies.add(("target", 0, message.to_exchange, message.to_key), size, due_ms)
            if due_ms < context.now_ms:
                _count_late(message, due_ms, size, tallies, context)
        elif message.retry_ms is not None:
            _count_late(message, message.retry_ms, size, tallies, context)
        if tallies.full:
            yield from tallies.drain()
    yield from tallies.drain()
    yield from standouts.drain()


_WHERE: Final = {where: where.encode() for where in (WAITING, HELD, PACKED, PACED)}


def _count_late(message: Message, expected_ms: int, size: int, tallies: Tallies, context: Context) -> None:
    age = overdue.age(expected_ms, context.now_ms)
    if age is not None:
        where = PACED if message.where == WAITING and message.route in context.paced else message.where
        tallies.add(("overdue", message.lane, _WHERE[where], age.encode()), size, message.due_ms)
        if message.where == WAITING:
            tallies.add(("overdue route", message.lane, message.route, _WHERE[where]), size, message.due_ms)


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
