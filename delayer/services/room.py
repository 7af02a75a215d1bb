"""The bytes that the releases of a process have in hand, shared by its lanes: however many it adopted, memory does not
grow with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

ALL: Final = 32 << 20
"""Two full portions: what a daemon has in hand that owns two lanes, as by default."""
LEAST: Final = 256 << 10
"""What everybody gets at once though there is nothing left: nobody waits here, so nobody waits for another's broker."""


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

    @contextmanager
    def share(self, wanted: int) -> Iterator[Share]:
        """``wanted`` bytes, or what is left."""
        share = Share(self, max(min(wanted, self.left), min(wanted, LEAST)))
        self.left -= share.size
        try:
            yield share
        finally:
            share.keep(0)
