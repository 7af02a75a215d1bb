"""Routing keys, names and arguments as tables, and the merging of topologies."""

from __future__ import annotations

import re

import pytest

from delayer.core.cascade import (
    CASCADE_KINDS,
    LEVELS,
    MAX_SECONDS,
    Cascade,
    bindable,
    delay_in_key,
    due_topology,
    intake_topology,
    routing_key,
    strip_prefix,
)
from delayer.core.topology import Binding, Exchange, Queue, Topology, arguments

NONE = "0." * LEVELS


@pytest.mark.parametrize(
    ("seconds", "low_bits", "level"),
    [
        (0, "0.", 0), (1, "1.", 0), (5, "1.0.1.", 2), (600, "1.0.0.1.0.1.1.0.0.0.", 9),
        (1 << 27, "1." + "0." * 27, 27), ((1 << 27) - 1, "1." * 27, 26), (MAX_SECONDS, "1." * 28, 27),
    ],
)  # fmt: skip
def test_routing_keys_and_their_entry_level(seconds: int, low_bits: str, level: int) -> None:
    key = routing_key(seconds, b"a.b")
    assert key == (NONE[len(low_bits) :] + low_bits + "a.b").encode()
    assert delay_in_key(key) == seconds
    assert Cascade().entry(seconds) == f"delayer.delay-level-{level:02d}"


@pytest.mark.parametrize("seconds", [-1, MAX_SECONDS + 1, 1 << 40])
def test_a_delay_out_of_range_is_refused(seconds: int) -> None:
    with pytest.raises(ValueError, match="0 to 268435455 seconds"):
        routing_key(seconds, b"a")
    with pytest.raises(ValueError, match="0 to 268435455 seconds"):
        Cascade().entry(seconds)


@pytest.mark.parametrize("letter", ["x", "é", "😀"])
def test_an_address_of_199_bytes_fits(letter: str) -> None:
    size = len(letter.encode())
    fits = letter.encode() * (199 // size)
    key = routing_key(1, fits)
    assert len(key) <= 255
    assert strip_prefix(key) == fits
    with pytest.raises(ValueError, match="at most 199 bytes, found 200"):
        routing_key(1, letter.encode() * (200 // size))
    assert not bindable(letter.encode() * (200 // size))


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (b"", b""),
        (b"plain.key", b"plain.key"),
        (b"0." * 28 + b"a.b", b"a.b"),
        (b"0." * 27 + b"a", b"0." * 27 + b"a"),
        (b"0." * 27 + b"0", b"0." * 27 + b"0"),  # the last digit's dot is missing
        (b"0." * 27 + b"2.a", b"0." * 27 + b"2.a"),
        (b"x." + b"0." * 28 + b"a", b"x." + b"0." * 28 + b"a"),
        (b"0." * 28 + b"1." * 28 + b"a", b"1." * 28 + b"a"),  # the second is the publisher's own
        (b"0." * 28 + b"\xff\n", b"\xff\n"),
    ],
)
def test_one_leading_prefix_is_stripped(key: bytes, expected: bytes) -> None:
    assert strip_prefix(key) == expected
    assert (delay_in_key(key) is None) == (key == expected)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (b"sales.orders", True),
        (b"", True),
        ("öl".encode(), True),
        (b"a*.#b", True),  # a part of a word is no wildcard
        (b"**", True),
        (b"*", False),
        (b"#", False),
        (b"a.*.b", False),
        (b"\xff", False),  # not UTF-8
        (b"sales\norders", False),
        (b"sales\r", False),
    ],
)
def test_bindable(address: bytes, expected: bool) -> None:
    assert bindable(address) is expected


NAMES = [
    ("delayer", "delayer.delay-level-07", "delayer.delay-level-00", "delayer.delay-delivery", "delayer.delay-strays"),
    ("nservicebus-v2", "nsb.v2.delay-level-07", "nsb.v2.delay-level-00", "nsb.v2.delay-delivery", ""),
    ("nservicebus-v1", "nsb.delay-level-07", "nsb.delay-level-00", "nsb.delay-delivery", ""),
    ("celery", "celery_delayed_7", "celery_delayed_0", "celery_delayed_delivery", ""),
]


@pytest.mark.parametrize(("kind", "seven", "zero", "delivery", "strays"), NAMES)
def test_names(kind: str, seven: str, zero: str, delivery: str, strays: str) -> None:
    cascade = Cascade(kind)  # type: ignore[arg-type]
    assert (cascade.level(7), cascade.level(0), cascade.delivery, cascade.strays) == (seven, zero, delivery, strays)
    assert cascade.shared is (kind != "delayer")


def test_the_prefix_of_kombu() -> None:
    delayed = pytest.importorskip("kombu.transport.native_delayed_delivery")
    cascade = Cascade("celery", owner="shop")
    assert [cascade.level(level) for level in range(LEVELS)] == [delayed.level_name(n, "shop") for n in range(LEVELS)]
    assert cascade.delivery == delayed._celery_delayed_delivery_exchange("shop")
    for kind in CASCADE_KINDS:
        if kind != "celery":
            with pytest.raises(ValueError, match="names of its own"):
                Cascade(kind, owner="shop")


QUORUM = {"x-queue-type": "quorum", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}


@pytest.mark.parametrize(
    ("kind", "rest"),
    [("delayer", QUORUM), ("nservicebus-v2", QUORUM), ("nservicebus-v1", {"x-queue-mode": "lazy"}), ("celery", QUORUM)],
)
def test_every_levels_queue_has_exactly_its_owners_arguments(kind: str, rest: dict[str, str]) -> None:
    cascade = Cascade(kind)  # type: ignore[arg-type]
    queues = {queue.name: queue for queue in cascade.topology().queues}
    for level in range(LEVELS):
        following = cascade.level(level - 1) if level else cascade.delivery
        expected = rest | {"x-message-ttl": 2**level * 1000, "x-dead-letter-exchange": following}
        assert dict(queues[cascade.level(level)].arguments) == expected
        assert queues[cascade.level(level)].shared is cascade.shared


def test_only_our_own_delivery_exchange_has_an_alternate() -> None:
    for kind in CASCADE_KINDS:
        exchanges = {exchange.name: exchange for exchange in Cascade(kind).topology().exchanges}
        with_arguments = {name: dict(ex.arguments) for name, ex in exchanges.items() if ex.arguments}
        if kind == "delayer":
            assert with_arguments == {"delayer.delay-delivery": {"alternate-exchange": "delayer.delay-strays"}}
            assert exchanges["delayer.delay-strays"].type == "fanout"
        else:
            assert with_arguments == {}


@pytest.mark.parametrize(
    ("level", "to_queue", "onward"),
    [(27, "1.#", "0.#"), (26, "*.1.#", "*.0.#"), (0, "*." * 27 + "1.#", "*." * 27 + "0.#")],
)
def test_bindings(level: int, to_queue: str, onward: str) -> None:
    cascade = Cascade()
    name = cascade.level(level)
    following = cascade.level(level - 1) if level else cascade.delivery
    assert {b for b in cascade.topology().bindings if b.source == name} == {
        Binding(name, name, "queue", to_queue),
        Binding(name, following, "exchange", onward),
    }


@pytest.mark.parametrize(
    ("kind", "prefix", "message"),
    [
        ("rabbit", "x.", "expected one of delayer, nservicebus-v2"),
        ("delayer", "amq.", "keeps for itself"),
        ("delayer", "x" * 120, "at most 127 bytes"),
        ("delayer", "é.", "letters, digits"),
    ],
)
def test_an_invalid_cascade_is_refused(kind: str, prefix: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Cascade(kind, prefix)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [-1, 28])
def test_a_level_out_of_range_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match="0 to 27"):
        Cascade().level(number)


