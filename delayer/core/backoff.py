"""Pauses between attempts, and limits of repeated log lines. Pure: the caller passes time and random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

T = TypeVar("T")


def pause(attempt: int, random: float) -> float:
    """Seconds before the next attempt: 0.2 s for ``attempt`` 0, then doubling up to 15 s. ``random`` in [0, 1) varies
    the upper half of the pause, so that clients do not reconnect all at once."""
    ceiling = min(15.0, 0.2 * 2.0 ** min(attempt, 16))
    return ceiling * (0.5 + 0.5 * random)


class LogThrottle:
    """Passes the first failure, and each failure with a new reason. Passes a repeated failure after 10 s, then 20 s,
    and so on up to 5 minutes, so that a long outage does not fill the log."""

    def __init__(self) -> None:
        self._said: str | None = None
        self._ever_said: set[str] = set()
        self._interval = 10.0
        self._next = 0.0

    def should_log(self, reason: str, now: float) -> bool:
        """Whether to log this failure. ``now``: monotonic seconds."""
        if reason != self._said:
            self._said, self._interval = reason, 10.0
        elif now >= self._next:
            self._interval = min(300.0, 2 * self._interval)
        else:
            return False
        self._next = now + self._interval
        return True

    def is_new(self, reason: str) -> bool:
        """Whether this is the first call with this reason, for failures that do not end in an outage."""
        new = reason not in self._ever_said
        self._ever_said.add(reason)
        return new

    def reset(self) -> None:
        """Reset after a success, so that the next failure is logged."""
        self._said = None


LINES: Final = 10
"""The lines of one kind that are logged in one window (config/logs.py)."""


def first_of_each(messages: Iterable[T], place: Callable[[T], object]) -> Iterator[tuple[T, int]]:
    """The messages of a batch that may be logged: the first LINES of each place. The last of these has the number of
    messages left out after it. Building a line costs more than refusing a message.

    >>> [more for _, more in first_of_each(range(2 * LINES), lambda n: n < 2)]
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8]
    """
    by_place: dict[object, list[T]] = {}
    for one in messages:
        by_place.setdefault(place(one), []).append(one)
    for some in by_place.values():
        for at, one in enumerate(some[:LINES], 1):
            yield one, len(some) - LINES if at == LINES else 0


FIRST_MS: Final = 10_000
LONGEST_MS: Final = 3_600_000


def pause_ms(attempts: int, message_id: int) -> int:
    """The pause after ``attempts`` failures (at least 1): 10 s, doubling up to an hour, minus up to a fifth of that.
    The reduction depends only on the id, to spread the retries of messages that one outage held.

    >>> [pause_ms(n, 0) for n in (1, 2, 9, 10, 1000)]
    [10000, 20000, 2560000, 3600000, 3600000]
    """
    whole = min(FIRST_MS << min(attempts - 1, 16), LONGEST_MS)
    # The factor is 2^64 / golden ratio, so neighbouring ids get distant products. Only the highest 16 bits are used.
    spread = (message_id * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) >> 48
    return whole - (whole // 5 * spread >> 16)
