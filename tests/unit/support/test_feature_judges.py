"""How the harnesses of tests/faults/features judge, on accounts that are made up: each rule, broken and kept."""

from __future__ import annotations

import pytest

from tests.faults.features import cancels, keys, overdue, retries
from tests.faults.features.cancels import Told
from tests.faults.features.keys import KEYS
from tests.support.account import Account, Arrival, Window
from tests.support.letters import NUMBER, Form
from tests.support.readings import Readings

SENT_MS = 1_000_000.0


def account(count: int, *came: int, window: Window | None = None) -> Account:
    """So many messages, each due a second after it was sent; those came a second later."""
    one = Account()
    one.windows = [window] if window else []
    for number in range(count):
        one.owe(Form.INT32, int(SENT_MS) + 1_000, 1_000)
        if number in came:
            one.take(number, Arrival(SENT_MS + 2_000, b"%d" % (number + 1), int(SENT_MS) + 1_000, False))
    return one


FAULT = Window(SENT_MS + 500, SENT_MS + 1_500)
BEFORE = Window(SENT_MS - 900, SENT_MS - 100)


def test_the_last_of_every_key_comes_and_no_other() -> None:
    sent, last = range(3 * KEYS), set(range(2 * KEYS, 3 * KEYS))
    keys.judged_waiting(sent, last).assert_kept()
    with pytest.raises(AssertionError, match="1 keys without"):
        keys.judged_waiting(sent, last - {2 * KEYS}).assert_kept()
    with pytest.raises(AssertionError, match="1 came though they were replaced"):
        keys.judged_waiting(sent, last | {KEYS}).assert_kept()


def test_a_refused_replacement_leaves_the_earlier_message() -> None:
    sent, refused = range(2 * KEYS), {KEYS}
    last = set(range(KEYS + 1, 2 * KEYS))
    keys.judged_waiting(sent, last | {0}, refused).assert_kept()
    keys.judged_waiting(sent, last | {KEYS}, refused).assert_kept()
    assert keys.judged_waiting(sent, last, refused).lost == [0]


@pytest.mark.parametrize(
    ("window", "overtaken", "again"), [(None, [0], []), (BEFORE, [0], []), (FAULT, [], [0])], ids=str
)
def test_behind_its_replacement_by_a_fault_only(window: Window | None, overtaken: list[int], again: list[int]) -> None:
    both = account(2 * KEYS, window=window)
    order = [(number, SENT_MS + 2_000) for number in [*range(KEYS), *range(KEYS, 2 * KEYS), 0]]
    found = keys.judged_live(both, 0, order)
    assert (found.lost, found.overtaken, found.again) == ([], overtaken, again)
    assert keys.judged_live(both, 0, order[:-2]).lost == [2 * KEYS - 1]


CANCELLED, GONE, UNKNOWN = (Told(what, SENT_MS + 1_800) for what in ("cancelled", "gone", "unknown"))


@pytest.mark.parametrize(
    ("came", "told", "window", "broken"),
    [
        (True, [], None, ""),
        (False, [], None, "lost"),
        (False, [CANCELLED], None, ""),
        (False, [GONE, CANCELLED], None, ""),
        (True, [CANCELLED], None, "delivered"),
        (True, [CANCELLED], BEFORE, "delivered"),
        (True, [CANCELLED], FAULT, "out"),
        (True, [GONE], None, ""),
        (False, [GONE], FAULT, "denied"),
        (False, [UNKNOWN], None, ""),
    ],
)
def test_reports_of_cancels_are_true(came: bool, told: list[Told], window: Window | None, broken: str) -> None:
    found = cancels.judged(account(1, *([0] if came else []), window=window), set(), {0: told})
    named = ("lost", "denied", "delivered", "silent", "out", "read")
    assert [name for name in named if getattr(found, name)] == ([broken] if broken else [])
    if broken in named[:4]:
        with pytest.raises(AssertionError):
            found.assert_kept()
    else:
        found.assert_kept()


