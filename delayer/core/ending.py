"""Held messages over which the broker ended a whole connection. Pure.

It would end one at every attempt, so it never goes by one that others use again, whatever else is said of it later.
"""

from __future__ import annotations

from typing import Final

_SAID: Final = "the broker ends the connection that it comes by: "
BEFORE: Final = "; before that: it ended a connection"
"""What a later reason has at its end."""


def reason(code: int, text: str) -> str:
    """Why a message is held that ended a connection, in the broker's words."""
    return f"{_SAID}{code} {text}"


def ends(why: str) -> bool:
    """Whether what is held for this may end a connection."""
    return why.startswith(_SAID) or BEFORE in why


def again(why: str, before: str) -> str:
    """The reason of a message that was held for ``before``, and is held once more. What was true of it stays true.

    >>> again("nacked", "the broker ends the connection that it comes by: 541 INTERNAL_ERROR")
    'nacked; before that: it ended a connection'
    >>> again("returned: 404", "nacked; before that: it ended a connection")
    'returned: 404; before that: it ended a connection'
    >>> again("nacked", "returned: 404")
    'nacked'
    """
    return why + BEFORE if ends(before) and not ends(why) else why
