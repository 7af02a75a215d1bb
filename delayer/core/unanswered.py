"""Held messages whose destination perhaps has them: a publish of theirs was never answered. Pure.

A queue that did not answer may have taken what was published to it, and delivers it when it answers again. So nobody
can say that such a message is cancelled, even if it is never tried again.
"""

from __future__ import annotations

from typing import Final

from delayer.core.remembered import Remembered

_FACT: Final = Remembered("no confirm within ", "; before that: no confirm")
BEFORE: Final = _FACT.before
"""What a later reason has at its end."""
again: Final = _FACT.again
perhaps_out: Final = _FACT.is_in
"""Whether the destination of what is held for this perhaps has it."""


def reason(seconds: float, where: str) -> str:
    """Why a message is held that was published to ``where``, and not answered."""
    return f"{_FACT.said}{seconds:g} s: {where}: a queue behind them does not answer"
