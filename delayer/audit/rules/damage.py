"""Damage: places of a table that Postgres itself cannot read, and what is known of what stands there. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from delayer.audit.findings import Finding
from delayer.audit.rules.evidence import Evidence
from delayer.audit.rules.message import Context
from delayer.audit.rules.tally import Key, Partial, Tally

PLACE, TABLE = "damage", "damaged"
"""Kinds of keys. ``first`` is the table; ``second`` of a place what it is and the reason, with a line between them."""
_PLACES, _REASONS = 20, 3


class Damage(NamedTuple):
    """``place``: a range of pages, whose rows were not read from there on; ``reason``: the database's own words."""

    relation: str
    place: str
    reason: str


def counted(places: Iterable[Damage]) -> Iterator[Partial]:
    """The tallies of damage; a place that two readers of a table met is one place."""
    for one in dict.fromkeys(places):
        table = one.relation.encode()
        yield Key(PLACE, 0, table, f"{one.place}\n{one.reason}".encode()), Tally(1, 0, 0, 0)
        yield Key(TABLE, 0, table), Tally(1, 0, 0, 0)


def unread(evidence: Evidence) -> dict[str, str]:
    """Tables that were not read as a whole, each with the first place that could not be read."""
    found: dict[str, str] = {}
    for key, _ in evidence.of(PLACE):
        found.setdefault(key.first.decode(), key.second.decode().split("\n", 1)[0])
    return found


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
    return Finding(rule, "violation", f"table {name}: the database cannot read it", count, None, details)
