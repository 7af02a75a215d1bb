"""The reason of a hold as data, and the pauses before the next attempt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayer.core.backoff import FIRST_MS, LONGEST_MS, pause_ms
from delayer.core.hold import (
    FOR_A_PERSON,
    NACKED,
    Hold,
    HoldKind,
    closed_channel,
    closed_connection,
    returned,
    unanswered,
)

HOLDS = st.builds(Hold, st.sampled_from(HoldKind), st.text(max_size=5), st.booleans(), st.booleans())


@given(HOLDS, HOLDS, HOLDS)
def test_flags_of_earlier_holds_stay(first: Hold, second: Hold, third: Hold) -> None:
    last = third.after(second.after(first))
    every = (first, second, third)
    assert (last.kind, last.text) == (third.kind, third.text)
    assert last.may_be_delivered == any(one.may_be_delivered for one in every)
    assert last.isolated == any(one.isolated for one in every)


@given(HOLDS)
def test_a_first_hold_stays_unchanged(hold: Hold) -> None:
    assert hold.after(None) == hold


@given(HOLDS, st.integers(0, 10**12))
def test_late_and_unfit_messages_wait_for_an_operator(hold: Hold, again_ms: int) -> None:
    assert hold.retry_ms(again_ms) == (None if hold.kind in FOR_A_PERSON else again_ms)


@pytest.mark.words
@pytest.mark.parametrize(
    "hold, kind, may_be_delivered, isolated, says",
    [
        (returned(312, "NO_ROUTE"), HoldKind.RETURNED, False, False, "312 NO_ROUTE"),
        (NACKED, HoldKind.NACKED, False, False, "nacked"),
        (unanswered(8.0, b"out", b"k\xff\n"), HoldKind.UNANSWERED, True, False, "8 s: exchange 'out', key "),
        (closed_channel(404, "NOT_FOUND"), HoldKind.CLOSED_CHANNEL, False, False, "404 NOT_FOUND"),
        (closed_connection(541, "INTERNAL_ERROR"), HoldKind.CLOSED_CONNECTION, False, True, "541 INTERNAL_ERROR"),
    ],
)
def test_every_outcome_that_holds_a_message_has_its_kind_and_flags(
    hold: Hold, kind: HoldKind, may_be_delivered: bool, isolated: bool, says: str
) -> None:
    assert (hold.kind, hold.may_be_delivered, hold.isolated) == (kind, may_be_delivered, isolated)
    assert says in hold.text
    assert "\n" not in hold.text


ids = st.integers(0, 2**63 - 1)


@given(st.integers(1, 2**31), ids)
def test_a_pause_is_within_a_fifth_of_the_doubling(attempts: int, message_id: int) -> None:
    whole = min(FIRST_MS * 2 ** min(attempts - 1, 30), LONGEST_MS)
    assert whole * 4 // 5 <= pause_ms(attempts, message_id) <= whole


@given(st.integers(1, 20), ids)
def test_a_pause_is_never_shorter_after_more_attempts(attempts: int, message_id: int) -> None:
    assert pause_ms(attempts, message_id) <= pause_ms(attempts + 1, message_id)


def test_pauses_of_neighbouring_ids_are_spread() -> None:
    assert len({pause_ms(9, message_id) // 10_000 for message_id in range(1000)}) > 40