def test_intake() -> None:
    topology = intake_topology("delays", "delays.refused", ["delayer.in", ""])
    queues = {queue.name: dict(queue.arguments) for queue in topology.queues}
    own = QUORUM | {"x-delivery-limit": 1_000_000, "x-dead-letter-exchange": "delays.refused"}
    assert queues["delays"] == own | {"x-single-active-consumer": True}
    assert queues["delays.refused"] == {"x-queue-type": "quorum", "x-delivery-limit": (1 << 53) - 1}
    assert set(topology.exchanges) == {Exchange("delays.refused", "fanout"), Exchange("delayer.in", "topic")}
    assert set(topology.bindings) == {
        Binding("delays.refused", "delays.refused", "queue", ""),
        Binding("delayer.in", "delays", "queue", "#"),
    }


def test_a_classic_intake_queue_has_no_arguments_of_a_quorum_queue() -> None:
    (queue, _) = intake_topology("delays", "delays.refused", classic=True).queues
    own = {"x-queue-type": "classic", "x-dead-letter-exchange": "delays.refused"}
    assert dict(queue.arguments) == own | {"x-single-active-consumer": True}


@pytest.mark.parametrize("classic", [True, False])
def test_a_shared_intake_queue_has_any_number_of_active_consumers(classic: bool) -> None:
    (one, _), (shared, _) = (intake_topology(classic=classic, shared=shared).queues for shared in (False, True))
    assert dict(one.arguments) == dict(shared.arguments) | {"x-single-active-consumer": True}


def test_due() -> None:
    cascade = Cascade("nservicebus-v2")
    topology = due_topology(cascade, "delays.due", "delays.refused")
    queues = {queue.name: dict(queue.arguments) for queue in topology.queues}
    assert queues["delays.due"] == QUORUM | {"x-delivery-limit": 1_000_000, "x-dead-letter-exchange": "delays.refused"}
    assert Binding("nsb.v2.delay-delivery", "delays.due", "queue", "*." * 28 + "delays.due") in topology.bindings
    assert not any(queue.shared for queue in topology.queues)


# Merging: equal parts appear once, and two declarations of one name are refused.

ONE = Topology(
    (Exchange("in", "topic"),), (Queue("q", arguments({"b": 1, "a": "x"})),), (Binding("in", "q", "queue", "#"),)
)


@pytest.mark.parametrize(
    "other",
    [
        Topology((Exchange("in", "fanout"),)),
        Topology((Exchange("in", "topic", arguments=(("alternate-exchange", "x"),)),)),
        Topology((Exchange("in", "topic", shared=True),)),
        Topology(queues=(Queue("q"),)),
        Topology(queues=(Queue("q", ONE.queues[0].arguments, shared=True),)),
    ],
)
def test_two_declarations_of_one_name_are_refused(other: Topology) -> None:
    with pytest.raises(ValueError, match="declared in two ways"):
        ONE + other


def test_a_conflict_inside_one_topology_is_refused_too() -> None:
    with pytest.raises(ValueError, match="queue 'q'"):
        Topology(queues=(Queue("q"), Queue("q", shared=True)))
