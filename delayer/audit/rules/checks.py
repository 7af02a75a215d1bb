"""The rules: what can be wrong with one message or segment, and the findings that the merged tallies give. Pure.

integrity     a row's bytes, format and partition
overdue       messages past their due instant; lanes without an owner
repeats       one message, or one id, more than once
keys          each key stands for one waiting message
segments      each reads back and holds what it says
conservation  everything that came in is out or still here
damage        pages that Postgres cannot read
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from itertools import groupby
from operator import attrgetter
from struct import Struct
from typing import Any, Final, NamedTuple

from delayer.amqp.properties import MalformedProperties, MalformedTable, Properties
from delayer.audit.findings import Finding, LaneFigures, Severity, shown
from delayer.audit.rules.model import (
    EXAMPLES,
    GRACE_MS,
    HELD,
    PACED,
    PACKED,
    STUCK_MS,
    WAITING,
    Context,
    Evidence,
    Key,
    Message,
    Partial,
    Segment,
    Tally,
    combined,
)
from delayer.store.admin.stats import KINDS, waiting
from delayer.store.rows.envelope import FORMAT

CHECKSUM = "the checksum does not fit its bytes"
UNKNOWN_FORMAT = "the format is not known"
PROPERTIES = "the properties cannot be decoded"
PARTITION = "it is due outside its partition"


def parsed(message: Message) -> Properties | None:
    """Its properties, the table of headers looked through; None if they cannot be decoded, or were never meant to be:
    what a row of an unknown format means is not known either."""
    if not known_format(message):
        return None
    try:
        properties = Properties.parse(message.properties)
        properties.entries()
    except (MalformedProperties, MalformedTable):
        return None
    return properties


def known_format(message: Message) -> bool:
    return 1 <= message.format <= FORMAT


def message_faults(message: Message, properties: Properties | None, context: Context) -> tuple[str, ...]:
    """What is wrong with the message; ``properties`` is what :func:`parsed` made of it. Nearly always empty."""
    found: tuple[str, ...] = ()
    if not known_format(message):
        found = (UNKNOWN_FORMAT,)
    else:
        if message.crc != message.checksum:
            found = (CHECKSUM,)
        if properties is None:
            found = (*found, PROPERTIES)
    if misplaced(message, context):
        found = (*found, PARTITION)
    return found


def misplaced(message: Message, context: Context) -> bool:
    """Is it due at a time that its partition does not have? Claims look for it by that."""
    if message.where != WAITING or not message.home:
        return False
    interval = context.partitions.get(message.home)
    if interval is not None:
        return not interval[0] <= message.due_ms < interval[1]
    # The default partition: it has every time that no other has.
    return context.has_partition(message.due_ms)


OVERDUE, LANES = "overdue", "lanes"
_AGES: Final = (
    (7 * 86_400_000, "7 d"),
    (86_400_000, "1 d"),
    (STUCK_MS, "1 h"),
    (600_000, "10 min"),
    (GRACE_MS, "1 min"),
)
ADOPTED_MS: Final = 60_000
"""Daemons take a lane without an owner within 10 s."""
STUCK: Final = frozenset(name for age, name in _AGES if age >= STUCK_MS)
_SUBJECTS: Final = {
    WAITING: "lane {}",
    PACKED: "segments of lane {}",
    PACED: "lane {}: of routes with max_rate",
    HELD: "lane {}: held, and not tried again in time",
}


def age(due_ms: int, now_ms: int) -> str | None:
    """For how long at least it is overdue; None if it is not worth a word."""
    late = now_ms - due_ms
    if late < GRACE_MS:
        return None
    return next(name for least, name in _AGES if late >= least)


def overdue_findings(evidence: Evidence, lanes: list[LaneFigures], paced: Mapping[bytes, int]) -> list[Finding]:
    """Overdue messages: of a lane without an owner nobody will release them. Those with an owner may be on their way:
    a violation only from STUCK_MS on. Segments are restored by any daemon, so one owner anywhere will do for them."""
    alive: dict[int, bool | None] = {lane.number: lane.alive for lane in lanes}
    anybody = any(alive.values()) or (None if None in alive.values() else False)
    found = []
    for (number, where), ages in sorted(_by_lane(evidence).items()):
        owned = anybody if where == PACKED else alive.get(number, False)
        total = _all_ages(ages)
        stuck = owned is False or (where != PACED and any(name in STUCK for name in ages))
        details = {"ages": {name: ages[name].messages for _, name in _AGES if name in ages}, "owned": owned}
        if where in (WAITING, PACED):
            routes = evidence.overdue_routes(number, where)[:5]
            details["routes"] = {shown(name): count for name, count in routes}
        if where == PACED:
            rates = {name: paced[name] for name, _ in routes if name in paced}
            details["max_rate"] = {shown(name): rate for name, rate in rates.items()}
        subject = _SUBJECTS[where].format(number)
        severity: Severity = "violation" if stuck else "warning"
        found.append(Finding(OVERDUE, severity, subject, total.messages, total.first_due_ms, details))
    return found


def lane_findings(evidence: Evidence, lanes: list[LaneFigures], known: frozenset[int], now_ms: int) -> list[Finding]:
    """Lanes that need an owner and have none: daemons take them in time, if there are any. Without one, later
    messages may well wait. A lane without a row in the table of lanes is never taken."""
    found = []
    for lane in lanes:
        first = evidence.first_due(lane.number)
        if lane.number not in known:
            if count := lane.waiting + lane.held:
                subject = f"lane {lane.number}: not in the table of lanes"
                found.append(Finding(LANES, "violation", subject, count, first))
        elif lane.alive is False and first is not None and first <= now_ms + ADOPTED_MS:
            details = {"last_owner": lane.owner}
            subject = f"lane {lane.number}: no owner, and messages are due"
            found.append(Finding(LANES, "warning", subject, lane.waiting, first, details))
    return found


def _by_lane(evidence: Evidence) -> dict[tuple[int, str], dict[str, Tally]]:
    found: dict[tuple[int, str], dict[str, Tally]] = {}
    for key, tally in evidence.of("overdue"):
        found.setdefault((key.number, key.first.decode()), {})[key.second.decode()] = tally
    return found


def _all_ages(ages: dict[str, Tally]) -> Tally:
    first, *rest = ages.values()
    for tally in rest:
        first = combined(first, tally)
    return first


REPEATS = "repeats"
REPEAT, ID = "repeat", "id"
"""Kinds of keys. ``first`` of a repeat is its fingerprint, ``number`` of the other the id."""

_FINGERPRINT = Struct(">qIII")


def fingerprint(message: Message, properties: Properties | None) -> bytes | None:
    """16 bytes that two messages share if they are the same one; None if that cannot be said. A message with a key is
    not asked: there the key says what is the same."""
    if properties is None or message.key is not None:
        return None
    message_id = properties.message_id
    if not message_id:
        return None
    exchange, routing_key = message.to_exchange, message.to_key
    head = _FINGERPRINT.pack(message.due_ms, len(message_id), len(exchange), len(routing_key))
    return blake2b(head + message_id + exchange + routing_key + message.body_digest, digest_size=16).digest()


def repeated(key: Key, tally: Tally) -> bool:
    """Are these, counted under one key, more than one message? One id that stands twice is no repeat of itself."""
    if key.kind == ID:
        return tally.messages > 1
    return tally.messages > 1 and len(tally.examples) > 1


def repeat_findings(evidence: Evidence) -> list[Finding]:
    found = []
    kinds: tuple[tuple[str, Severity, str], ...] = (
        (ID, "violation", "one id, more than one message"),
        (REPEAT, "warning", "the same message more than once"),
    )
    for kind, severity, subject in kinds:
        total = evidence.total(kind)
        if total is None:
            continue
        groups = evidence.of(kind)
        details = {
            "groups": total.size,
            "surplus": total.messages - total.size,
            "examples": [list(tally.examples) if kind == REPEAT else key.number for key, tally in groups],
        }
        found.append(Finding(REPEATS, severity, subject, total.messages, total.first_due_ms, details))
    return found


KEYS: Final = "keys"
KEY_FAULT: Final = "key fault"
COLLIDES = "several waiting messages have one key"
UNREACHABLE = "a waiting message that its key does not stand for"
DANGLES = "a key that stands for no message"

POINTER, CLAIM_HELD, CLAIM_WAITING = 0, 1, 2


class Claim(NamedTuple):
    """``source`` is POINTER (a row of message_key, which says where its message is), HELD or WAITING. Sorted by these
    three, a key's pointer comes first, and of two messages always the same one."""

    key: bytes
    source: int
    id: int
    lane: int
    due_ms: int


