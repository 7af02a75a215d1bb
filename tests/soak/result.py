"""What a soak is asked for, and what it found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from tests.faults.doomed import Doomed
from tests.support.verdict import Verdict

LARGEST_MB: Final = 200.0
"""A daemon is bounded (G6): its prefetch and its portions are, and nothing else grows. Twice what was ever seen."""


@dataclass(frozen=True)
class Options:
    seconds: float
    seed: int
    directory: Path
    bug: str = ""


@dataclass(frozen=True)
class Result:
    """What a soak found. ``faults`` are those that broke something, ``missed`` those that met nothing to break.
    ``aside``: how many stand in the strays queue for everybody to see; ``stranded`` are those of them that never came,
    neither lost nor delivered. ``doomed``: what had to be refused. ``peaceful``: seconds without a fault that may be
    why something comes twice. ``rows``: what the store counts as released, and of how many of its rows a copy arrived
    under their number, or was held under the id that it had already; these differ if something came twice under two
    names."""

    options: Options
    begun: datetime
    broker: str
    seconds: float
    verdict: Verdict
    faults: Mapping[str, int]
    missed: Mapping[str, int]
    aside: int
    stranded: int
    doomed: Doomed
    peaceful: float
    rows: tuple[int, int]
    largest_mb: float
    modes: Mapping[str, int]
    surprises: list[str] = field(default_factory=list)

    @property
    def lost(self) -> int:
        return len(self.verdict.missing)

    @property
    def unmarked(self) -> int:
        """Copies that met no fault or were not read as often, copies of one row under different ids, and such of one id
        that differ all the same; and messages under the id of another. Copies of those that nobody named are counted
        apart: what they may look like is in docs/guarantees.md."""
        verdict = self.verdict
        names = len(verdict.unaccounted) + len(verdict.two_faced) + len(verdict.shared)
        return len(verdict.unexcused) + abs(self.rows[0] - self.rows[1]) + names

    @property
    def kept(self) -> bool:
        """Every promise, and nothing else that should not have happened."""
        verdict = self.verdict
        broken = self.lost or len(verdict.early) or len(verdict.changed) or self.unmarked or not self.doomed.kept
        grown = self.largest_mb > LARGEST_MB
        return not (broken or self.stranded or grown or any(verdict.standing.values()) or self.surprises)
