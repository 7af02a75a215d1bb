"""Estimates what a compaction saves and costs, in bytes. Pure. bench/backlog.py measures the constants."""

from __future__ import annotations

from typing import Final, NamedTuple

from delayer.core.units import DAY_MS

ROW_BYTES: Final = 250
"""Bytes of a row on disk, not counting its body and properties: other columns, row header and index entry."""
LOG_BYTES: Final = 300
"""WAL bytes for packing or restoring a message, not counting its content as a row and its share of the segment.
Postgres logs each page in full when it first changes after a checkpoint, so packing logs the rows."""
SEGMENT_SHARE: Final = 1.08
"""Bytes on disk per byte of a segment, which Postgres stores in pieces of 2 kB."""
KEY_BYTES: Final = 70
"""Bytes that a row of message_key grows by when its message is packed, measured with 18-byte keys."""
KEY_LOG_BYTES: Final = 400
"""WAL bytes for that."""
LOG_KEPT_MS: Final = 7 * DAY_MS
"""How long archived WAL is kept, for :attr:`Gain.pays_after_ms`."""


class Gain(NamedTuple):
    """``packed_bytes``: of the segments. ``saved_bytes``: on disk, and in each backup that copies files. ``log_bytes``:
    WAL for packing, and about as much again for restoring. ``pays_after_ms``: the delay from which a message saves more
    bytes times days than its WAL costs, which is kept for LOG_KEPT_MS; None if segments are no smaller than rows."""

    packed_bytes: int
    saved_bytes: int
    log_bytes: int
    pays_after_ms: int | None


def estimated(messages: int, stored_bytes: int, packed_bytes: int, keyed: int = 0) -> Gain:
    """Estimate packing ``messages`` (``keyed`` with a key) whose bodies and properties take ``stored_bytes``."""
    saved = stored_bytes + messages * ROW_BYTES - round(packed_bytes * SEGMENT_SHARE) - keyed * KEY_BYTES
    log = stored_bytes + packed_bytes + messages * LOG_BYTES + keyed * KEY_LOG_BYTES
    pays = LOG_KEPT_MS * 2 * log // saved if saved > 0 else None
    return Gain(packed_bytes, saved, log, pays)
