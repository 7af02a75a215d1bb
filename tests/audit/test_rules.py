"""The audit's rules on rows written by hand: each finds its defects, and sound rows give no finding.

Spark queries are slow, so one store has all defects of a kind, each in its own lane or key.
"""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from delayer.audit import faults, results, rules
from delayer.audit.errors import JobMisused
from delayer.audit.extract import show_empty
from delayer.audit.findings import PACKED, LaneFigures
from delayer.config.model import AuditRuleTable
from delayer.core.units import DAY_MS
from delayer.store.admin.stats import LANE_KINDS, RESTORED_MS
from tests.audit.rows import NOW, Row, held, judged, key, message, packed, said, segment, store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

NOBODY: dict[str, str] = {}


def figures(number: int, waiting: int, held: int = 0, /, **counters: int) -> LaneFigures:
    return LaneFigures(number, "", True, dict.fromkeys(LANE_KINDS, 0) | counters, waiting, held)


def test_conservation() -> None:
    whole = figures(1, 3, 1, parked=9, restored=2, released=4, cancelled=1, compacted=2, held=1)
    assert rules.conservation([whole]) == []
    for kind, by in (("parked", 1), ("parked", -1), ("released", 2), ("cancelled", 1), ("restored", 1)):
        counters = {**whole.counters, kind: whole.counters[kind] + by}
        (found,) = rules.conservation([LaneFigures(1, "", True, counters, 3, 1)])
        assert (found.severity, found.subject, found.count) == ("violation", "lane 1: waiting", abs(by))
        assert abs(found.details["expected"] - found.details["found"]) == abs(by)
    assert said(rules.conservation([figures(1, 0, 0, parked=1, held=1)])) == [
        ("conservation", "violation", "lane 1: held", 1)
    ]


def test_two_lanes_that_are_off_by_one_in_opposite_ways_are_both_found() -> None:
    found = rules.conservation([figures(1, 1, parked=2), figures(2, 1)])
    assert [one.subject for one in found] == ["lane 1: waiting", "lane 2: waiting"]


def test_the_sum_of_all_lanes_shows_missing_messages() -> None:
    found = rules.conservation([figures(1, 1, parked=3), figures(2, 1, 1, parked=2, held=2)])
    assert sorted(said(found)) == [
        ("conservation", "violation", "all lanes: held", 1),
        ("conservation", "violation", "all lanes: waiting", 1),
        ("conservation", "violation", "lane 1: waiting", 2),
        ("conservation", "violation", "lane 2: held", 1),
        ("conservation", "violation", "lane 2: waiting", 1),
    ]


def test_integrity_names_the_lowest_ids(spark: SparkSession) -> None:
    wrong = [
        message(number, faults=[faults.CHECKSUM, faults.PROPERTIES], due_ms=NOW + number)
        for number in range(20, 10, -1)
    ]
    found = rules.integrity(store(spark, [*wrong, message(1), held(2, lane=2, faults=[faults.CHECKSUM])]))
    assert said(found) == [
        ("integrity", "violation", f"lane 1, waiting: {faults.CHECKSUM}", 10),
        ("integrity", "violation", f"lane 1, waiting: {faults.PROPERTIES}", 10),
        ("integrity", "violation", f"lane 2, held: {faults.CHECKSUM}", 1),
    ]
    assert found[0].details == {"examples": [11, 12, 13, 14, 15]}
    assert found[0].first_due_ms == NOW + 11
    assert [one.next for one in found] == [
        faults.NEXT[of] for of in (faults.CHECKSUM, faults.PROPERTIES, faults.CHECKSUM)
    ]


def wrong_segments() -> Iterator[tuple[Row, list[Row], tuple[str, str, int]]]:
    """Segments of ten messages, each in its own lane: the segment's row, its contents, and the expected finding."""
    numbers = count(1)

    def one(
        fault: str, *, broken: bool = False, due_ms: int = NOW + 8 * DAY_MS, **says: Any
    ) -> tuple[Row, list[Row], tuple[str, str, int]]:
        number = next(numbers)
        first = 1000 * number
        inside = [packed(first + n, number, lane=number, due_ms=due_ms + n) for n in range(10)]
        said = segment(number, inside, lane=number, **says)
        if broken:
            inside = [{"segment": number, "lane": number, "kind": PACKED, "faults": [fault]}]
        return said, inside, ("violation", f"lane {number}: {fault}", 10)

    yield one(faults.CHANGED, broken=True)
    yield one(faults.NEWER, broken=True, broken_ms=NOW)
    yield one(faults.DUE, first_due_ms=NOW + 8 * DAY_MS - 1)
    yield one(faults.DUE, last_due_ms=NOW + 9 * DAY_MS)
    yield one(faults.IDS, ids=[])
    yield one(faults.IDS, ids=[8])
    yield one(faults.SIZE, raw_bytes=999)
    yield one(faults.LATE, due_ms=NOW + RESTORED_MS - 1)
    yield one(faults.MARKED, broken_ms=NOW)
    yield one(faults.MARKED, broken_ms=NOW, due_ms=NOW)


