"""Values of a benchmark run: figures with their units and conditions, and the arithmetic on samples."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Sample = tuple[float, float]
"""A moment in seconds, and the number of messages that were done by then."""

FIRST, LAST = 0.1, 0.9
"""Rates are measured between these shares of the count: the start and the last, half-full batch are left out."""


@dataclass
class Figure:
    """One number, with the conditions of its measurement: ``{"body": 512, "backlog": 0}``."""

    section: str
    what: str
    value: float
    unit: str
    at: dict[str, int] = field(default_factory=dict)


@dataclass
class Result:
    """Everything that a run writes."""

    about: dict[str, Any] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def find(self, section: str, what: str, **at: int) -> Figure | None:
        """The first figure of that name whose conditions include ``at``."""
        named = (one for one in self.figures if (one.section, one.what) == (section, what))
        return next((one for one in named if at.items() <= one.at.items()), None)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Result:
        raw = json.loads(path.read_text())
        return cls(raw["about"], [Figure(**one) for one in raw["figures"]], raw["notes"])


def rate_between(samples: Sequence[Sample], total: float, first: float = FIRST, last: float = LAST) -> float:
    """Messages a second while the count went from ``first`` to ``last`` of ``total``.

    A count moves by batches, so the moments of the two shares are interpolated between the samples around them.
    """
    start, end = moment_of(samples, total * first), moment_of(samples, total * last)
    return total * (last - first) / max(end - start, 1e-9)


def moment_of(samples: Sequence[Sample], wanted: float) -> float:
    """The moment at which the count reached ``wanted``. Raises ValueError if it never did."""
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
