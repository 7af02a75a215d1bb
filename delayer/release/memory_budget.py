"""The bytes that the releases of a process have in hand, shared by its lanes: however many it has, memory does not
grow with them, and what a claim takes is here before the store takes it back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

ALL: Final = 32 << 20
"""Two full portions: what a daemon has in hand that owns two lanes, as by default."""
LEAST: Final = 256 << 10
"""What everybody gets at once though there is nothing left: nobody waits here, so nobody waits for another's broker."""
UNHURRIED: Final = 2.0
"""Seconds that the rows of a claim may be on their way. To the server the release is idle meanwhile, and it ends those
that are for four (store/postgres.py)."""
SLOWEST: Final = 64 << 10
"""Bytes that a claim may take over any line: below this it is not the bytes that are slow."""


class Share:
    """Some bytes of a :class:`Room`, for as long as its ``with`` lasts."""

    def __init__(self, room: Room, size: int) -> None:
        self._room = room
        self.size = size

    def keep(self, size: int) -> None:
        """So many are needed; the others are free again."""
        self._room.left += self.size - size
        self.size = size


class Room:
    """Counts bytes. A claim takes one message at least, however large: so more may be in hand by one for each lane."""

    def __init__(self, size: int = ALL) -> None:
        self.left = size
        self._in_time = size

    def took(self, size: int, seconds: float, *, failed: bool = False) -> None:
        """A claim of so many bytes took so long, or failed after so long: the next ones are of as many as come in time,
        and of more again when those do; a failure that came soon says nothing."""
        if seconds > UNHURRIED:
            self._in_time = max(int(size * UNHURRIED / seconds), SLOWEST)
        elif not failed and 2 * size >= self._in_time:
            self._in_time = min(2 * self._in_time, ALL)

    @contextmanager
    def share(self, wanted: int) -> Iterator[Share]:
        """``wanted`` bytes, or what is left, or what comes in time."""
        wanted = min(wanted, self._in_time)
        share = Share(self, max(min(wanted, self.left), min(wanted, LEAST)))
        self.left -= share.size
        try:
            yield share
        finally:
            share.keep(0)
