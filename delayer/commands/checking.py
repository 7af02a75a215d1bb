"""What delayer check tells of one thing."""

from __future__ import annotations

from typing import Literal, NamedTuple

Result = Literal["ok", "note", "off", "out of reach"]


class Row(NamedTuple):
    """One thing that was looked at. ``advice`` is the next step where there is one to take."""

    what: str
    result: Result
    found: str
    advice: str = ""
