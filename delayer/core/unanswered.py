"""Held messages whose destination perhaps has them: a publish of theirs was never answered. Pure.

A queue that did not answer may have taken what was published to it, and delivers it when it answers again. So nobody
can say that such a message is cancelled, even if it is never tried again.
"""

from __future__ import annotations

from typing import Final

_SAID: Final = "no confirm within "
BEFORE: Final = "; before that: no confirm"
"""What a later reason has at its end."""


def reason(seconds: float, where: str) -> str:
    """Why a message is held that was published to ``where``, and not answered."""
    return f"{_SAID}{seconds:g} s: {where}: a queue behind them does not answer"


def perhaps_out(why: str) -> bool:
    """Whether the destination of what is held for this perhaps has it."""
    return why.startswith(_SAID) or BEFORE in why


def again(why: str, before: str) -> str:
    """The reason of a message that was held for ``before``, and is held once more. What was true of it stays true.

    >>> again("nacked", "no confirm within 8 s: …")
    'nacked; before that: no confirm'
    >>> again("returned: 404", "nacked; before that: no confirm")
    'returned: 404; before that: no confirm'
    >>> again("no confirm within 8 s: …", "nacked")
    'no confirm within 8 s: …'
    """
    return why + BEFORE if perhaps_out(before) and not perhaps_out(why) else why