def judged_claims(claims: Iterable[Claim]) -> Iterator[Partial]:
    """The faults of keys. ``claims`` must be sorted; one key's are looked at one by one and never held together."""
    found: dict[Key, Tally] = {}
    for _, group in groupby(claims, attrgetter("key")):
        for fault, tally in _key_faults(group):
            key = Key(KEY_FAULT, 0, fault.encode())
            found[key] = combined(found[key], tally) if key in found else tally
    yield from found.items()


def _key_faults(claims: Iterable[Claim]) -> Iterator[tuple[str, Tally]]:
    pointer: Claim | None = None
    met = False
    waiting: Tally | None = None
    for claim in claims:
        if claim.source == POINTER:
            pointer = claim
            continue
        if pointer is not None:
            met = met or _meets(pointer, claim)
        if claim.source == CLAIM_WAITING:
            waiting = _with(waiting, claim)
    if waiting is not None and waiting.messages > 1:
        yield COLLIDES, waiting
    elif waiting is not None and not met:
        yield UNREACHABLE, waiting
    elif pointer is not None and not met:
        yield DANGLES, _with(None, pointer)


def _meets(pointer: Claim, message: Claim) -> bool:
    """Would a cancel by the key find this message? A held one is looked for by its id alone."""
    return pointer.id == message.id and (message.source == CLAIM_HELD or pointer[3:] == message[3:])


