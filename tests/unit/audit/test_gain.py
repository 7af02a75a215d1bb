"""The gain and the cost of a compaction: bytes, log, and the wait from which it pays."""

from __future__ import annotations

from delayer.audit.compact import LOG_KEPT_MS, ROW_BYTES, estimated
from delayer.core.units import DAY_MS


def test_the_measured_store() -> None:
    """bench/backlog.py with 265,652 of 300,000 messages: 1,023 bytes of log each to pack, and 1,015 to restore."""
    messages = 265_652
    found = estimated(messages, 167_414_958, 23_614_764)
    assert 1_000 < found.log_bytes / messages < 1_040
    assert 770 < found.saved_bytes / messages < 800
    assert found.pays_after_ms is not None
    assert abs(found.pays_after_ms * found.saved_bytes - LOG_KEPT_MS * 2 * found.log_bytes) < found.saved_bytes
    assert 17 * DAY_MS < found.pays_after_ms < 19 * DAY_MS


def test_messages_with_keys_save_less() -> None:
    """Measured with 100,000 messages: 67 bytes more in each row of message_key, and 1,310 bytes of log each to pack."""
    found = estimated(100_000, 58_100_000, 4_100_000, 100_000)
    assert 1_260 < found.log_bytes / 100_000 < 1_360
    without = estimated(100_000, 58_100_000, 4_100_000)
    assert 60 < (without.saved_bytes - found.saved_bytes) / 100_000 < 75
    assert (found.pays_after_ms or 0) > (without.pays_after_ms or 0)


def test_segments_that_are_no_smaller_never_pay() -> None:
    assert estimated(10, 1_000, 1_000 + 10 * ROW_BYTES).pays_after_ms is None
    assert estimated(0, 0, 0).pays_after_ms is None
