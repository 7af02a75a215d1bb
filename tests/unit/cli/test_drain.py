"""From the store into the cascade and back: a message does not change on the way, and is not early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from delayer.amqp.properties import Properties, encode_headers, entry, int64, long_string, parsed
from delayer.amqp.values import Delivery
from delayer.broker.cascade_depths import CascadeDepths, LevelState
from delayer.cli.drain import AGAIN, LeftBehind, cascade_backlog, not_moved, row_into_cascade, store_backlog
from delayer.core.cascade import LEVELS, MAX_SECONDS, Cascade, delay_in_key
from delayer.core.hold import Hold, HoldKind
from delayer.core.importing import ImportItem
from delayer.core.marks import ID, LAST_DUE
from delayer.core.message import Due, Parcel, Target
from delayer.format.envelope import Endpoints, HoldNote, into_cascade, read_envelope
from delayer.imports.cascade import LevelReader
from delayer.store.admin.draining import DrainBacklog
from tests.support.fakes import NOW

OURS = Cascade()
DAY = 86_400_000
DUE = b"delays.due"
NAMES = Endpoints(OURS, DUE, b"", 100_000)


def into_store(met: Delivery, level: int, now_ms: int = NOW) -> Parcel:
    """The parcel that a drain into the store creates from a message in this level."""
    reader = LevelReader(OURS, level, OURS.delivery.encode(), DUE)
    return reader.item(met, parsed(met.properties), now_ms).parcel


def row(due_ms: int) -> Due:
    properties = encode_headers(entry(b"x-delay", int64(5)) + entry(b"n", long_string(b"\xff")))
    parcel = Parcel(due_ms, b"in", b"in", b"caf\xc3\xa9", Target(b"out", b"k"), properties, b"body")
    return Due(48_213, due_ms, 0, parcel, True)


@pytest.mark.parametrize("wait_ms", [1, 999, 1_000, 60_001, 40 * DAY, 3_650 * DAY])
def test_a_drained_message_comes_back_unchanged(wait_ms: int) -> None:
    due = row(NOW + wait_ms)
    sent = row_into_cascade(due, NAMES, NOW)
    seconds = delay_in_key(sent.routing_key)
    assert seconds is not None
    assert wait_ms - 1000 < seconds * 1000 <= wait_ms or seconds == MAX_SECONDS
    assert read_envelope(Properties.parse(sent.properties), b"", 100_000).rest_ms == wait_ms % 1000
    assert sent.routing_key.endswith(b".delays.due")
    token = Properties.parse(sent.properties).get(ID)
    assert token is not None
    assert token.content == b"48213", "copies keep the row's id"
    level = max(seconds.bit_length() - 1, 0)
    assert sent.exchange.decode() == OURS.level(level)
    met = Delivery(1, False, sent.exchange, sent.routing_key, sent.properties, sent.body)
    assert into_store(met, level, NOW + 5_000) == due.parcel


def test_a_message_between_two_attempts_comes_in_as_held_with_its_id_and_flags() -> None:
    hold = Hold(HoldKind.UNANSWERED, "no confirm", may_be_delivered=True)
    sent = into_cascade(row(NOW).parcel, b"id", 64, NAMES, held=HoldNote(hold, 7, NOW + 64_000))
    met = Delivery(1, False, sent.exchange, sent.routing_key, sent.properties, sent.body)
    found = LevelReader(OURS, 6, OURS.delivery.encode(), DUE).item(met, parsed(met.properties), NOW)
    assert found == ImportItem(row(NOW).parcel._replace(token=b"id"), hold)


def test_foreign_messages_go_to_the_end_of_the_cascade() -> None:
    key = b"0." * (LEVELS - 6) + b"1.0.0.0.0.0.inbox"
    properties = encode_headers(entry(LAST_DUE, int64(NOW + 30_000)) + entry(ID, long_string(b"id")))
    met = Delivery(1, False, OURS.level(5).encode(), key, properties, b"body")
    parcel = into_store(met, 5)
    assert parcel.target == Target(OURS.delivery.encode(), b"inbox")
    assert (parcel.due_ms, parcel.properties, parcel.body) == (NOW + 30_000, properties, b"body")


def test_a_publishers_envelope_is_not_opened() -> None:
    """Only a message to the due queue is an envelope; headers of other messages are ignored."""
    forged = row_into_cascade(row(NOW + 60_000), replace(NAMES, due_queue=b"inbox"), NOW)
    met = Delivery(1, False, forged.exchange, forged.routing_key, forged.properties, forged.body)
    parcel = into_store(met, 5)
    assert parcel.target == Target(OURS.delivery.encode(), b"inbox")
    assert parcel.properties == forged.properties


def test_unreadable_messages_wait_the_longest_time() -> None:
    met = Delivery(1, False, b"x", b"0." * LEVELS + b"inbox", b"\xff\xff\xff", b"body")
    assert into_store(met, 6).due_ms == NOW + 64_000


NOTHING = DrainBacklog(0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("now", "keys_too", "moves", "left"),
    [
        (NOTHING, False, 0, []),
        (NOTHING._replace(rows=7, keyed=7), False, 0, [(7, "store", "a key", "none: the daemon releases")]),
        (NOTHING._replace(rows=7), True, 7, []),
        (NOTHING._replace(rows=7, keyed=2), True, 5, [(2, "store", "schedules", "pause or remove")]),
        (
            NOTHING._replace(rows=9, keyed=2, soon=5), False, 2,
            [(2, "store", "a key", "none"), (5, "store", "minute", "none")],
        ),
        (NOTHING._replace(rows=1, soon=2), False, 0, [(2, "store", "minute", "none")]),
        (
            NOTHING._replace(packed=9, broken=1), False, 0,
            [(9, "segments", "compacted", "restore"), (1, "segments", "", "docs")],
        ),
        (NOTHING._replace(inbox=4), False, 0, [(4, "SQL inbox", "meanwhile", "none: the daemon moves")]),
        (NOTHING._replace(inbox=None), False, 0, [(None, "SQL inbox", "cannot be counted", "docs/operations.md")]),
        (NOTHING._replace(held=3), False, 0, [(3, "held", "did not take", "held list")]),
    ],
)  # fmt: skip
def test_the_backlog_of_the_store(
    now: DrainBacklog, keys_too: bool, moves: int, left: list[tuple[int, str, str, str]]
) -> None:
    count, found = store_backlog(now, keys_too=keys_too)
    assert count == moves
    check_left(found, left)


@pytest.mark.parametrize(
    ("levels", "due", "strays", "moves", "left"),
    [
        ({27: 0, 5: 0, 4: 0}, 0, 0, 0, []),
        ({27: 2, 5: 1, 4: 3, 0: 4}, 0, 0, 3, [(7, "cascade", "minute", "none")]),
        ({}, 5, 6, 0, [(5, "due queue", "", "none"), (6, "strays", "did not take", "strays list")]),
    ],
)
def test_the_backlog_of_the_cascade(
    levels: dict[int, int], due: int, strays: int, moves: int, left: list[tuple[int, str, str, str]]
) -> None:
    count, found = cascade_backlog(depths(levels, due, strays), "due", {})
    assert count == moves
    check_left(found, left)


@pytest.mark.parametrize(
    ("target", "more", "unsound", "left"),
    [
        ("native", 0, 0, []),
        ("native", 4, 3, [(3, "store", "checksum", "audit"), (1, "store", "meanwhile", AGAIN)]),
        ("native", 0, 1, [(1, "store", "checksum", "audit")]),  # one that became due since
        ("store", 3, 0, [(3, "cascade", "meanwhile", AGAIN)]),
    ],
)
def test_messages_that_a_drain_did_not_move(
    target: str, more: int, unsound: int, left: list[tuple[int, str, str, str]]
) -> None:
    check_left(not_moved(target, more, unsound), left)


def depths(levels: dict[int, int], due: int = 0, strays: int = 0) -> CascadeDepths:
    states = tuple(LevelState(level, f"level {level}", 1000 << level, depth) for level, depth in levels.items())
    return CascadeDepths("delayer", "delivery", states, {"due": due, "strays": strays})


@pytest.mark.parametrize(
    ("delayed", "left"),
    [
        ({"level": 0, "due": 0}, []),
        ({"level": 0, "due": 7}, [(7, "queue due", "itself delays", "none")]),
        ({"level": None, "due": None}, [(None, "cascade", "is not set, or gives no count", "none: they come out")]),
    ],
)
def test_messages_that_the_broker_delays_are_left_too(
    delayed: dict[str, int | None], left: list[tuple[int | None, str, str, str]]
) -> None:
    check_left(cascade_backlog(depths({}), "due", delayed)[1], left)


def check_left(found: Sequence[LeftBehind], expected: Sequence[tuple[int | None, str, str, str]]) -> None:
    assert len(found) == len(expected), found
    for one, (messages, where, why, next_step) in zip(found, expected, strict=True):
        assert (one.messages, one.where) == (messages, where)
        assert why in one.why
        assert next_step in one.next_step
        assert one.by_itself == one.next_step.startswith("none"), "a part without a next step says so"
