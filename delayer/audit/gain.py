"""The gain and the cost of a compaction in bytes, estimated. Pure. bench/backlog.py measures the constants."""

from __future__ import annotations

from typing import Final, NamedTuple

from delayer.core.units import DAY_MS

ROW_BYTES: Final = 250
"""Bytes of a row on disk besides its body and properties: its other columns, its header, and its index entry."""
LOG_BYTES: Final = 300
"""Bytes of log for packing a message, or for restoring it, besides its content as a row and its share of the segment.
Postgres logs each page as a whole when it changes for the first time after a checkpoint, so packing logs the rows."""
SEGMENT_SHARE: Final = 1.08
"""Bytes on disk for each byte of a segment, which Postgres keeps in pieces of 2 kB."""
KEY_BYTES: Final = 70
"""Bytes that the row of message_key grows by when its message is packed. Measured with keys of 18 bytes."""
KEY_LOG_BYTES: Final = 400
"""Bytes of log for that."""
LOG_KEPT_MS: Final = 7 * DAY_MS
"""How long an archived log is kept, for :attr:`Gain.pays_after_ms`."""


class Gain(NamedTuple):
    """``packed_bytes``: of the segments. ``saved_bytes``: on disk, and in each backup that copies files. ``log_bytes``:
    of the log (WAL) when messages are packed, and about as many when they are restored. ``pays_after_ms``: the wait
    from which a message saves more bytes times days than its log takes, which is kept for LOG_KEPT_MS; None if the
    segments are no smaller than the rows."""

    packed_bytes: int
    saved_bytes: int
    log_bytes: int
    pays_after_ms: int | None


def estimated(messages: int, stored_bytes: int, packed_bytes: int, keyed: int = 0) -> Gain:
    """The gain of packing ``messages`` whose bodies and properties take ``stored_bytes`` in their rows. ``keyed`` of
    them have a key."""
    saved = stored_bytes + messages * ROW_BYTES - round(packed_bytes * SEGMENT_SHARE) - keyed * KEY_BYTES
    log = stored_bytes + packed_bytes + messages * LOG_BYTES + keyed * KEY_LOG_BYTES
    pays = LOG_KEPT_MS * 2 * log // saved if saved > 0 else None
    return Gain(packed_bytes, saved, log, pays)
