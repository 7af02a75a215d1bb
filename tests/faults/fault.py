"""A fault as a value."""

from __future__ import annotations

from typing import NamedTuple


class Missed(Exception):
    """The fault found nothing to break. The message names the missing target."""


class Untouched(Missed):
    """The fault did not change anything even while searching for a target, so it does not excuse repeated messages."""


class Fault(NamedTuple):
    """``kind``: one of kinds.KINDS. ``target``: the index of the daemon. ``seconds``: how long the fault lasts.
    ``detail``: an argument of the kind."""

    kind: str
    target: int = 0
    seconds: float = 1.0
    detail: str = ""

    def __str__(self) -> str:
        detail = f" {self.detail}" if self.detail else ""
        return f"{self.kind}{detail} (daemon {self.target + 1}, {self.seconds:.1f} s)"
