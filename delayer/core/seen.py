"""A set of ids, for as many as there may be: a bit each instead of some eighty bytes. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

PART: Final = 4096
"""Ids that share a piece: half a kilobyte, so few that lie far apart cost little, and ten million in a row 1.3 MB."""


class Seen:
    """Ids from 0 on. They are given out one after another, and those of one deed mostly lie close together."""

    def __init__(self) -> None:
        self._parts: dict[int, bytearray] = {}

    def update(self, ids: Iterable[int]) -> None:
        """Add these.

        >>> seen = Seen()
        >>> seen.update([7, 4711])
        >>> [number in seen for number in (6, 7, 4711, 8807)]
        [False, True, True, False]
        """
        for number in ids:
            part, bit = divmod(number, PART)
            piece = self._parts.get(part)
            if piece is None:
                piece = self._parts[part] = bytearray(PART // 8)
            piece[bit >> 3] |= 1 << (bit & 7)

    def __contains__(self, number: int) -> bool:
        part, bit = divmod(number, PART)
        piece = self._parts.get(part)
        return piece is not None and bool(piece[bit >> 3] & 1 << (bit & 7))