def test_segments(spark: SparkSession) -> None:
    cases = list(wrong_segments())
    messages = [one for _, inside, _ in cases for one in inside]
    sound = [packed(1, 900, lane=1, due_ms=NOW + RESTORED_MS)]
    extract = store(spark, [*messages, *sound], [segment(900, sound), *(says for says, *_ in cases)])
    found = rules.segments(extract, RESTORED_MS)
    assert sorted(said(found)) == sorted(("segments", *told) for *_, told in cases)
    by_subject = {one.subject: one for one in found}
    assert by_subject[f"lane 1: {faults.CHANGED}"].details == {"segments": [1]}
    assert all(one.next == faults.NEXT[subject.partition(": ")[2]] for subject, one in by_subject.items())
    sooner = rules.segments(extract, 1000)
    assert [one.subject for one in sooner if faults.LATE in one.subject] == []


def test_repeats(spark: SparkSession) -> None:
    twins = [message(number, fingerprint=b"b" * 16) for number in (5, 3, 9)]
    # One id in two places is no repeat of itself.
    copies = [message(20, fingerprint=b"c" * 16), packed(20, fingerprint=b"c" * 16)]
    id_, same = rules.repeats(store(spark, [*twins, *copies, message(1), message(2)]))
    assert said([id_]) == [("repeats", "violation", "one id, more than one message", 2)]
    assert id_.details == {"groups": 1, "surplus": 1, "examples": [20]}
    assert said([same]) == [("repeats", "warning", "the same message more than once", 3)]
    assert same.details == {"groups": 1, "surplus": 2, "examples": [[3, 9]]}


def test_keys(spark: SparkSession) -> None:
    messages = [
        message(1, key=b"two"), message(2, key=b"two"),
        message(3, key=b"two of none"), message(4, key=b"two of none"),
        message(10, key=b"unknown"),
        message(11, key=b"of another"),
        message(12, key=b"of another lane"),
        message(13, key=b"of another time"),
        message(14, key=b"sound"),
        held(15, key=b"held", lane=7),
        held(16, key=b"held and not behind its key"),
        held(17, key=b"of a held one"),
        message(18, key=b"of a held one"),
        packed(21, key=b"packed"),
        packed(22, key=b"of another segment"),
        packed(23, key=b"of a row"),
        {"kind": PACKED, "segment": 9, "lane": 1, "faults": [faults.CHANGED]},
    ]  # fmt: skip
    of_segment = {"due_ms": NOW + 8 * DAY_MS, "segment": 1}
    keys = [
        key(b"two", 1),
        key(b"of another", 99),
        key(b"of another lane", 12, lane=2),
        key(b"of another time", 13, due_ms=0),
        key(b"sound", 14),
        key(b"held", 15),
        key(b"of a held one", 17),
        key(b"SOUND", 14),
        key(b"nobody", 20),
        key(b"packed", 21, **of_segment),
        key(b"of another segment", 22, **of_segment | {"segment": 2}),
        key(b"of a row", 23, **of_segment | {"segment": None}),
        key(b"in a segment that does not read back", 24, **of_segment | {"segment": 9}),
        key(b"nobody in a segment", 25, **of_segment),
    ]
    found = {one.subject: one for one in rules.keys(store(spark, messages, keys=keys))}
    assert {subject: (one.count, one.details["examples"]) for subject, one in found.items()} == {
        faults.COLLIDES: (4, [1, 2, 3, 4]),
        faults.UNREACHABLE: (7, [10, 11, 12, 13, 18]),
        faults.DANGLES: (3, [14, 20, 25]),
    }
    assert {(one.rule, one.severity) for one in found.values()} == {("keys", "violation")}


