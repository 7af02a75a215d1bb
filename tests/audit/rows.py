"""Rows for the rules: sound ones, to be changed where a test wants something wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from random import Random
from typing import Any

from delayer.amqp.properties import encode_headers
from delayer.audit.findings import Finding, Report
from delayer.audit.rules import judge
from delayer.audit.rules.checks import CLAIM_WAITING, POINTER, Claim, Damage
from delayer.audit.rules.model import DAY_MS, HELD, PACKED, Context, Lane, Message, Segment
from delayer.audit.rules.model import WAITING as ROW
from delayer.store.admin.stats import KINDS

NOW = 1_795_000_000_000
DAY = NOW // DAY_MS
PLAIN = encode_headers()


def properties(message_id: bytes) -> bytes:
    """Nothing but a message id."""
    return b"\x00\x80" + bytes((len(message_id),)) + message_id


def message(number: int = 1, **other: Any) -> Message:
    """A sound message, due in an hour."""
    sound = Message(
        where=ROW,
        home=None,
        id=number,
        lane=1,
        due_ms=NOW + 3_600_000,
        parked_ms=NOW - 1000,
        checksum=17,
        format=1,
        route=b"delayer.in",
        to_exchange=b"delayer.out",
        to_key=b"orders",
        properties=PLAIN,
        key=None,
        retry_ms=None,
        body_bytes=100,
        crc=17,
        body_digest=blake2b(b"%d" % number, digest_size=16).digest(),
    )
    return sound._replace(**other)


def segment(number: int = 1, **other: Any) -> Segment:
    """A sound segment of ten messages; what came out of it is what it says, unless it is told otherwise."""
    said: dict[str, Any] = {
        "first_due_ms": NOW + 8 * DAY_MS,
        "last_due_ms": NOW + 9 * DAY_MS,
        "first_id": 100,
        "last_id": 999,
        "messages": 10,
        "cancelled": 0,
        "raw_bytes": 5000,
    }
    said |= {name: value for name, value in other.items() if name in said}
    found = {f"found_{name}": said[name] for name in FOUND}
    sound = Segment(
        id=number,
        lane=1,
        **said,
        packed_bytes=1000,
        unpacked=said["messages"],
        live=said["messages"] - said["cancelled"],
        **found,
        fault=None,
        broken_ms=None,
        broken=None,
        tombstones=0,
    )
    return sound._replace(**other)


FOUND = ("first_due_ms", "last_due_ms", "first_id", "last_id", "raw_bytes")
NOTHING_FOUND = {"unpacked": None, "live": None, **{f"found_{name}": None for name in FOUND}}
"""Of a segment that was not read, or did not read back."""


def pointer(key: bytes, number: int, **other: Any) -> Claim:
    return Claim(key, POINTER, number, 1, NOW + 3_600_000)._replace(**other)


def waiting(key: bytes, number: int, **other: Any) -> Claim:
    return Claim(key, CLAIM_WAITING, number, 1, NOW + 3_600_000)._replace(**other)


def fitting(messages: Iterable[Message], segments: Iterable[Segment] = ()) -> dict[tuple[int, str], int]:
    """Counters that say exactly what is there."""
    found: dict[tuple[int, str], int] = {}

    def add(lane: int | None, kind: str, n: int = 1) -> None:
        if lane is not None:
            found[lane, kind] = found.get((lane, kind), 0) + n

    for each in messages:
        if each.where != PACKED:
            add(each.lane, "parked")
        if each.where == HELD:
            add(each.lane, "held")
    for some in segments:
        live = some.messages - some.cancelled
        add(some.lane, "parked", live)
        add(some.lane, "compacted", live)
    return found


_CONTEXT = Context(NOW)


def judged(
    messages: Iterable[Message] = (),
    segments: Iterable[Segment] = (),
    claims: Iterable[Claim] = (),
    *,
    lanes: Iterable[Lane] = (Lane(1, "one", True),),
    counters: Mapping[tuple[int, str], int] | None = None,
    context: Context = _CONTEXT,
    damage: Iterable[Damage] = (),
    **more: Any,
) -> Report:
    """The report on these rows; counters that fit them unless others are given."""
    messages, segments = list(messages), list(segments)
    evidence = judge.evidence_of(messages, segments, claims, context, damage)
    counters = fitting(messages, segments) if counters is None else counters
    return judge.report(evidence, lanes, counters, context, **more)


def said(report: Report) -> list[tuple[str, str, str, int]]:
    """What a report found, without the details."""
    return [brief(found) for found in report.findings]


def brief(found: Finding) -> tuple[str, str, str, int]:
    return found.rule, found.severity, found.subject, found.count


def damaged(random: Random) -> list[Damage]:
    """Places of tables that no rule sums up: damage to a table that one does would keep that rule from being asked."""
    return [
        random.choice(
            (
                Damage("elsewhere", f"pages {n} to 9", "invalid page"),
                Damage("somewhere", f"page {n}", random.choice("ab")),
                Damage("nowhere", f"page {n}", "missing chunk"),
            )
        )
        for n in range(random.randrange(130))
    ]


def drawn(random: Random, count: int) -> tuple[list[Message], list[Segment], list[Claim], dict[tuple[int, str], int]]:
    """A store at random, with something of everything wrong in it: few times, keys and names, so that they meet."""
    messages = [_drawn_message(random) for _ in range(count)]
    segments = [
        segment(
            number,
            lane=random.choice((1, 2, 3, None)),
            messages=random.randrange(1, 4),
            cancelled=random.randrange(3),
            tombstones=random.randrange(3),
            unpacked=random.choice((None, 1, 2)),
            live=random.choice((None, 1, 2)),
            first_due_ms=NOW + random.choice((0, 8)) * DAY_MS,
            found_first_id=random.choice((100, 101)),
            found_raw_bytes=random.choice((5000, 5001)),
            fault=random.choice((None, None, "expected the digest 00, found 01")),
            broken_ms=random.choice((None, NOW)),
        )
        for number in range(random.randrange(6))
    ]
    claims = [
        Claim(
            bytes((97 + random.randrange(8),)), random.randrange(3), random.randrange(8), 1, NOW + random.randrange(2)
        )
        for _ in range(random.randrange(20))
    ]
    counters = {(lane, kind): random.randrange(9) for lane in range(1, 4) for kind in KINDS if random.random() < 0.9}
    return messages, segments, claims, counters


def _drawn_message(random: Random) -> Message:
    where = random.choice((ROW, ROW, ROW, HELD, PACKED))
    day = random.choice((DAY - 1, DAY, DAY, DAY + 1, DAY + 2, DAY + 40, DAY + 4100))
    due_ms = day * DAY_MS + random.choice((0, 999, 1000, 59_999, 60_000, 7_200_000, random.randrange(DAY_MS)))
    return message(
        random.randrange(1, 3000),
        where=where,
        home=random.choice((f"message_{day}", "message_default", "message_1")) if where == ROW else None,
        lane=random.randrange(1, 5),
        due_ms=due_ms,
        parked_ms=NOW - random.randrange(100),
        retry_ms=NOW - random.randrange(2) * 600_000 if where == HELD else None,
        crc=random.choice((17, 17, 17, 18)),
        format=random.choice((1, 1, 1, 1, 0, 2)),
        route=random.choice((b"", b"in", b"\xff")),
        to_exchange=random.choice((b"", b"out")),
        to_key=b"%d" % random.randrange(300),
        properties=random.choice((PLAIN, b"", b"\x00\x80\x09id", properties(b"a"), properties(b"b"), properties(b""))),
        body_bytes=random.randrange(50),
        body_digest=bytes((random.randrange(3),)) * 16,
    )
