"""Damage: places of a table that Postgres itself cannot read, and what is known of what stands there. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from delayer.audit.findings import Finding
from delayer.audit.rules.evidence import Evidence
from delayer.audit.rules.message import HELD, WAITING, Context
from delayer.audit.rules.tally import Key, Partial, Tally

PLACE, TABLE, MESSAGE = "damage", "damaged", "damaged message"
"""Kinds of keys. ``first`` is the table; ``second`` of a place what it is and the reason, with a line between them."""
INDEX: Final = "index "
"""What a place that is an index begins with."""
TOMBSTONES_LOST: Final = "the store cannot read which of its messages were cancelled"
"""The beginning of the fault of a segment of which that is so; it does not read back."""
_PLACES, _REASONS = 20, 3
_TABLES: Final = {"held": HELD}


class Damage(NamedTuple):
    """``place``: a row's ctid, or a page. ``lane``, ``id``, ``due_ms``: of a message of which that much can be read."""

    relation: str
    place: str
    reason: str
    lane: int | None = None
    id: int | None = None
    due_ms: int | None = None


def counted(places: Iterable[Damage]) -> Iterator[Partial]:
    """The tallies of damage. A message that stands in its lane is one of that lane, whatever can be read of it. An
    index is met by everybody who reads its table, and is one place."""
    for one in dict.fromkeys(places):
        table = one.relation.encode()
        yield Key(PLACE, 0, table, f"{one.place}\n{one.reason}".encode()), Tally(1, 0, 0, 0)
        yield Key(TABLE, 0, table), Tally(1, 0, 0, 0)
        if one.lane is not None and one.id is not None and one.due_ms is not None:
            tally = Tally(1, 0, one.due_ms, one.due_ms)
            yield Key("lane", one.lane, _TABLES.get(one.relation, WAITING).encode()), tally
            yield Key(MESSAGE, 0, table), tally._replace(examples=(one.id,))


def unread(evidence: Evidence) -> dict[str, str]:
    """Tables of which nothing could be read because of one of their indexes, with that index."""
    places = ((key.first.decode(), key.second.decode().split("\n", 1)[0]) for key, _ in evidence.of(PLACE))
    return {table: place for table, place in places if place.startswith(INDEX)}


def findings(rule: str, evidence: Evidence, context: Context) -> list[Finding]:
    """One for each table."""
    return [_finding(rule, key.first, tally.messages, evidence, context) for key, tally in evidence.of(TABLE)]


def _finding(rule: str, table: bytes, count: int, evidence: Evidence, context: Context) -> Finding:
    told = [key.second.decode().split("\n", 1) for key, _ in evidence.of(PLACE) if key.first == table]
    details: dict[str, Any] = {"places": [place for place, _ in told[:_PLACES]]}
    details["reasons"] = list(dict.fromkeys(reason for _, reason in told))[:_REASONS]
    name = table.decode()
    if name in context.partitions:
        details["due_from_ms"], details["due_before_ms"] = context.partitions[name]
    known = evidence.get(Key(MESSAGE, 0, table))
    if known is not None:
        details["examples"] = list(known.examples)
    first = None if known is None else known.first_due_ms
    return Finding(rule, "violation", f"table {name}: the database cannot read it", count, first, details)