def test_a_sample_says_nothing_about_the_whole(spark: SparkSession) -> None:
    twins = [message(number, fingerprint=b"b" * 16) for number in (1, 2)]
    inside = [packed(number) for number in (10, 11)]
    unread_segment = segment(2, [packed(number, 2) for number in range(20, 30)])
    more = {"counters": {(1, "parked"): 100, (1, "compacted"): 9}, "sample": 0.01}
    report = judged(
        spark,
        [*twins, message(3, faults=[faults.CHECKSUM]), *inside],
        [segment(1, inside), unread_segment],
        [(7, 1)],
        **more,
    )
    assert [found.rule for found in report.findings] == ["integrity"]
    assert {run.rule for run in report.rules if run.skipped} == {"conservation", "repeats", "keys"}
    assert report.sample == 0.01
    assert (report.totals.waiting, report.totals.packed, report.totals.segments) == (3, 2, 2), "the unpacked messages"


def test_rules_of_messages_report_unreadable_segments(spark: SparkSession) -> None:
    lost = segment(2, [packed(number, 2) for number in range(20, 29)])
    unread = {"segment": 2, "lane": 1, "kind": PACKED, "faults": [faults.CHANGED]}
    report = judged(spark, [message(1), unread], [lost], own_rules=[FAR])
    skipped = {run.rule: run.skipped for run in report.rules if run.skipped}
    told = "9 messages in unreadable segments"
    assert skipped.pop("peaks").startswith("within unreadable segments")
    assert skipped == dict.fromkeys(("integrity", "overdue", "repeats", "keys", "far"), told)
    assert {row["rows_read"] for row in results.rows(report, "run", "store")} == {1}


FAR = AuditRuleTable(
    name="far",
    sql="SELECT concat('to ', string(to_key)) AS subject, id, due_ms FROM messages WHERE due_ms > 4102444800000",
    severity="violation",
    next="ask the shop",
)


def test_a_rule_of_the_users(spark: SparkSession) -> None:
    far = [message(number, due_ms=4_102_444_800_000 + number) for number in (7, 5)]
    report = judged(spark, [message(1), *far], own_rules=[FAR])
    assert said(report) == [("far", "violation", "to orders", 2)]
    assert report.findings[0].details == {"examples": [5, 7]}
    assert report.findings[0].next == "ask the shop"
    assert [run.violations for run in report.rules if run.rule == "far"] == [1]


def test_documented_rules_are_rules_of_a_user(spark: SparkSession) -> None:
    """As a user would copy them from docs/backlog.md."""
    text = (Path(__file__).parents[2] / "docs" / "backlog.md").read_text(encoding="utf-8")
    queries = dict(re.findall(r"^-- (\w+)\n(.*?);$", text, re.DOTALL | re.MULTILINE))
    limit = str(NOW + RESTORED_MS)
    copied = [
        AuditRuleTable(
            name=f"my-{name}", sql=queries[name].replace("now_ms + restored_ms", limit), severity="violation"
        )
        for name in ("segments", "integrity", "keys")
    ]
    inside = [packed(number, 1) for number in range(10, 12)]
    rows = [message(1, faults=[faults.CHECKSUM]), message(2, key=b"a"), message(3, key=b"a"), *inside]
    report = judged(spark, rows, [segment(1, inside, raw_bytes=1)], [key(b"a", 2), key(b"b", 9)], own_rules=copied)
    found = [(one.rule, one.subject) for one in report.findings]
    ours = [(rule, subject) for rule, subject in found if not rule.startswith("my-")]
    assert {rule for rule, _ in ours} == {"segments", "integrity", "keys"}
    assert sorted((rule, subject) for rule, subject in found if rule.startswith("my-")) == sorted(
        (f"my-{rule}", subject) for rule, subject in ours
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"sql": "SELECT id FROM messages"}, "subject"),
        ({"sql": "SELECT FROM WHERE"}, "Spark says"),
        ({"sql": "DROP VIEW messages"}, "Spark says"),
        ({"name": "keys"}, "a name that no other rule has"),
    ],
    ids=["columns", "syntax", "no query", "name"],
)
def test_a_mistake_in_a_rule_of_the_configuration_is_reported_before_the_audit(
    spark: SparkSession, change: dict[str, str], told: str
) -> None:
    show_empty(spark)
    rules.check_own(spark, [FAR])
    with pytest.raises(JobMisused, match=told):
        rules.check_own(spark, [FAR.model_copy(update=change)])
