"""The state machine of an import: preview, run (stage, batches, resume), abort; and the port of a source.

Every step is safe to repeat, and the store has everything the next step needs, so a killed run continues after its last
commit. A batch commits together with the source's progress note; only then does the source remove it. After a kill in
between, that note says what the source must remove, so no message is parked twice. core/importing.py has the states.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from delayer.core.faultpoint import reach
from delayer.core.hold import Hold, HoldKind
from delayer.core.importing import FOR_PEOPLE, ImportBatch, ImportItem, Phase, Run, Survey, count_reason
from delayer.core.message import Target
from delayer.core.readable import Say
from delayer.store.admin.importing import ImportStore

if TYPE_CHECKING:
    from delayer.imports.brokers import Destinations


class ImportImpossible(Exception):
    """The import needs an operator's decision before it can begin or continue. The message says which."""


class BadSource(ImportImpossible):
    """The options that describe the source are wrong."""


class SourceLost(Exception):
    """The source is unreachable. No message is lost: each is committed in the store or still in the source."""


class CountMismatch(Exception):
    """Two counts of the same messages differ. The run stops at once."""


class ImportSource(Protocol):
    """The messages of another system, named ``name`` in `delayer import`. ``parameters`` choose the messages, without
    passwords; a resumed run needs equal parameters. Every method may raise SourceLost, and ImportImpossible if it says
    so."""

    @property
    def name(self) -> str: ...

    @property
    def parameters(self) -> Mapping[str, object]: ...

    async def survey(self, unfinished: Run | None = None) -> Survey:
        """Count and check the messages without lasting changes. Raises ImportImpossible if no run could read the
        source. ``unfinished``: this import was interrupted, and its staged messages are still to come."""

    async def stage(self, run: Run) -> int | None:
        """Hide the chosen messages from others, or save their places. Safe to repeat. Returns their number; None if
        only the run can tell. Raises ImportImpossible; then no message is staged."""

    async def resume(self, run: Run) -> None:
        """Begin, or continue after ``run.progress``. Removes committed messages from the source, now or when met."""

    async def next_batch(self) -> ImportBatch | None:
        """Return the next messages, soonest first as far as the source can tell; None at the end."""

    async def remove(self, batch: ImportBatch) -> int | None:
        """Remove a committed batch from the source. Returns the number removed; None if it cannot be counted."""

    async def finish(self) -> dict[str, int]:
        """Clean up after the last batch. Safe to repeat. Returns how many messages stay in the source, by reason."""

    async def put_back(self, run: Run) -> int | None:
        """Put back staged messages that are not committed. Returns their number. Safe to repeat."""

    async def close(self) -> None:
        """Close connections and files. Safe to call twice."""


@dataclass(frozen=True, slots=True)
class Preview:
    """The effects of a run. ``problems``: destinations whose messages would be held, and why. ``own``: whether
    ``unfinished`` is this import. ``refusal``: why a run would not begin, or ""."""

    survey: Survey
    problems: Mapping[Target, str]
    unfinished: Run | None
    own: bool
    refusal: str = ""

    @property
    def reasons(self) -> dict[str, int]:
        """Count messages that would be held, by reason, each once. May include messages beyond a limit."""
        found = dict(self.survey.unfit)
        for target, why in self.problems.items():
            if (goal := self.survey.goals.get(target)) is not None and goal.messages > goal.unfit:
                count_reason(found, why, goal.messages - goal.unfit)
        return found

    @property
    def to_hold(self) -> int:
        return min(sum(self.reasons.values()), self.survey.messages + self.survey.schedules)

    @property
    def clean(self) -> bool:
        """Whether a run would need no operator: no messages to hold, none unreadable, nothing to decide."""
        held_before = self.own and self.unfinished is not None and self.unfinished.held > 0
        found = self.reasons or not FOR_PEOPLE.isdisjoint(self.survey.left)
        return not (found or self.refusal or held_before)


@dataclass(slots=True)
class ImportReport:
    """The effects of a run, since it last ``begun`` and in total (``run``). ``again``: messages committed before the
    last interruption that only had to be removed. ``reasons``: why messages are held. ``left``: why messages stay.
    ``doubts``: the remarks of the survey; a resumed run has none."""

    begun: Run
    run: Run
    resumed: bool
    doubts: list[str]
    again: int = 0
    seconds: float = 0.0
    left: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def this_time(self) -> dict[str, int]:
        """The messages ``parked``, ``held`` and ``superseded`` since the run last begun."""
        names = ("parked", "held", "superseded")
        return {name: getattr(self.run, name) - getattr(self.begun, name) for name in names}

    @property
    def clean(self) -> bool:
        """Whether no operator is needed: no run held or superseded messages, and no chosen messages are left."""
        return not (self.run.held or self.run.superseded) and FOR_PEOPLE.isdisjoint(self.left)


