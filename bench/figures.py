"""What a run of the benchmark found, as values: figures with their units and conditions, and what they are made of."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Sample = tuple[float, float]
"""A moment (seconds) and how many had been done by then."""

FIRST, LAST = 0.1, 0.9
"""Rates are measured between these shares of the count: before lies the start, behind it the last, half-full batch."""


@dataclass
class Figure:
    """One number. ``at`` are the conditions that it was measured under: ``{"body": 512, "backlog": 0}``.

    ``ratio``, ``of`` and ``targets`` are filled in by targets.py.
    """

    section: str
    what: str
    value: float
    unit: str
    at: dict[str, int] = field(default_factory=dict)
    ratio: float | None = None
    of: str = ""
    targets: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Series:
    """A curve for a chart."""

    section: str
    what: str
    x: list[float]
    y: list[float]
    at: dict[str, int] = field(default_factory=dict)


@dataclass
class Result:
    """Everything that a run leaves behind."""

    about: dict[str, Any] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def find(self, section: str, what: str, **at: int) -> Figure | None:
        """The figure of that name whose conditions include ``at``."""
        return next((one for one in self.all(section, what) if at.items() <= one.at.items()), None)

    def all(self, section: str, what: str) -> list[Figure]:
        return [one for one in self.figures if one.section == section and one.what == what]

    def save(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(self.as_json() + "\n")

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def load(cls, path: Path) -> Result:
        raw = json.loads(path.read_text())
        figures = [Figure(**one) for one in raw["figures"]]
        return cls(raw["about"], figures, [Series(**one) for one in raw["series"]], raw["notes"])


def rate_between(samples: Sequence[Sample], total: float, first: float = FIRST, last: float = LAST) -> float:
    """Messages a second while the count went from ``first`` to ``last`` of ``total``.

    A count moves by batches, so the moments of the two shares are interpolated between the samples around them.
    """
    start, end = moment_of(samples, total * first), moment_of(samples, total * last)
    return total * (last - first) / max(end - start, 1e-9)


def moment_of(samples: Sequence[Sample], wanted: float) -> float:
    """When the count reached ``wanted``. Raises ValueError if it never did."""
    before: Sample | None = None
    for at, done in samples:
        if done >= wanted:
            if before is None or done == before[1]:
                return at
            return before[0] + (at - before[0]) * (wanted - before[1]) / (done - before[1])
        before = (at, done)
    raise ValueError(f"the count never reached {wanted:g}; it ended at {before[1] if before else 0:g}")


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of them do not exceed; ``ordered`` ascends, and is not empty."""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def median(values: Sequence[float]) -> float:
    return percentile(sorted(values), 0.5)
