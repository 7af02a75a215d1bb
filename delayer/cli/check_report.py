"""The rows of ``delayer check``."""

from __future__ import annotations

from typing import Literal, NamedTuple

CheckResult = Literal["ok", "note", "off", "refused", "out of reach"]


class Row(NamedTuple):
    """A checked item. ``advice``: the next step, if any."""

    what: str
    result: CheckResult
    found: str
    advice: str = ""


class CheckReport(list[Row]):
    """The rows so far."""

    def add(self, what: str, result: CheckResult, found: object, advice: str = "") -> None:
        self.append(Row(what, result, str(found), advice))