async def preview(source: ImportSource, book: ImportStore, judge: Destinations, *, again: bool = False) -> Preview:
    """Preview a run without changes. ``again``: as for :func:`run`. Raises SourceLost, ImportImpossible, StoreLost."""
    unfinished = await book.find_unfinished()
    refusal = ""
    own = None
    try:
        own = None if unfinished is None else same(unfinished, source)
    except ImportImpossible as error:
        refusal = str(error)
    survey = await source.survey(own)
    problems = await judge.problems(survey.goals)
    return Preview(survey, problems, unfinished, own is not None, refusal or ("" if again else survey.brought))


async def run(
    source: ImportSource, book: ImportStore, judge: Destinations, who: str, say: Say, *, again: bool = False
) -> ImportReport:
    """Begin or continue. ``again``: also import messages that an earlier import brought. Raises SourceLost,
    ImportImpossible, CountMismatch, StoreLost; then run it again."""
    began = time.monotonic()
    found = await book.find_unfinished()
    doubts: list[str] = []
    if found is None:
        # An unreadable source or an unreachable broker stops the import before any message moves.
        survey = await source.survey()
        doubts = survey.doubts
        if survey.brought and not again:
            raise ImportImpossible(survey.brought)
        await judge.problems(survey.goals)
        current = await book.begin(source.name, source.parameters, who)
        reach("import.begun")
    else:
        current = same(found, source)
    if current.phase is Phase.STAGING:
        say("staging", 0, None)
        messages = await source.stage(current)
        reach("import.staged")
        current = await book.finish_staging(current, messages)
    report = ImportReport(current, current, resumed=found is not None, doubts=doubts)
    await source.resume(current)
    await _batches(source, book, judge, report, say)
    current = report.run
    if current.staged is not None and current.committed != current.staged:
        if report.resumed and current.committed == report.begun.committed and not report.again:
            raise ImportImpossible(
                f"{current.staged} messages were staged, {current.committed} are committed, and the rest are "
                "missing: an interrupted `abort` put them back, or another program has them. Next: `abort`, with "
                "the same parameters; then a new run"
            )
        raise CountMismatch(
            f"{current.staged} messages were staged, but {current.committed} are committed, and the source has no more"
        )
    report.left = await source.finish()
    reach("import.emptied")
    report.run = await book.finish(current, Phase.DONE)
    report.seconds = time.monotonic() - began
    return report


async def _batches(
    source: ImportSource, book: ImportStore, judge: Destinations, report: ImportReport, say: Say
) -> None:
    """Import batch after batch until the source is empty; ``report`` has the progress."""
    while True:
        current = report.run
        say("importing", current.committed, current.staged)
        batch = await source.next_batch()
        if batch is None:
            return
        batch = await _judged(batch, judge)
        reach("import.taken")
        if current.staged is not None and current.committed + len(batch.items) > current.staged:
            raise CountMismatch(
                f"{current.staged} messages were staged, {current.committed} are committed, and {len(batch.items)} "
                "more came"
            )
        put_in: Sequence[ImportItem] = ()
        if batch.items or batch.progress != current.progress:
            report.run, put_in = await book.commit(current, batch)
        report.again += batch.again
        for item in put_in:
            if item.hold is not None:
                count_reason(report.reasons, item.hold.text)
        removed = await source.remove(batch)
        reach("import.removed")
        expected = len(batch.items) + batch.again
        if removed is not None and removed != expected:
            raise CountMismatch(
                f"{expected} messages of a batch are committed, but {removed} could be removed from the source: "
                "another program removes them too"
            )


async def _judged(batch: ImportBatch, judge: Destinations) -> ImportBatch:
    """Add a hold to each message that the broker would not accept."""
    survey = Survey()
    for item in batch.items:
        survey.expect(item.parcel.target, 1, item.parcel.due_ms)
    problems = await judge.problems(survey.goals)
    if not problems:
        return batch
    items = [
        item._replace(hold=Hold(HoldKind.RETURNED, why))
        if item.hold is None and (why := problems.get(item.parcel.target))
        else item
        for item in batch.items
    ]
    return replace(batch, items=items)


async def abort(source: ImportSource, book: ImportStore) -> tuple[Run, int | None]:
    """End an unfinished run: committed messages stay, the rest go back. Returns the run, and how many went back; None
    if the source cannot count them. Raises ImportImpossible if there is no run."""
    found = await book.find_unfinished()
    if found is None:
        raise ImportImpossible("there is no unfinished import to abort")
    current = same(found, source)
    back = await source.put_back(current)
    reach("import.emptied")
    return await book.finish(current, Phase.ABORTED), back


def same(found: Run, source: ImportSource) -> Run:
    """Return ``found`` if it is this import. Raises ImportImpossible."""
    begun = {"source": found.source, **found.parameters}
    now = {"source": source.name, **source.parameters}
    differences = [
        f"{name}: begun with {begun.get(name, 'nothing')!r}, now {now.get(name, 'nothing')!r}"
        for name in sorted(begun.keys() | now.keys())
        if begun.get(name) != now.get(name)
    ]
    if not differences:
        return found
    raise ImportImpossible(
        f"import {found.id} from {found.source} is not finished, and was begun with other parameters ("
        f"{'; '.join(differences)}). Next: `delayer import {found.source} run` with those, to go on, or `abort` with "
        "them"
    )
