"""The pauses of held messages."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from delayer.core.backoff import FIRST_MS, LONGEST_MS, pause_ms

ids = st.integers(0, 2**63 - 1)


@settings(deadline=None)
@given(st.integers(1, 2**31), ids)
def test_within_a_fifth_of_the_doubling(attempts: int, message_id: int) -> None:
    whole = min(FIRST_MS * 2 ** min(attempts - 1, 30), LONGEST_MS)
    assert whole * 4 // 5 <= pause_ms(attempts, message_id) <= whole


@settings(deadline=None)
@given(st.integers(1, 20), ids)
def test_never_shorter_for_more_attempts(attempts: int, message_id: int) -> None:
    assert pause_ms(attempts, message_id) <= pause_ms(attempts + 1, message_id)


def test_neighbours_are_spread() -> None:
    assert len({pause_ms(9, message_id) // 10_000 for message_id in range(1000)}) > 40
