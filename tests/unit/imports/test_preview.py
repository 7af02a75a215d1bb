"""Legacy imports: what a preview finds and says, and what the command refuses before any of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from delayer.cli.main import cli
from delayer.core import importing
from delayer.core.importing import Meant, Phase, Run, Survey
from delayer.core.message import Target
from delayer.imports import state_machine
from delayer.imports.hold_queues import HoldQueues
from delayer.imports.state_machine import BadSource, ImportImpossible
from tests.unit.imports.import_fakes import PARAMETERS, Died, FakeBook, FakeJudge, FakeSource, Shelf, Switch, run_once
from tests.unit.imports.test_state_machine import COUNT


async def test_a_preview_changes_nothing() -> None:
    shelf, book = Shelf(COUNT), FakeBook()
    seen = await state_machine.preview(FakeSource(shelf, Switch(1), PARAMETERS), book, FakeJudge())
    assert (seen.survey.messages, seen.to_hold, seen.unfinished) == (COUNT, 3, None)
    assert (len(shelf.there), book.run) == (COUNT, None)


async def test_a_preview_of_what_was_interrupted_tells_what_is_left_of_it() -> None:
    """Whoever is asked before `run` goes on sees this first."""
    shelf, book = Shelf(COUNT), FakeBook()
    steps = 0
    while await book.unfinished() is None or book.run is None or book.run.committed == 0:
        steps += 1
        shelf, book = Shelf(COUNT), FakeBook()
        with pytest.raises(Died):
            await run_once(shelf, book, at=steps)
    seen = await state_machine.preview(FakeSource(shelf, Switch(1), PARAMETERS), book, FakeJudge())
    assert seen.unfinished == book.run
    assert seen.survey.messages == len(shelf.staged or {}) > 0
    assert seen.refusal == ""
    with pytest.raises(ImportImpossible, match="another store"):
        await state_machine.preview(FakeSource(shelf, Switch(1), PARAMETERS | {"cutoff_ms": 6}), book, FakeJudge())


async def test_a_preview_says_why_a_run_would_not_begin() -> None:
    shelf, book = Shelf(0), FakeBook()
    with pytest.raises(Died):
        await run_once(shelf, book, at=3)
    seen = await state_machine.preview(FakeSource(shelf, Switch(1), PARAMETERS), book, FakeJudge())
    assert (seen.own, seen.refusal, seen.clean) == (True, "", True)
    seen = await state_machine.preview(FakeSource(shelf, Switch(1), PARAMETERS | {"cutoff_ms": 6}), book, FakeJudge())
    assert "cutoff_ms: begun with 5, now 6" in seen.refusal
    assert (seen.own, seen.clean) == (False, False)


GONE = Target(b"", b"gone")


@pytest.mark.parametrize(
    ("unfit", "problems", "left", "unfinished", "to_hold", "clean"),
    [
        (0, {}, {"due before the cutoff": 7}, None, 0, True),
        (2, {}, {}, None, 2, False),
        (2, {GONE: "no such queue"}, {}, None, 5, False),  # each counts once
        (5, {GONE: "no such queue"}, {}, None, 5, False),
        (0, {}, {importing.UNREADABLE: 1}, None, 0, False),
        (0, {}, {}, Run(1, "x", {}, Phase.RUNNING, "me", 0, held=0), 0, True),
        (0, {}, {}, Run(1, "x", {}, Phase.RUNNING, "me", 0, held=1), 0, False),
    ],
)
def test_a_preview_counts_and_checks(
    unfit: int, problems: dict[Target, str], left: dict[str, int], unfinished: Run | None, to_hold: int, clean: bool
) -> None:
    survey = Survey(left=left)
    for n in range(5):
        survey.add(GONE, n, problem="unfit: x" if n < unfit else "")
    seen = state_machine.Preview(survey, problems, unfinished, unfinished is not None)
    assert (seen.to_hold, sum(seen.reasons.values()), seen.clean) == (to_hold, to_hold, clean)


def test_the_reasons_that_are_told_are_bounded() -> None:
    survey = Survey()
    for n in range(1_000):
        survey.add(Target(b"", b"q"), n, problem=f"{n}")
    assert len(survey.unfit) == importing.MOST_REASONS + 1
    assert (sum(survey.unfit.values()), survey.goals[Target(b"", b"q")].unfit) == (1_000, 1_000)


def test_a_survey_of_very_many_destinations_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "MOST_GOALS", 3)
    survey = Survey()
    for n in range(10):
        survey.add(Target(b"", b"%d" % n), n)
    assert (survey.messages, len(survey.goals), survey.remarks) == (10, 3, [importing.MORE_GOALS])


@pytest.mark.parametrize(
    ("meant", "due_ms", "included"),
    [(Meant(), 0, True), (Meant(5), 4, False), (Meant(5), 5, True), (Meant(None, 3), -1, True)],
)
def test_the_chosen_messages(meant: Meant, due_ms: int, included: bool) -> None:
    assert meant.includes(due_ms) is included


@pytest.mark.parametrize("verb", ["preview", "run", "abort"])
def test_without_a_store_it_says_why_it_needs_one(verb: str, tmp_path: Path) -> None:
    words = ["import", "jsonl", verb, str(tmp_path / "x"), *(() if verb == "preview" else ("--yes",))]
    environ = {"DELAYER_CONFIG": os.devnull, "DELAYER_MODE": "native"}
    result = CliRunner().invoke(cli, words, env=environ, prog_name="delayer")
    assert result.exit_code == 2
    assert "an import keeps its state in one, in native mode too. Next: set store.url" in result.stderr


@pytest.mark.parametrize("url", ["http://u:s3cret@h", "amqp://u:s3c/ret@h/x"])
async def test_a_broker_that_is_none(url: str) -> None:
    async def now() -> int:
        return 0

    source = HoldQueues(url, None, ["q"], Meant(), now)
    with pytest.raises(BadSource, match="the source's broker URL: expected") as raised:
        await source.survey()
    assert "s3c" not in str(raised.value)
