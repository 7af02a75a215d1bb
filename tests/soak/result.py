"""The options of a soak, and its findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from tests.faults.doomed import Doomed
from tests.support.verdict import Verdict

LARGEST_MB: Final = 200.0
"""A daemon's memory is bounded (G6), as its prefetch and its batches are. Twice the largest value ever seen."""


@dataclass(frozen=True)
class Options:
    seconds: float
    seed: int
    directory: Path
    bug: str = ""


@dataclass(frozen=True)
class Result:
    """The findings of a soak. ``faults`` broke something, ``missed`` found nothing to break. ``aside``: the number
    of messages in the strays queue; ``stranded``: those that never arrived. ``doomed``: the messages that had to be
    refused. ``ways``: messages sent in each. ``peaceful``: seconds without a fault that may repeat messages.
    ``rows``: the store's counter of releases, and the number of rows of which a copy arrived under their number or
    an earlier id. These differ if one row arrived under two ids."""

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
    ways: Mapping[str, int]
    surprises: list[str] = field(default_factory=list)

    @property
    def lost(self) -> int:
        return len(self.verdict.missing)

    @property
    def unmarked(self) -> int:
        """Copies without a fault or a second reading, copies of one row under different ids, different copies under one
        id, and messages under the id of another. Copies without an id are counted apart (docs/guarantees.md)."""
        verdict = self.verdict
        names = len(verdict.unaccounted) + len(verdict.two_faced) + len(verdict.shared)
        return len(verdict.unexcused) + abs(self.rows[0] - self.rows[1]) + names

    @property
    def kept(self) -> bool:
        """Whether every promise held, and no surprise happened."""
        verdict = self.verdict
        broken = self.lost or len(verdict.early) or len(verdict.changed) or self.unmarked or not self.doomed.kept
        grown, idle = self.largest_mb > LARGEST_MB, not all(self.ways.values())
        return not (broken or self.stranded or grown or idle or any(verdict.standing.values()) or self.surprises)
