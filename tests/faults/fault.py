"""A fault as a value."""

from __future__ import annotations

from typing import NamedTuple


class Missed(Exception):
    """There was nothing that the fault could break, so it was none: says what it looked for."""


class Untouched(Missed):
    """And nothing else was done in looking for it, so nothing is excused by it either."""


class Fault(NamedTuple):
    """``kind`` is one of kinds.KINDS; ``target`` which daemon, where it is one of several; ``seconds`` how long it
    lasts; ``detail`` what else its kind wants to know."""

    kind: str
    target: int = 0
    seconds: float = 1.0
    detail: str = ""

    def __str__(self) -> str:
        detail = f" {self.detail}" if self.detail else ""
        return f"{self.kind}{detail} (daemon {self.target + 1}, {self.seconds:.1f} s)"
