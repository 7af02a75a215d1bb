"""Imports: the counts of a preview, and errors before the first query."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from delayer.cli.main import cli
from delayer.core import importing
from delayer.core.importing import ImportSelection, Phase, Run, Survey
from delayer.core.message import Target
from delayer.imports import state_machine
from delayer.imports.hold_queues import HoldQueues
from delayer.imports.state_machine import BadSource

GONE = Target(b"", b"gone")


@pytest.mark.parametrize(
    ("unfit", "problems", "left", "unfinished", "to_hold", "clean"),
    [
        (0, {}, {"due before the cutoff": 7}, None, 0, True),
        (2, {}, {}, None, 2, False),
        (2, {GONE: "no such queue"}, {}, None, 5, False),  # each is counted once
        (5, {GONE: "no such queue"}, {}, None, 5, False),
        (0, {}, {importing.Left.UNREADABLE: 1}, None, 0, False),
        (0, {}, {}, Run(1, "x", {}, Phase.RUNNING, "me", 0, held=0), 0, True),
        (0, {}, {}, Run(1, "x", {}, Phase.RUNNING, "me", 0, held=1), 0, False),
    ],
)
def test_a_preview_counts_the_messages_to_hold(
    unfit: int, problems: dict[Target, str], left: dict[str, int], unfinished: Run | None, to_hold: int, clean: bool
) -> None:
    survey = Survey(left=left)
    for n in range(5):
        survey.add(GONE, n, problem="unfit: x" if n < unfit else "")
    seen = state_machine.Preview(survey, problems, unfinished, unfinished is not None)
    assert (seen.to_hold, sum(seen.reasons.values()), seen.clean) == (to_hold, to_hold, clean)


def test_a_survey_of_very_many_destinations_is_bounded() -> None:
    survey, most = Survey(), importing.MOST_GOALS
    for n in range(most + 7):
        survey.add(Target(b"", b"%d" % n), n)
    assert (survey.messages, len(survey.goals), survey.remarks) == (most + 7, most, [importing.MORE_GOALS])


@pytest.mark.parametrize("verb", ["preview", "run", "abort"])
def test_without_a_store_the_error_says_why_an_import_needs_one(verb: str, tmp_path: Path) -> None:
    words = ["import", "jsonl", verb, str(tmp_path / "x"), *(() if verb == "preview" else ("--yes",))]
    environ = {"DELAYER_CONFIG": os.devnull, "DELAYER_MODE": "native"}
    result = CliRunner().invoke(cli, words, env=environ, prog_name="delayer")
    assert result.exit_code == 2
    assert "an import keeps its state in one, in native mode too. Next: set store.url" in result.stderr


@pytest.mark.parametrize("url", ["http://u:s3cret@h", "amqp://u:s3c/ret@h/x"])
async def test_an_invalid_broker_url_is_refused(url: str) -> None:
    async def now() -> int:
        return 0

    source = HoldQueues(url=url, patterns=["q"], meant=ImportSelection(), now=now)
    with pytest.raises(BadSource, match="the source's broker URL: expected") as raised:
        await source.survey()
    assert "s3c" not in str(raised.value)
