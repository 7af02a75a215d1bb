"""What this process did since its start: plain numbers, for status lines and (later) metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

KINDS: Final = (
    "parked",
    "released",
    "cascaded",
    "refused",
    "held",
    "cancelled",
    "restored",
    "broken_segments",
)


class Counters:
    """Counts by name; a name outside :data:`KINDS` is a programming error."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter(dict.fromkeys(KINDS, 0))

    def add(self, kind: str, count: int) -> None:
        if kind not in self._counts:
            raise KeyError(f"counter: expected one of {', '.join(KINDS)}, found {kind!r}")
        self._counts[kind] += count

    def as_dict(self) -> Mapping[str, int]:
        return dict(self._counts)
