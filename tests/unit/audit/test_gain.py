"""The gain and the cost of a compaction: bytes, log, and the wait from which it pays."""

from __future__ import annotations

from delayer.audit.gain import LOG_KEPT_MS, PACK_BYTES, RESTORE_BYTES, ROW_BYTES, estimated
from delayer.core.units import DAY_MS


def test_a_thousand_messages_of_half_a_kilobyte() -> None:
    found = estimated(1_000, 629_000, 87_000)
    assert (found.packed_bytes, found.saved_bytes) == (87_000, 629_000 + 1_000 * ROW_BYTES - 87_000)
    assert found.wal_pack_bytes == 629_000 + 87_000 + 1_000 * PACK_BYTES
    assert found.wal_restore_bytes == 629_000 + 87_000 + 1_000 * RESTORE_BYTES
    assert found.pays_after_ms is not None
    log = found.wal_pack_bytes + found.wal_restore_bytes
    assert abs(found.pays_after_ms * found.saved_bytes - LOG_KEPT_MS * log) < found.saved_bytes
    assert 14 * DAY_MS < found.pays_after_ms < 35 * DAY_MS, "weeks, as bench/backlog.py measures"


def test_segments_that_are_no_smaller_never_pay() -> None:
    assert estimated(10, 1_000, 1_000 + 10 * ROW_BYTES).pays_after_ms is None
    assert estimated(0, 0, 0).pays_after_ms is None
