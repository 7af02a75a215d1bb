"""When a held message is tried again. Pure."""

from __future__ import annotations

FIRST_MS = 10_000
LONGEST_MS = 3_600_000


def pause_ms(attempts: int, message_id: int) -> int:
    """The pause after ``attempts`` failed attempts (at least 1): 10 s, doubling up to an hour, less up to a fifth.

    The fifth depends on the id only, so that a thousand messages held by one outage do not come back in one instant.

    >>> [pause_ms(n, 0) for n in (1, 2, 9, 10, 1000)]
    [10000, 20000, 2560000, 3600000, 3600000]
    """
    whole = min(FIRST_MS << min(attempts - 1, 16), LONGEST_MS)
    # Times 2^64 / golden ratio, so that neighbouring ids land far apart; of that the highest 16 bits.
    spread = (message_id * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) >> 48
    return whole - (whole // 5 * spread >> 16)
