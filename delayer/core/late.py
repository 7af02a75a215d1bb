"""Messages that come too late to be of use: which they are, and what is said of them. Pure.

A route's ``late_limit`` says how late is too late; with ``late_action = "hold"`` such messages are held instead of
delivered, and only a person has them delivered (``delayer held retry``) or dropped. What a person asks for is done: a
message that was held for being late is delivered when it is tried again, however late that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from delayer.core.delay import in_words

PREFIX: Final = "late: "
UNFIT: Final = "unfit: "
"""Of what an import brought and nobody can vouch for: bytes that are not those that were exported, headers that cannot
be read, no destination, no waiting time. As it stands it is delivered only if a person says so."""
FOR_PEOPLE: Final = (PREFIX, UNFIT)
"""What the reasons begin with that time does not mend."""
FOR_GOOD_MS: Final = 253_402_300_799_999
"""The next attempt of what is held for good: the end of the year 9999."""

Limits = Mapping[bytes, int]
"""Of the routes that hold what is late: milliseconds. A route that is not in it delivers, however late."""


def reason(due_ms: int, now_ms: int, limit_ms: int | None) -> str | None:
    """Why a message that is due at ``due_ms`` is held at ``now_ms``; None if it is not too late.

    >>> reason(0, 60_000, 60_000)
    >>> reason(0, 90_000, 60_000)
    'late: by 0:01:30, and late_limit of its route is 0:01:00'
    """
    late_ms = now_ms - due_ms
    if limit_ms is None or late_ms <= limit_ms:
        return None
    return f"{PREFIX}by {in_words(late_ms)}, and late_limit of its route is {in_words(limit_ms)}"


def for_good(why: str) -> bool:
    """Whether a message that is held for this reason waits for a person."""
    return why.startswith(FOR_PEOPLE)


def by_hand(retry_ms: int) -> bool:
    """Whether a message that is tried again then waits for a person: time does not come so far. One that a person gave
    an instant waits for that, whatever it is held for."""
    return retry_ms >= FOR_GOOD_MS


def retry_ms(why: str, again_ms: int) -> int:
    """When what is held for this reason is tried again, if it were to be tried at ``again_ms``."""
    return FOR_GOOD_MS if for_good(why) else again_ms
