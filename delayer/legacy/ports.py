"""What the state machine needs of a source, and a source of its surroundings, as Protocols."""

from __future__ import annotations

from collections.abc import AsyncIterable, Collection, Mapping, Sequence
from typing import Protocol

from delayer.core.importing import Batch, Goal, Phase, Run, Survey
from delayer.core.message import Target


class ImportImpossible(Exception):
    """The import cannot begin, or go on, as it was asked for: a person has to decide first. The message says what."""


class BadSource(ImportImpossible):
    """What was said of the source cannot be right, whatever is there."""


class SourceLost(Exception):
    """The source is out of reach. Nothing is lost: what was committed is here, the rest is there."""


class CountMismatch(Exception):
    """Something was counted twice and the numbers differ: the run stops where it is."""


class Source(Protocol):
    """What another system still holds. May raise SourceLost everywhere, ImportImpossible where it says so.

    ``name`` is what `delayer import` calls it; ``parameters`` say what is meant of it, without any password: a run is
    resumed only with equal ones.
    """

    @property
    def name(self) -> str: ...

    @property
    def parameters(self) -> Mapping[str, object]: ...

    async def survey(self, unfinished: Run | None = None, *, thorough: bool = False) -> Survey:
        """What is there, changing nothing that lasts. ``unfinished``: this very import, interrupted: what it staged is
        its own, and still to come. ``thorough``: every message is looked at that can be, however long that takes: a run
        will do so anyhow, and who looks wants to know before. Raises ImportImpossible for what no run could read."""

    async def stage(self, run: Run) -> int | None:
        """Take what is meant out of everybody else's reach, or note what there is to read. Safe to repeat. How many
        messages; None where only the run can tell. Raises ImportImpossible; then nothing is staged."""

    async def resume(self, run: Run) -> None:
        """Begin, or go on behind ``run.progress``: what is committed by it and still there is removed, now or when it
        is met again."""

    async def next_batch(self) -> Batch | None:
        """The next messages, soonest due first as far as the source can tell; None when nothing is left."""

    async def remove(self, batch: Batch) -> int | None:
        """``batch`` is committed: remove it there. How many were removed, None where that cannot be counted."""

    async def finish(self) -> dict[str, int]:
        """Nothing is left: clean up. Safe to repeat. Why messages stay there, and how many."""

    async def put_back(self, run: Run) -> int | None:
        """What is staged and not committed goes back to where it was. How many. Safe to repeat."""

    async def close(self) -> None:
        """Let go of connections and files. Safe to call twice."""


class Book(Protocol):
    """Where runs are written down, and batches committed. Satisfied by store.importing.ImportStore."""

    async def now_ms(self) -> int: ...

    async def unfinished(self) -> Run | None: ...

    async def begin(self, source: str, parameters: Mapping[str, object], who: str) -> Run: ...

    async def staged(self, run: Run, messages: int | None) -> Run: ...

    async def commit(self, run: Run, batch: Batch) -> Run:
        """All of the batch with its progress, or nothing. Messages whose key is taken count as superseded."""

    async def finish(self, run: Run, phase: Phase) -> Run: ...


class Notes(Protocol):
    """Where a source of records in a file notes their order. Satisfied by store.importing.ImportStore."""

    async def write_items(self, run: Run, items: AsyncIterable[Sequence[tuple[int, int, int]]]) -> int: ...

    async def keep_items(self, run: Run, limit: int) -> int: ...

    async def read_items(self, run: Run, after: tuple[int, int], limit: int) -> list[tuple[int, int, int]]: ...

    async def brought(self, source: str, sha256: str) -> list[tuple[int, int]]: ...

    async def waiting_under(self, wanted: Collection[bytes]) -> set[bytes]:
        """Those of these keys under which a message waits already."""


class Judge(Protocol):
    """Who knows which destinations the broker would take."""

    async def problems(self, goals: Mapping[Target, Goal]) -> Mapping[Target, str]:
        """Of these destinations those that messages would be held for, and why. Raises ImportImpossible where the
        broker could not be asked."""
