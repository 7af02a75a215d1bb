"""What must hold of the rules whatever the rows: order and grouping do not matter, and nothing grows with the store."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delayer.audit.rules import checks, judge
from delayer.audit.rules.checks import counted_damage
from delayer.audit.rules.checks import judged_claims as judged_keys
from delayer.audit.rules.counting import counted, counted_segments, merged, spread, summarized
from delayer.audit.rules.model import DAY_MS, EXAMPLES, Context, Evidence, Key, Lane, Partial, Tally, combined
from tests.audit.rows import DAY, NOW, damaged, drawn, judged, message, properties

PARTITIONS = {f"message_{day}": (day * DAY_MS, (day + 1) * DAY_MS) for day in range(DAY - 1, DAY + 3)}
CONTEXT = Context(NOW, PARTITIONS)
LANES = [Lane(1, "one", True), Lane(2, "two", False), Lane(3, "three", None)]

tallies = st.builds(
    Tally,
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(-3, 3),
    st.integers(-3, 3),
    st.sets(st.integers(0, 9), max_size=EXAMPLES).map(lambda ids: tuple(sorted(ids))),
)


@given(tallies, tallies, tallies)
def test_tallies_combine_in_any_order_and_grouping(one: Tally, other: Tally, third: Tally) -> None:
    assert combined(one, other) == combined(other, one)
    assert combined(combined(one, other), third) == combined(one, combined(other, third))


@settings(deadline=None, max_examples=60)
@given(st.randoms(use_true_random=False), st.integers(0, 300), st.integers(1, 6), st.integers(1, 40), st.booleans())
def test_it_does_not_matter_where_and_in_how_many_portions_rows_are_counted(
    random: Random, count: int, portions: int, bound: int, whole: bool
) -> None:
    """As on a cluster: rows anywhere, every portion counted for itself, tallies that belong together in one place."""
    messages, segments, claims, counters = drawn(random, count)
    damage = damaged(random)
    context = Context(NOW, PARTITIONS, whole)
    here = judge.report(judge.evidence_of(messages, segments, claims, context, damage), LANES, counters, context)

    random.shuffle(messages)
    parts = [messages[start::portions] for start in range(portions)]
    partials = [*chain.from_iterable(counted(part, context, bound) for part in parts)]
    random.shuffle(partials)
    places: dict[int, list[Partial]] = {place: [] for place in range(portions)}
    for key, tally in partials:
        together = key.kind, spread(key), key.first, key.second
        places[hash(together) % portions].append((key, tally))
    summary = [partial for place in places.values() for partial in summarized(sorted(place), NOW)]
    summary += counted_segments(reversed(segments), context)
    by_key = sorted(claims)
    summary += [
        partial
        for number in range(portions)
        for partial in judged_keys(claim for claim in by_key if claim.key[0] % portions == number)
    ]
    random.shuffle(damage)
    for start in range(portions):
        summary += summarized(sorted(counted_damage(damage[start::portions])), NOW)
    random.shuffle(summary)
    there = judge.report(Evidence(merged(summary)), LANES, counters, context)
    assert there == here


@settings(deadline=None, max_examples=30)
@given(st.randoms(use_true_random=False), st.integers(0, 200))
def test_every_message_is_in_every_total(random: Random, count: int) -> None:
    messages, segments, claims, counters = drawn(random, count)
    report = judge.report(judge.evidence_of(messages, segments, claims, CONTEXT), LANES, counters, CONTEXT)
    coming = [each for each in messages if each.where != "held"]
    assert sum(bar.messages for bar in report.calendar.days) == len(coming)
    assert sum(share.messages for share in report.calendar.routes) == len(coming)
    assert report.totals.held == len(messages) - len(coming)
    assert report.totals.size == sum(each.body_bytes + len(each.properties) for each in messages)
    assert report.totals.first_due_ms == min((each.due_ms for each in coming), default=None)
    assert report.totals.last_due_ms == max((each.due_ms for each in coming), default=None)
    overdue = sum(found.count for found in report.findings if found.rule == "overdue")
    late = (each.due_ms if each.retry_ms is None else each.retry_ms for each in messages)
    assert overdue == sum(expected_ms <= NOW - 60_000 for expected_ms in late)


def test_what_is_handed_on_does_not_grow_with_the_store() -> None:
    """Every second, destination, route, id and repeat another one."""
    twins = properties(b"twin")
    messages = [
        message(
            number,
            due_ms=NOW + (number // 2) * 1000 * 60,
            to_key=b"%d" % number,
            route=b"%d" % number,
            properties=twins,
            body_digest=b"%16d" % (number // 2),
        )
        for number in range(20_000)
    ]
    partials = sorted(counted(messages, CONTEXT))
    assert len(partials) > 60_000
    summary = list(summarized(partials, NOW))
    assert len(summary) < 3000
    assert judged(messages).calendar.destinations_more == 19_800


def test_a_portion_holds_a_bounded_number_of_keys() -> None:
    """The tallies are handed on as soon as there are as many as told, long before the rows are at their end."""
    taken = 0

    def endless() -> object:
        nonlocal taken
        while True:
            taken += 1
            yield message(taken, due_ms=NOW + taken * 1000, to_key=b"%d" % taken)

    sample = replace(CONTEXT, whole=False)
    first = next(iter(counted(endless(), sample, bound=100)))  # type: ignore[arg-type]
    assert first[0].kind == "lane"
    assert taken < 100


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        (Key("second", 86_400), Key("second", 86_401), True),
        (Key("second", 86_399), Key("second", 86_400), False),
        (Key(checks.ID, 1), Key(checks.ID, 2), False),
        (Key("lane", 1), Key("lane", 2), True),
    ],
)
def test_what_must_be_summarized_together(one: Key, other: Key, together: bool) -> None:
    assert (spread(one) == spread(other)) is together