def _with(tally: Tally | None, claim: Claim) -> Tally:
    if tally is None:
        return Tally(1, 0, claim.due_ms, claim.due_ms, (claim.id,))
    examples = tally.examples if len(tally.examples) == EXAMPLES else (*tally.examples, claim.id)
    return Tally(
        tally.messages + 1, 0, min(tally.first_due_ms, claim.due_ms), max(tally.last_due_ms, claim.due_ms), examples
    )


def key_findings(evidence: Evidence) -> list[Finding]:
    return [
        Finding(
            KEYS,
            "violation",
            key.first.decode(),
            tally.messages,
            tally.first_due_ms,
            {"examples": list(tally.examples)},
        )
        for key, tally in evidence.of(KEY_FAULT)
    ]


SEGMENTS = "segments"
UNREADABLE = "does not read back"
DUE = "its first and last due time are not those of its messages"
IDS = "its first and last id are not those of its messages: a cancel would miss them"
SIZE = "its messages have another size than it says"
LATE = "it was not restored in time"
MARKED = "a daemon could not restore it"
CANCELLED = "its count of cancelled messages is not that of its tombstones"
EMPTY = "all of its messages are cancelled, and it is still there"
FOREIGN = "it counts messages as cancelled that are not in it: it cannot be restored"
ORPHANED = "tombstones of a segment that is not there"

_SEVERITY: dict[str, Severity] = {EMPTY: "warning", ORPHANED: "warning"}


def segment_faults(segment: Segment, context: Context) -> tuple[str, ...]:
    """What is wrong with one segment. One that does not read back is not asked what came out of it."""
    if segment.lane is None:
        return (ORPHANED,) if context.whole else ()
    live = segment.messages - segment.cancelled
    found = []
    if segment.fault is not None:
        found.append(UNREADABLE)
    elif segment.broken_ms is not None:
        found.append(MARKED)
    elif live > 0 and segment.first_due_ms < context.now_ms + context.restored_ms:
        found.append(LATE)
    found += _of_cancelled(segment, live)
    if segment.fault is None and segment.unpacked is not None:
        found += [fault for fault, said, came_out in _told(segment) if said != came_out]
    return tuple(found)


def _of_cancelled(segment: Segment, live: int) -> list[str]:
    if segment.cancelled != segment.tombstones:
        return [CANCELLED]
    if segment.live is not None and segment.live != live:
        return [FOREIGN]
    return [EMPTY] if live <= 0 else []


def _told(segment: Segment) -> tuple[tuple[str, object, object], ...]:
    """What it says of its messages, and what they are."""
    return (
        (
            DUE,
            (segment.first_due_ms, segment.last_due_ms),
            (segment.found_first_due_ms, segment.found_last_due_ms),
        ),
        (IDS, (segment.first_id, segment.last_id), (segment.found_first_id, segment.found_last_id)),
        (SIZE, segment.raw_bytes, segment.found_raw_bytes),
    )


