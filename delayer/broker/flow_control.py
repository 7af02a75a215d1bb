"""Flow control: a byte limit pauses the socket, and the prefetch is fitted to what the limit holds.

The prefetch counts messages, and a buffer has bytes. RabbitMQ cuts a connection that took nothing for thirty seconds.
So a subscription that was full for too long begins again with a smaller prefetch, and with a larger one when messages
are small again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

BUFFER_BYTES: Final = 32 << 20
"""Above this many bytes waiting here the socket is not read any more; the rest stays with the broker. The prefetch
counts messages, and five thousand of 1 MB would be five gigabytes."""
UNREAD: Final = 10.0
"""Seconds that the socket may be left alone, where the subscription can be begun again: RabbitMQ cuts a connection that
took nothing for thirty."""


class Socket(Protocol):
    """A connection."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Waiting(Protocol):
    """A subscription that something waits in."""

    def let_go(self) -> None:
        """Too much waits, for too long: end yourself, if you can be begun again."""


class Inflow:
    """Counts the bytes of one subscription, or of all that share a connection: they hold each other up anyhow, and
    together they are bounded, however many they are."""

    def __init__(self, room: int = BUFFER_BYTES) -> None:
        self._room = room
        self._bytes = 0
        self._waiting: set[Waiting] = set()
        self._listening: list[int] = []
        self._paused: set[Socket] = set()
        self._unread: asyncio.TimerHandle | None = None

    def behind(self, one: Waiting) -> bool:
        """Whether more may wait for it in the socket; of several nobody can tell whose that is."""
        return bool(self._paused) and self._waiting <= {one}

    def came(self, to: Waiting, socket: Socket, size: int) -> None:
        """So many bytes more wait in one of them."""
        self._bytes += size
        self._waiting.add(to)
        if self._bytes > self._limit and socket not in self._paused:
            self._paused.add(socket)
            socket.pause_reading()
            if self._unread is None:
                self._unread = asyncio.get_running_loop().call_later(UNREAD, self._for_too_long)

    def went(self, size: int) -> None:
        """So many wait no longer."""
        self._bytes -= size
        if self._bytes < self._room // 2:
            self._resume()

    def emptied(self, one: Waiting, size: int) -> None:
        """One of them keeps nothing any more; ``size`` is what waited in it."""
        self._waiting.discard(one)
        self.went(size)

    @contextmanager
    def listening(self, rooms: int) -> Iterator[None]:
        """Meanwhile somebody waits for the broker's answer, which comes behind everything else: read on, for so many
        times the room."""
        self._listening.append(rooms)
        if self._bytes <= self._limit:
            self._resume()
        try:
            yield
        finally:
            self._listening.remove(rooms)

    @property
    def _limit(self) -> int:
        return self._room * max(self._listening, default=1)

    def _resume(self) -> None:
        for socket in self._paused:
            socket.resume_reading()
        self._paused.clear()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _for_too_long(self) -> None:
        self._unread = None
        for one in tuple(self._waiting):
            one.let_go()


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
