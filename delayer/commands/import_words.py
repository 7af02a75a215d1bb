"""What `delayer import` says: previews and reports, for people and as JSON."""

from __future__ import annotations

from typing import Any

import click

from delayer.commands.common import note, print_json, print_table
from delayer.commands.filters import address, iso
from delayer.core.importing import Goal, Run, Survey
from delayer.core.message import Target
from delayer.legacy.machine import Aborted, Preview, Report

MOST_GOALS = 20


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
                    }
                    for target, goal in _by_size(survey)
                ],
                "would_be_held": seen.to_hold,
                "left": survey.left,
                "remarks": survey.remarks,
                "unfinished": None if seen.unfinished is None else _json_of(seen.unfinished),
            }
        )
        return
    for line in lines_of(survey, seen.to_hold):
        click.echo(line)
    if survey.goals:
        rows = [
            (address(*target), f"{goal.messages:,}", _when(goal.first_due_ms), _short(seen.problems.get(target, "")))
            for target, goal in _by_size(survey)[:MOST_GOALS]
        ]
        print_table(["destination", "messages", "first due", "problem"], rows, right=(1,))
        if len(survey.goals) > MOST_GOALS:
            note(f"… and {len(survey.goals) - MOST_GOALS:,} destinations more; --json has all of them.")
    if seen.unfinished is not None:
        one = seen.unfinished
        note(f"Import {one.id} from {one.source} is not finished: {one.committed:,} messages are committed.")


def _when(first_due_ms: int | None) -> str:
    return "?" if first_due_ms is None else iso(first_due_ms)


def _short(problem: str) -> str:
    return problem.removeprefix("import: ")


def _by_size(survey: Survey) -> list[tuple[Target, Goal]]:
    return sorted(survey.goals.items(), key=lambda one: (-one[1].messages, one[0]))


def lines_of(survey: Survey, to_hold: int) -> list[str]:
    """A survey in words."""
    if survey.messages is None:
        said = ["How many messages are meant is seen by a run only."]
    else:
        said = [f"{survey.messages:,} messages are meant."]
    if survey.first_due_ms is not None and survey.last_due_ms is not None:
        said.append(f"The first is due {iso(survey.first_due_ms)}, the last {iso(survey.last_due_ms)}.")
    if to_hold:
        said.append(f"{to_hold:,} of them would be held: the broker does not have their destinations.")
    said += [f"Left where they are: {count:,} {why}." for why, count in survey.left.items()]
    return said + [f"Note: {remark}." for remark in survey.remarks]


def _json_of(run: Run) -> dict[str, Any]:
    return {
        "id": run.id,
        "source": run.source,
        "parameters": run.parameters,
        "phase": run.phase.value,
        "staged": run.staged,
        "parked": run.parked,
        "held": run.held,
        "who": run.who,
        "began_ms": run.began_ms,
    }


def tell_report(report: Report, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                **_json_of(report.run),
                "resumed": report.resumed,
                "this_time": {"parked": report.parked, "held": report.held, "already_committed": report.again},
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
    for why, count in sorted(report.reasons.items()):
        note(f"Held: {count:,}, {_short(why)}.")
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
