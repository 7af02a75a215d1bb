"""What keeps the daemon from its work just now, for `systemctl status`: who waits for a start that does not end, or for
messages that do not come, looks there first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

from delayer.ops.notify import Notifier

LOOK: Final = 1.0
"""Seconds between two looks: what is over sooner is not worth a word."""


class Seen(NamedTuple):
    """How the daemon stands. ``blocked``: by a resource alarm of the broker. ``store``: whether one is configured,
    ``usable``: whether a lane of it is ours."""

    connected: bool
    blocked: bool
    store: bool
    usable: bool
    consuming: bool


def trouble(seen: Seen) -> str:
    """In words; nothing where all is well. Pure.

    >>> trouble(Seen(connected=False, blocked=False, store=True, usable=False, consuming=False))
    'the broker is out of reach; the store is out of reach, or gives us no lane'
    """
    found = []
    if not seen.connected:
        found.append("the broker is out of reach")
    elif seen.blocked:
        found.append("the broker takes no publishes (a resource alarm)")
    if seen.store and not seen.usable:
        found.append("the store is out of reach, or gives us no lane")
    if not seen.consuming and not found:
        found.append("nothing is consumed yet")
    return "; ".join(found)


class Condition:
    """Tells systemd of it whenever it changes."""

    def __init__(self, notifier: Notifier, look: Callable[[], Seen]) -> None:
        self._notifier = notifier
        self._look = look

    def tell(self) -> None:
        """Look now."""
        self._notifier.trouble(trouble(self._look()))

    async def run(self, stopping: asyncio.Event) -> None:
        """Until stopping is set."""
        while not stopping.is_set():
            self.tell()
            try:
                await asyncio.wait_for(stopping.wait(), LOOK)
            except TimeoutError:
                continue
