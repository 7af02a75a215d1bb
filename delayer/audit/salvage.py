"""Reading what can be read of a table with damaged pages: the smallest places that fail are found and told about.

A failure costs the rest of its statement, so a run of pages that fails is read again in halves, down to a page; and a
page whose rows are there, but not all of their values (those lie elsewhere), row by row. What had come before the
failure is not handed on again: on one snapshot a run of pages gives its rows in the same order each time.

Each failure costs some milliseconds, and a disk may lose a gigabyte. So after FAILURES of them what fails is told as a
whole, however much of it could be read.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Final, NamedTuple, TypeAlias

import pyarrow as pa

from delayer.audit.connection import Reading, Unreadable
from delayer.audit.rules.damage import Damage
from delayer.audit.splits import Piece
from delayer.audit.values import CLAMPED

FAILURES: Final = 300
"""Of one piece. With pieces of splits.SPLIT_BYTES a lost gigabyte takes half a minute, and some twenty pages of a piece
are still found one by one."""
WHOLE: Final = "as a whole, as so many places before it cannot be read"
_PAGES: Final = "SELECT pg_relation_size('{}') / current_setting('block_size')::bigint"
_OFFSETS: Final = "SELECT ((ctid::text::point)[1])::int FROM ONLY {} WHERE {}"
_DUE_MS: Final = f"(extract(epoch FROM {CLAMPED.format('due_at')}) * 1000)::bigint"
_WHOSE: Final = f"SELECT lane::int, id, {_DUE_MS} FROM ONLY {{}} WHERE {{}}"


class Row(NamedTuple):
    """One row, by its place."""

    relation: str
    page: int
    offset: int

    def condition(self) -> str:
        """For WHERE."""
        return f"ctid = '({self.page},{self.offset})'::tid"


Found: TypeAlias = pa.RecordBatch | Damage
Read = Callable[[str], Iterator[pa.RecordBatch]]
"""Reads the rows of a table for which a condition holds. Raises Unreadable."""


def readable(reading: Reading, piece: Piece, read: Read, *, messages: bool = False) -> Iterator[Found]:
    """All rows of ``piece`` that can be read, in their order, and the places of the others. ``messages``: its rows say
    of what lane they are, and when they are due. Raises the driver's errors."""
    yield from _Salvage(reading, read, messages).found(piece, 0)


def pages_of(piece: Piece) -> str:
    """Which pages these are, for people."""
    if piece.after is None:
        return f"page {piece.first} and all behind it"
    last = piece.after - 1
    return f"page {last}" if last == piece.first else f"pages {piece.first} to {last}"


class _Salvage:
    def __init__(self, reading: Reading, read: Read, messages: bool) -> None:
        self._reading = reading
        self._read = read
        self._messages = messages
        self._failures = 0

    def found(self, piece: Piece | Row, skip: int) -> Generator[Found, None, int]:
        """What is new in ``piece`` after its first ``skip`` rows; returns how many rows of it could be read."""
        passed = 0
        try:
            for batch in self._read(piece.condition()):
                known = max(0, skip - passed)
                passed += batch.num_rows
                if known < batch.num_rows:
                    yield batch.slice(known)
        except Unreadable as error:
            if error.index is not None:  # no page of the table: dividing them is no use
                yield Damage(piece.relation, f"index {error.index.name}", f"{error.reason}; {error.index.advice}")
                return max(skip, passed)
            reason = error.reason
        else:
            return passed
        self._failures += 1
        if self._failures > FAILURES:
            # Who read it before, as a part of more, failed in it too: nothing of that lies behind it.
            yield self._damage(piece, reason, whole=True)
            return max(skip, passed)
        parts = self._parts(piece)
        if not parts:
            yield self._damage(piece, reason)
            return 0
        skip, total = max(skip, passed), 0
        for part in parts:
            total += yield from self.found(part, max(0, skip - total))
        return total

    def _parts(self, piece: Piece | Row) -> list[Piece] | list[Row]:
        """What to read on its own; nothing where it cannot be divided, or where it is no use."""
        if isinstance(piece, Row):
            return []
        if piece.after is None:
            [[pages]] = self._reading.rows(_PAGES.format(piece.relation))
            # Behind these is nothing that the snapshot sees.
            return [] if pages <= piece.first else [piece._replace(after=pages)]
        if piece.after - piece.first > 1:
            middle = (piece.first + piece.after) // 2
            return [piece._replace(after=middle), piece._replace(first=middle)]
        try:
            offsets = self._reading.rows(_OFFSETS.format(piece.relation, piece.condition()))
        except Unreadable:
            return []
        return [Row(piece.relation, piece.first, offset) for (offset,) in offsets]

    def _damage(self, piece: Piece | Row, reason: str, *, whole: bool = False) -> Damage:
        if isinstance(piece, Piece):
            told = f"{pages_of(piece)} {WHOLE}" if whole else f"page {piece.first}"
            return Damage(piece.relation, told, reason)
        found = Damage(piece.relation, f"({piece.page},{piece.offset})", reason)
        if self._messages:
            try:
                whose = self._reading.rows(_WHOSE.format(piece.relation, piece.condition()))
            except Unreadable:
                return found
            for lane, id_, due_ms in whose:
                return found._replace(lane=lane, id=id_, due_ms=due_ms)
        return found
