"""Merging topologies: equal things once, two wishes for one name refused."""

from __future__ import annotations

import pytest

from delayer.core.topology import Binding, Exchange, Queue, Topology, arguments

ONE = Topology(
    (Exchange("in", "topic"),),
    (Queue("q", arguments({"b": 1, "a": "x"})),),
    (Binding("in", "q", "queue", "#"),),
)


def test_arguments_are_sorted_so_that_order_does_not_matter() -> None:
    assert arguments({"b": 1, "a": "x"}) == arguments({"a": "x", "b": 1}) == (("a", "x"), ("b", 1))


def test_a_topology_is_a_value() -> None:
    assert hash(ONE) == hash(Topology(ONE.exchanges, ONE.queues, ONE.bindings))
    assert ONE + ONE == ONE
    assert ONE + Topology() == ONE == Topology() + ONE


def test_merging_keeps_the_order_of_first_mention() -> None:
    other = Topology((Exchange("out", "topic"), Exchange("in", "topic")))
    assert [exchange.name for exchange in (ONE + other).exchanges] == ["in", "out"]


def test_argument_looks_one_up() -> None:
    assert ONE.queues[0].argument("a") == "x"
    assert ONE.queues[0].argument("missing") is None


@pytest.mark.parametrize(
    "other",
    [
        Topology((Exchange("in", "fanout"),)),
        Topology((Exchange("in", "topic", arguments=(("alternate-exchange", "x"),)),)),
        Topology((Exchange("in", "topic", shared=True),)),
        Topology(queues=(Queue("q"),)),
        Topology(queues=(Queue("q", ONE.queues[0].arguments, durable=False),)),
    ],
)
def test_one_name_in_two_ways_is_refused(other: Topology) -> None:
    with pytest.raises(ValueError, match="declared in two ways"):
        ONE + other


def test_a_conflict_inside_one_topology_is_refused_too() -> None:
    with pytest.raises(ValueError, match="queue 'q'"):
        Topology(queues=(Queue("q"), Queue("q", durable=False)))
