"""The audit's rules on rows written by hand: what each finds, and that sound rows give no finding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from delayer.audit.rules import checks
from delayer.audit.rules.checks import CLAIM_HELD, Damage
from delayer.audit.rules.model import DAY_MS, HELD, PACKED, Context, Lane, Segment
from delayer.store.admin.stats import RESTORED_MS
from delayer.store.rows.envelope import FORMAT
from tests.audit.rows import (
    DAY,
    FOUND,
    NOTHING_FOUND,
    NOW,
    fitting,
    judged,
    message,
    pointer,
    properties,
    said,
    segment,
    waiting,
)
from tests.audit.sound import CLAIMS, CONTEXT, SEGMENTS, SOUND


def test_nothing_is_found_in_a_sound_store() -> None:
    report = judged(SOUND, SEGMENTS, CLAIMS, context=CONTEXT)
    assert report.findings == ()
    assert not any(run.violations or run.warnings or run.skipped or run.unlisted for run in report.rules)
    assert (report.totals.waiting, report.totals.held, report.totals.packed) == (9, 1, 27)
    assert report.totals.waiting == report.totals.expected
    assert report.totals.keyed == 1


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"crc": 18}, checks.CHECKSUM),
        ({"format": FORMAT + 1}, checks.UNKNOWN_FORMAT),
        ({"format": 0}, checks.UNKNOWN_FORMAT),
        ({"format": FORMAT + 1, "crc": 18, "properties": b""}, checks.UNKNOWN_FORMAT),
        ({"properties": b"\x00\x80\x09id"}, checks.PROPERTIES),
        ({"properties": b"\x20\x00\x00\x00\x00\x02\x07x"}, checks.PROPERTIES),
        ({"home": f"message_{DAY}", "due_ms": (DAY + 1) * DAY_MS}, checks.PARTITION),
        ({"home": f"message_{DAY}", "due_ms": DAY * DAY_MS - 1}, checks.PARTITION),
        ({"home": "message_default", "due_ms": DAY * DAY_MS + 5, "lane": 2}, checks.PARTITION),
    ],
)
def test_what_is_wrong_with_one_message(changed: dict[str, Any], fault: str) -> None:
    wrong = message(77, **changed)
    messages = [*SOUND, wrong]
    # Later than the partition's day nothing is overdue: the context's now lies before all of it.
    context = replace(CONTEXT, now_ms=min(NOW, wrong.due_ms))
    lanes = (Lane(1, "one", True), Lane(2, "two", True))
    report = judged(messages, SEGMENTS, CLAIMS, lanes=lanes, context=context)
    assert said(report) == [("integrity", "violation", f"lane {wrong.lane}, {wrong.where}: {fault}", 1)]
    assert report.findings[0].details == {"examples": [77]}
    assert report.findings[0].first_due_ms == wrong.due_ms


@pytest.mark.parametrize(
    ("kind", "by", "expected"),
    [
        ("parked", 1, ("lane 1: waiting", 1)),
        ("parked", -1, ("lane 1: waiting", 1)),
        ("released", 2, ("lane 1: waiting", 2)),
        ("cancelled", 1, ("lane 1: waiting", 1)),
    ],
)
def test_conservation(kind: str, by: int, expected: tuple[str, int]) -> None:
    counters = fitting(SOUND, SEGMENTS)
    counters[1, kind] = counters.get((1, kind), 0) + by
    report = judged(SOUND, SEGMENTS, CLAIMS, context=CONTEXT, counters=counters)
    assert said(report) == [("conservation", "violation", *expected)]
    details = report.findings[0].details
    assert abs(details["expected"] - details["found"]) == abs(by)


def test_conservation_of_held_messages() -> None:
    counters = fitting(SOUND, SEGMENTS)
    counters[1, "held"] += 1
    counters[1, "parked"] += 1
    report = judged(SOUND, SEGMENTS, CLAIMS, context=CONTEXT, counters=counters)
    assert said(report) == [("conservation", "violation", "lane 1: held", 1)]


def test_two_lanes_that_are_off_by_one_in_opposite_ways_are_both_found() -> None:
    messages = [message(1, lane=1), message(2, lane=2)]
    counters = {(1, "parked"): 2}
    report = judged(messages, lanes=[Lane(1, "", True), Lane(2, "", True)], counters=counters)
    assert [found.subject for found in report.findings] == ["lane 1: waiting", "lane 2: waiting"]
    assert report.totals.expected == report.totals.waiting == 2


def test_of_several_lanes_all_together_tell_what_is_missing() -> None:
    messages = [message(1, lane=1), message(2, lane=2), message(3, lane=2, where=HELD)]
    counters = {(1, "parked"): 3, (2, "parked"): 2, (2, "held"): 2}
    report = judged(messages, lanes=[Lane(1, "", True), Lane(2, "", True)], counters=counters)
    assert sorted(said(report)) == [
        ("conservation", "violation", "all lanes: held", 1),
        ("conservation", "violation", "all lanes: waiting", 1),
        ("conservation", "violation", "lane 1: waiting", 2),
        ("conservation", "violation", "lane 2: held", 1),
        ("conservation", "violation", "lane 2: waiting", 1),
    ]


@pytest.mark.parametrize(
    ("wrong", "severity", "subject", "count"),
    [
        (segment(9, **NOTHING_FOUND, fault="the bytes changed"), "violation", checks.UNREADABLE, 10),
        (segment(9, **{**NOTHING_FOUND, "unpacked": 10}, fault="another digest"), "violation", checks.UNREADABLE, 10),
        (segment(9, found_first_due_ms=NOW + 8 * DAY_MS - 1), "violation", checks.DUE, 10),
        (segment(9, found_last_due_ms=NOW + 9 * DAY_MS + 1), "violation", checks.DUE, 10),
        (segment(9, found_first_id=99), "violation", checks.IDS, 10),
        (segment(9, found_last_id=998), "violation", checks.IDS, 10),
        (segment(9, found_raw_bytes=4999), "violation", checks.SIZE, 10),
        (segment(9, cancelled=2, tombstones=2, live=9), "violation", checks.FOREIGN, 8),
        (segment(9, first_due_ms=NOW + RESTORED_MS - 1), "violation", checks.LATE, 10),
        (segment(9, broken_ms=NOW), "violation", "a daemon could not restore it", 10),
        (segment(9, broken_ms=NOW, fault="x"), "violation", "does not read back", 10),
        (segment(9, broken_ms=NOW, first_due_ms=NOW), "violation", checks.MARKED, 10),
        (
            segment(9, cancelled=1),
            "violation",
            "its count of cancelled messages is not that of its tombstones",
            9,
        ),
        (
            segment(9, cancelled=10, tombstones=10),
            "warning",
            "all of its messages are cancelled, and it is still there",
            0,
        ),
    ],
)
def test_segments(wrong: Segment, severity: str, subject: str, count: int) -> None:
    report = judged(SOUND, [*SEGMENTS, wrong], CLAIMS, context=CONTEXT)
    assert said(report) == [("segments", severity, f"lane 1: {subject}", count)]
    assert report.findings[0].details == {"segments": [9]}


def test_tombstones_without_a_segment() -> None:
    said_nothing = dict.fromkeys((*FOUND, "messages", "cancelled", "packed_bytes"), 0)
    lost = segment(9, **said_nothing, **NOTHING_FOUND, lane=None, tombstones=4)
    report = judged(SOUND, [lost], CLAIMS, context=CONTEXT)
    assert said(report) == [("segments", "warning", "tombstones of a segment that is not there", 4)]
    assert report.findings[0].first_due_ms is None
    unread = judged(SOUND, [lost], CLAIMS, context=CONTEXT, damage=[Damage("segment", "page 3", "invalid page")])
    assert said(unread) == [("integrity", "violation", "table segment: the database cannot read it", 1)]


def test_a_segment_is_late_only_from_when_it_should_have_been_restored() -> None:
    assert judged(segments=[segment(1, first_due_ms=NOW + RESTORED_MS)]).findings == ()
    sooner = Context(NOW, restored_ms=1000)
    assert judged(segments=[segment(1, first_due_ms=NOW + 1000)], context=sooner).findings == ()
    assert said(judged(segments=[segment(1, first_due_ms=NOW + 999)], context=sooner)) == [
        ("segments", "violation", f"lane 1: {checks.LATE}", 10)
    ]
    nothing_left = segment(1, first_due_ms=NOW, cancelled=10, tombstones=10)
    assert said(judged(segments=[nothing_left])) == [("segments", "warning", f"lane 1: {checks.EMPTY}", 0)]


def test_the_law_of_segments() -> None:
    counters = {(1, "compacted"): 12, (2, "restored"): 3, (1, "parked"): 12}
    report = judged(segments=[segment(1)], counters=counters)
    law = [found for found in report.findings if found.rule == "segments"]
    assert [(found.subject, found.count) for found in law] == [("all segments: compacted - restored", 1)]
    assert law[0].details == {"expected": 9, "found": 10, "compacted": 12, "restored": 3}


def test_the_same_message_parked_twice() -> None:
    twin = properties(b"order-1")
    messages = [message(number, properties=twin, body_digest=b"b" * 16) for number in (5, 3, 9)]
    report = judged(messages)
    assert said(report) == [("repeats", "warning", "the same message more than once", 3)]
    assert report.findings[0].details == {"groups": 1, "surplus": 2, "examples": [[3, 5, 9]]}


@pytest.mark.parametrize(
    "other",
    [
        {"due_ms": NOW + 3_600_001},
        {"to_key": b"other"},
        {"to_exchange": b"other"},
        {"to_exchange": b"delayer.outo", "to_key": b"rders"},
        {"body_digest": b"c" * 16},
        {"properties": properties(b"order-2")},
        {"key": b"k"},
    ],
)
def test_other_messages_are_no_repeats(other: dict[str, Any]) -> None:
    first = message(1, properties=properties(b"order-1"), body_digest=b"b" * 16)
    claims = [pointer(b"k", 2), waiting(b"k", 2)] if "key" in other else []
    assert judged([first, first._replace(id=2, **other)], claims=claims).findings == ()


def test_one_id_in_two_places_is_a_violation_and_not_a_repeat_too() -> None:
    first = message(1, properties=properties(b"order-1"))
    copies = [first, first._replace(where=PACKED)]
    report = judged(copies, [segment(1, messages=1)])
    assert said(report) == [("repeats", "violation", "one id, more than one message", 2)]
    assert report.findings[0].details == {"groups": 1, "surplus": 1, "examples": [1]}


@pytest.mark.parametrize(
    ("claims", "subject", "count"),
    [
        ([pointer(b"k", 1), waiting(b"k", 1), waiting(b"k", 2)], "several waiting messages have one key", 2),
        ([waiting(b"k", 1), waiting(b"k", 2)], "several waiting messages have one key", 2),
        ([waiting(b"k", 1)], "a waiting message that its key does not stand for", 1),
        ([pointer(b"k", 2), waiting(b"k", 1)], "a waiting message that its key does not stand for", 1),
        ([pointer(b"k", 1, lane=2), waiting(b"k", 1)], "a waiting message that its key does not stand for", 1),
        ([pointer(b"k", 1, due_ms=0), waiting(b"k", 1)], "a waiting message that its key does not stand for", 1),
        ([pointer(b"k", 1), waiting(b"K", 1), pointer(b"K", 1)], "a key that stands for no message", 1),
        ([pointer(b"k", 1)], "a key that stands for no message", 1),
    ],
)
def test_keys(claims: list[Any], subject: str, count: int) -> None:
    report = judged(claims=claims)
    assert said(report) == [("keys", "violation", subject, count)]


def test_a_held_message_need_not_be_behind_its_key() -> None:
    assert judged(claims=[waiting(b"k", 1, source=CLAIM_HELD)]).findings == ()


def test_a_sample_says_nothing_about_the_whole() -> None:
    twin = properties(b"order-1")
    messages = [message(number, properties=twin, body_digest=b"b" * 16) for number in (1, 2)]
    context = Context(NOW, whole=False)
    report = judged([*messages, message(3, crc=1)], context=context, counters={(1, "parked"): 100}, sample=0.01)
    assert [found.rule for found in report.findings] == ["integrity"]
    assert {run.rule for run in report.rules if run.skipped} == {"conservation", "repeats", "keys"}
    assert report.sample == 0.01
