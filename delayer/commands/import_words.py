"""What `delayer import` says: previews and reports, for people and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from delayer.commands.output import address, iso, note, print_json, print_table
from delayer.core.importing import OTHER_REASONS, Goal, Run, Survey
from delayer.core.message import Target
from delayer.legacy.machine import Aborted, Preview, Report

SUPERSEDED = "as a message waits under their key already, and stays"
MOST_GOALS = 20
MOST_REASONS = 10


def tell_preview(seen: Preview, as_json: bool) -> None:
    survey = seen.survey
    if as_json:
        print_json(
            {
                "messages": survey.messages,
                "first_due_ms": survey.first_due_ms,
                "last_due_ms": survey.last_due_ms,
                "destinations": [
                    {
                        "exchange": target.exchange,
                        "routing_key": target.routing_key,
                        "messages": goal.messages,
                        "first_due_ms": goal.first_due_ms,
                        "problem": seen.problems.get(target),
                        "unfit": goal.unfit,
                    }
                    for target, goal in _by_size(survey)
                ],
                "would_be_held": seen.to_hold,
                "held_because": seen.reasons,
                "superseded": survey.superseded,
                "left": survey.left,
                "remarks": survey.remarks,
                "refused": seen.refusal or None,
                "unfinished": None if seen.unfinished is None else _json_of(seen.unfinished),
            }
        )
        return
    for line in lines_of(seen):
        click.echo(line)
    if survey.goals:
        rows = [
            (
                address(*target),
                f"{goal.messages:,}",
                _when(goal.first_due_ms),
                _problem(goal, seen.problems.get(target)),
            )
            for target, goal in _by_size(survey)[:MOST_GOALS]
        ]
        print_table(["destination", "messages", "first due", "problem"], rows, right=(1,))
        if len(survey.goals) > MOST_GOALS:
            note(f"… and {len(survey.goals) - MOST_GOALS:,} destinations more; --json has all of them.")
    if seen.unfinished is not None:
        one = seen.unfinished
        note(f"Import {one.id} from {one.source} is not finished: {one.committed:,} messages are committed.")
    if seen.refusal:
        note(f"A run would be refused: {seen.refusal}.")


def _problem(goal: Goal, why: str | None) -> str:
    """What is wrong with a destination, or else with some of what goes there."""
    if why is not None:
        return _short(why)
    return f"{goal.unfit:,} unfit" if goal.unfit else ""


def _when(first_due_ms: int | None) -> str:
    return "?" if first_due_ms is None else iso(first_due_ms)


def _short(problem: str) -> str:
    return problem.removeprefix("import: ")


def _by_size(survey: Survey) -> list[tuple[Target, Goal]]:
    return sorted(survey.goals.items(), key=lambda one: (-one[1].messages, one[0]))


def lines_of(seen: Preview) -> list[str]:
    """A survey in words."""
    survey = seen.survey
    if survey.messages is None:
        said = ["How many messages are meant is seen by a run only."]
    else:
        said = [f"{survey.messages:,} messages are meant."]
    if survey.first_due_ms is not None and survey.last_due_ms is not None:
        said.append(f"The first is due {iso(survey.first_due_ms)}, the last {iso(survey.last_due_ms)}.")
    if seen.reasons:
        said.append(f"{seen.to_hold:,} of them would be held, as far as can be seen:")
        said += [f"  {count:,}, {why}" for count, why in _reasons(seen.reasons)]
    if survey.superseded:
        said.append(f"{survey.superseded:,} of them would not be imported: {SUPERSEDED}.")
    said += [f"Left where they are: {count:,} {why}." for why, count in survey.left.items()]
    return said + [f"Note: {remark}." for remark in survey.remarks]


def _reasons(reasons: Mapping[str, int]) -> list[tuple[int, str]]:
    """The most frequent ones, for people; the last is for all others."""
    found = sorted(((count, _short(why)) for why, count in reasons.items()), key=lambda one: (-one[0], one[1]))
    told, others = found[:MOST_REASONS], found[MOST_REASONS:]
    if others:
        told.append((sum(count for count, _ in others), f"{OTHER_REASONS}: --json has more of them"))
    return told


def _json_of(run: Run) -> dict[str, Any]:
    return {
        "id": run.id,
        "source": run.source,
        "parameters": run.parameters,
        "phase": run.phase.value,
        "staged": run.staged,
        "parked": run.parked,
        "held": run.held,
        "superseded": run.superseded,
        "who": run.who,
        "began_ms": run.began_ms,
    }


def tell_report(report: Report, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                **_json_of(report.run),
                "resumed": report.resumed,
                "this_time": {
                    "parked": report.parked,
                    "held": report.held,
                    "superseded": report.superseded,
                    "already_committed": report.again,
                },
                "seconds": round(report.seconds, 3),
                "left": report.left,
                "held_because": report.reasons,
                "doubts": report.doubts,
            }
        )
        return
    run = report.run
    whole = f" ({run.parked:,} and {run.held:,} altogether)" if report.resumed else ""
    rate = f", {(report.parked + report.held) / report.seconds:,.0f}/s" if report.seconds else ""
    click.echo(
        f"Import {run.id} is done: {report.parked:,} parked, {report.held:,} held{whole}; {report.seconds:.1f} s{rate}."
    )
    if report.again:
        click.echo(f"{report.again:,} were committed before the interruption and only had to be removed.")
    for count, why in _reasons(report.reasons):
        note(f"Held: {count:,}, {why}.")
    if report.superseded:
        note(f"Not imported: {report.superseded:,}, {SUPERSEDED}. The audit log (`delayer acts`) names the keys.")
    for why, count in report.left.items():
        note(f"Left where they are: {count:,} {why}.")
    for doubt in report.doubts:
        note(f"Note: {doubt}.")


def tell_aborted(done: Aborted, as_json: bool) -> None:
    if as_json:
        print_json({**_json_of(done.run), "put_back": done.put_back})
        return
    back = "the rest is where it was" if done.put_back is None else f"{done.put_back:,} are where they were"
    click.echo(f"Import {done.run.id} is aborted: {done.run.committed:,} messages stay in the store, {back}.")
