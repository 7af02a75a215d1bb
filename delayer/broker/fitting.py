"""How many messages of a queue are read ahead, so that their bytes fit here. Pure.

The prefetch counts messages, and a buffer has bytes. Where large messages come faster than they can be carried on, the
buffer is full and the socket is not read; and RabbitMQ cuts a connection that took nothing for thirty seconds (the
``send_timeout`` of its listeners), so that what is under way comes twice. So whoever was full for too long begins again
with as many as fitted, and with more when it turns out that they are small.
"""

from __future__ import annotations

from typing import Final

ENOUGH: Final = 10
"""Messages tell how large they are after so many times the prefetch."""
WORTH: Final = 2
"""Times as many have to fit before it is worth beginning again."""


class Fitting:
    """``room``: bytes that may wait here."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._fits: int | None = None
        self._messages = 0
        self._bytes = 0

    def prefetch(self, wanted: int) -> int:
        """How many to ask for."""
        self._messages = self._bytes = 0
        return wanted if self._fits is None else min(wanted, self._fits)

    def full(self, messages: int) -> None:
        """So many filled the room, for too long."""
        self._fits = max(messages, 1)

    def took(self, messages: int, size: int, wanted: int) -> bool:
        """So many, of so many bytes, were taken on. Whether it is time to ask for more than before."""
        fits = self._fits
        if fits is None or fits >= wanted:
            return False
        self._messages += messages
        self._bytes += size
        if self._messages < ENOUGH * fits:
            return False
        would_fit = self._room * self._messages // max(self._bytes, 1)
        self._messages = self._bytes = 0
        if would_fit < WORTH * fits:
            return False
        self._fits = None if would_fit >= wanted else would_fit
        return True