def test_a_cancel_is_answered_but_for_a_fault() -> None:
    assert cancels.judged(account(1), {0}, {}).silent == [0]
    assert not cancels.judged(account(1, window=FAULT), {0}, {}).silent
    assert cancels.judged(account(1, window=BEFORE), {0}, {}).silent == [0]


FAILED = {(number, n): [SENT_MS + 2_000 * n] for number in range(6) for n in range(retries.tries(number) + 1)}
PARKED = {number: retries.ATTEMPTS + 1 for number in range(6) if retries.fails(number) > retries.ATTEMPTS}


@pytest.mark.parametrize(
    ("changed", "parked", "broken"),
    [
        ({}, {}, ""),
        ({(3, 2): None}, {}, "missing"),
        ({(1, 2): [SENT_MS + 9_000]}, {}, "beyond"),
        ({(2, 1): [SENT_MS + 299]}, {}, "early"),
        ({(2, 1): [SENT_MS + 300]}, {}, ""),
        ({(0, 0): [SENT_MS, SENT_MS + 10]}, {}, "twice"),
        ({}, {4: None}, "astray"),
        ({}, {4: retries.ATTEMPTS}, "astray"),
        ({}, {0: 1}, "astray"),
    ],
)
def test_failed_messages_come_as_often_as_configured(
    changed: dict[tuple[int, int], list[float] | None], parked: dict[int, int | None], broken: str
) -> None:
    came = {one: at_ms for one, at_ms in (FAILED | changed).items() if at_ms is not None}
    ended = {one: count for one, count in (PARKED | parked).items() if count is not None}
    found = retries.judged(account(6), came, ended)
    named = ("missing", "beyond", "early", "twice", "astray")
    assert [name for name in named if getattr(found, name)] == ([broken] if broken else [])
    if broken:
        with pytest.raises(AssertionError):
            found.assert_kept()
    else:
        found.assert_kept()


LONG_AFTER_MS = SENT_MS + 1_000 + overdue.LIMIT_MS + 60_000


@pytest.mark.parametrize(
    ("came_ms", "held", "window", "broken"),
    [
        (SENT_MS + 2_000, set(), None, ""),
        (None, {0}, None, ""),
        (None, set(), FAULT, "neither came nor are held"),
        (LONG_AFTER_MS, set(), None, "came after the limit"),
        (LONG_AFTER_MS, set(), FAULT, ""),
        (SENT_MS + 2_000, {0}, BEFORE, "came and are held"),
        (SENT_MS + 2_000, {0}, FAULT, ""),
    ],
    ids=["in time", "held", "lost", "untold", "late by a fault", "both", "both by a fault"],
)
def test_late_messages_are_held(came_ms: float | None, held: set[int], window: Window | None, broken: str) -> None:
    one = account(1, window=window)
    if came_ms is not None:
        one.take(0, Arrival(came_ms, b"1", int(SENT_MS) + 1_000, False))
    judgement = overdue.judged(one, held)
    if not broken:
        return judgement.assert_kept()
    with pytest.raises(AssertionError, match=broken):
        judgement.assert_kept()


def test_under_as_many_ids_as_it_was_read_at_intake() -> None:
    one = account(1, window=FAULT)
    one.readings = Readings(b"delayer.in")
    for exchange in (b"delayer.in", b"delayer.delay-delivery"):
        one.readings._handed(False, exchange, b"ledger.0", NUMBER.pack(0))
    for id in (b"a" * 32, b"a" * 32):
        one.take(0, Arrival(SENT_MS + 2_000, id, int(SENT_MS) + 1_000, False))
    assert not overdue.unmarked(one)
    one.take(0, Arrival(SENT_MS + 3_000, b"b" * 32, int(SENT_MS) + 1_000, False))
    assert overdue.unmarked(one) == [0]
