"""How a table is divided among the executors: runs of its pages. Pure.

A run of pages is read in the order of the disk, whatever the indexes say, and its size is known without statistics.
``ctid`` ranges are exact on one snapshot: a row version that the snapshot sees stays where it is for as long as
somebody may see it, and pages that the table grows by later hold nothing that the snapshot sees.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

SPLIT_BYTES: Final = 64 << 20
"""What one task reads: seconds of work, and thousands of tasks for a terabyte."""
CHUNK_BYTES: Final = 1 << 20
"""What a sample takes at a time: neighbours were parked together, so a sample needs many places."""


class Relation(NamedTuple):
    """A table that holds rows. ``size`` is in bytes, with what lies out of line."""

    name: str
    pages: int
    size: int

    @property
    def page_size(self) -> float:
        return self.size / self.pages


class Piece(NamedTuple):
    """The pages ``first`` to ``after`` (not included) of a table; to its end where ``after`` is None."""

    relation: str
    first: int
    after: int | None

    def __str__(self) -> str:
        if self.after is None:
            return f"page {self.first} and all behind it"
        return f"pages {self.first} to {self.after - 1}"

    def condition(self) -> str:
        """For WHERE."""
        low = f"ctid >= '({self.first},0)'::tid"
        return low if self.after is None else f"{low} AND ctid < '({self.after},0)'::tid"


Split = tuple[Piece, ...]
"""What one task reads, on one connection."""


def plan(
    relations: Iterable[Relation], *, split_bytes: int = SPLIT_BYTES, sample: float = 1.0, seed: int = 0
) -> list[Split]:
    """Everything, or a share ``sample`` of the pages, as tasks of about ``split_bytes``; small tables share one."""
    splits: list[Split] = []
    gathered: list[Piece] = []
    filled = 0.0
    for relation in relations:
        for piece, size in _pieces(relation, split_bytes, sample, seed):
            if gathered and filled + size > split_bytes:
                splits.append(tuple(gathered))
                gathered, filled = [], 0.0
            gathered.append(piece)
            filled += size
    if gathered:
        splits.append(tuple(gathered))
    return splits


def _pieces(relation: Relation, split_bytes: int, sample: float, seed: int) -> Iterator[tuple[Piece, float]]:
    """The relation's pieces, each with its bytes."""
    if relation.pages == 0:
        return
    if sample < 1.0:
        yield from _sampled(relation, sample, seed)
        return
    step = max(1, int(split_bytes / relation.page_size))
    for first in range(0, relation.pages, step):
        after = first + step
        # The last one has no end: the table may have grown between the snapshot and the look at its size.
        yield (
            Piece(relation.name, first, after if after < relation.pages else None),
            min(step, relation.pages - first) * relation.page_size,
        )


def _sampled(relation: Relation, sample: float, seed: int) -> Iterator[tuple[Piece, float]]:
    """Each chunk with the same chance: an estimate from them, divided by ``sample``, is a fair one.

    The seed is the caller's, so that a task that is repeated reads the same pages.
    """
    chance = random.Random(f"{seed} {relation.name}")
    step = max(1, int(CHUNK_BYTES / relation.page_size))
    for first in range(0, relation.pages, step):
        if chance.random() < sample:
            after = min(first + step, relation.pages)
            yield Piece(relation.name, first, after), (after - first) * relation.page_size
