"""Held messages over which the broker ended a whole connection. Pure.

It would end one at every attempt, so it never goes by one that others use again, whatever else is said of it later.
"""

from __future__ import annotations

from typing import Final

from delayer.core.remembered import Remembered

_FACT: Final = Remembered("the broker ends the connection that it comes by: ", "; before that: it ended a connection")
BEFORE: Final = _FACT.before
"""What a later reason has at its end."""
again: Final = _FACT.again
ends: Final = _FACT.is_in
"""Whether what is held for this may end a connection."""


def reason(code: int, text: str) -> str:
    """Why a message is held that ended a connection, in the broker's words."""
    return f"{_FACT.said}{code} {text}"
