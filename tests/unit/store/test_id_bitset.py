"""The set of messages that an action has met already."""

from __future__ import annotations

import tracemalloc

from hypothesis import strategies as st

from delayer.store.admin.actions import PART, IdBitset

IDS = st.integers(0, (1 << 63) - 1) | st.integers(0, 3 * PART)


def test_a_million_ids_take_little_memory() -> None:
    """For an action of the page, a set of integers would use about eighty megabytes in the daemon."""
    tracemalloc.start()
    try:
        seen = IdBitset()
        seen.update(range(5_000_000, 6_000_000))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert 5_999_999 in seen
    assert 6_000_000 not in seen