def segment_findings(evidence: Evidence) -> list[Finding]:
    """The segments' own faults, but for those that damage to one of the two tables would explain."""
    found = []
    unread = unread_tables(evidence)
    for key, tally in evidence.of("segment fault"):
        fault = key.first.decode()
        if (fault == ORPHANED and "segment" in unread) or (fault == CANCELLED and "segment_cancelled" in unread):
            continue
        where, first = (f"lane {key.number}: ", tally.first_due_ms) if key.number >= 0 else ("", None)
        details = {"segments": list(tally.examples)}
        severity = _SEVERITY.get(fault, "violation")
        found.append(Finding(SEGMENTS, severity, where + fault, tally.messages, first, details))
    return found


def segment_law(packed: int, compacted: int, restored: int) -> list[Finding]:
    """``packed``: live messages in all segments; the others are the sums of the counters."""
    expected = compacted - restored
    if packed == expected:
        return []
    details = {"expected": expected, "found": packed, "compacted": compacted, "restored": restored}
    return [Finding(SEGMENTS, "violation", "all segments: compacted - restored", abs(packed - expected), None, details)]


CONSERVATION = "conservation"


def conservation_findings(lanes: list[LaneFigures]) -> list[Finding]:
    """parked + restored = released + cancelled + compacted + held + waiting, for each lane: held and waiting are
    counted row by row and compared with what the counters say. If it holds for each, it holds for all; if not, all of
    them together say whether messages are missing, or only in another lane than the counters have them in."""
    found: list[Finding] = []
    for lane in lanes:
        found += _off(f"lane {lane.number}", lane.waiting, lane.held, lane.counters)
    if found and len(lanes) > 1:
        counters = {kind: sum(lane.counters[kind] for lane in lanes) for kind in KINDS}
        found += _off("all lanes", sum(lane.waiting for lane in lanes), sum(lane.held for lane in lanes), counters)
    return found


def _off(where: str, waits: int, held: int, counters: Mapping[str, int]) -> Iterator[Finding]:
    for what, expected, rows in (("waiting", waiting(counters), waits), ("held", counters["held"], held)):
        if rows != expected:
            details = {"expected": expected, "found": rows, "counters": dict(counters)}
            yield Finding(CONSERVATION, "violation", f"{where}: {what}", abs(rows - expected), None, details)


DAMAGED_PLACE, DAMAGED_TABLE = "damage", "damaged"
"""Kinds of keys. ``first`` is the table; ``second`` of a place what it is and the reason, with a line between them."""
_PLACES, _REASONS = 20, 3


class Damage(NamedTuple):
    """``place``: a range of pages, whose rows were not read from there on; ``reason``: the database's own words."""

    relation: str
    place: str
    reason: str


def counted_damage(places: Iterable[Damage]) -> Iterator[Partial]:
    """The tallies of damage; a place that two readers of a table met is one place."""
    for one in dict.fromkeys(places):
        table = one.relation.encode()
        yield Key(DAMAGED_PLACE, 0, table, f"{one.place}\n{one.reason}".encode()), Tally(1, 0, 0, 0)
        yield Key(DAMAGED_TABLE, 0, table), Tally(1, 0, 0, 0)


def unread_tables(evidence: Evidence) -> dict[str, str]:
    """Tables that were not read as a whole, each with the first place that could not be read."""
    found: dict[str, str] = {}
    for key, _ in evidence.of(DAMAGED_PLACE):
        found.setdefault(key.first.decode(), key.second.decode().split("\n", 1)[0])
    return found


def damage_findings(rule: str, evidence: Evidence, context: Context) -> list[Finding]:
    """One for each table."""
    return [
        _damage_finding(rule, key.first, tally.messages, evidence, context) for key, tally in evidence.of(DAMAGED_TABLE)
    ]


def _damage_finding(rule: str, table: bytes, count: int, evidence: Evidence, context: Context) -> Finding:
    told = [key.second.decode().split("\n", 1) for key, _ in evidence.of(DAMAGED_PLACE) if key.first == table]
    details: dict[str, Any] = {"places": [place for place, _ in told[:_PLACES]]}
    details["reasons"] = list(dict.fromkeys(reason for _, reason in told))[:_REASONS]
    name = table.decode()
    if name in context.partitions:
        details["due_from_ms"], details["due_before_ms"] = context.partitions[name]
    return Finding(rule, "violation", f"table {name}: the database cannot read it", count, None, details)
