"""delayer import: bring in other systems' messages. Each source has the verbs preview, run and abort."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NoReturn, TypeVar

import click

from delayer.cli.errors import CommandFailed, ExitCode, Misused, OutOfReach
from delayer.cli.options import (
    as_json,
    confirm,
    dry_run_option,
    fixed_instant,
    joined,
    read_as,
    request_of,
    whoami,
    yes_option,
)
from delayer.cli.output import note, print_json, print_table, progress
from delayer.config.model import Settings
from delayer.core.importing import ImportSelection, Run, read_rewrite
from delayer.core.readable import counted, instant
from delayer.format.reading import address
from delayer.imports import state_machine
from delayer.imports.brokers import Destinations
from delayer.imports.state_machine import ImportReport, ImportSource, Preview
from delayer.store.admin.importing import ImportBusy, ImportStore


@contextmanager
def import_failures() -> Iterator[None]:
    """Raise import errors as CommandError, with the next step."""
    try:
        yield
    except state_machine.SourceLost as error:
        raise OutOfReach(
            f"the source is out of reach: {error}. Next: correct that, and run the same again; "
            "an import that had begun resumes where it stopped."
        ) from error
    except state_machine.BadSource as error:
        raise Misused(f"{error}.") from error
    except (ImportBusy, state_machine.ImportImpossible) as error:
        raise CommandFailed(f"{error}.") from error
    except state_machine.CountMismatch as error:
        raise CommandFailed(f"the counts differ: {error}. Nothing is lost; see docs/importing.md.") from error


SHOWN_GOALS = 20


def tell_preview(seen: Preview, as_json: bool) -> None:
    survey = seen.survey
    goals = sorted(survey.goals.items(), key=lambda one: (-one[1].messages, one[0]))
    if as_json:
        names = ("messages", "schedules", "first_due_ms", "last_due_ms", "left", "remarks")
        print_json(
            {
                **{name: getattr(survey, name) for name in names},
                "destinations": [
                    {**target._asdict(), **asdict(goal), "problem": seen.problems.get(target)} for target, goal in goals
                ],
                "would_be_held": seen.to_hold,
                "held_because": seen.reasons,
                "refused": seen.refusal or None,
                "unfinished": None if seen.unfinished is None else _json_of(seen.unfinished),
            }
        )
        return
    for line in lines_of(seen):
        click.echo(line)
    if goals:
        rows = []
        for target, goal in goals[:SHOWN_GOALS]:
            first_due = "?" if goal.first_due_ms is None else instant(goal.first_due_ms)
            problem = seen.problems.get(target) or (f"{goal.unfit:,} unfit" if goal.unfit else "")
            rows.append((address(*target), f"{goal.messages:,}", first_due, problem))
        print_table(["destination", "messages", "first due", "problem"], rows, right=(1,))
        if len(goals) > SHOWN_GOALS:
            note(f"… and {counted(len(goals) - SHOWN_GOALS, 'more destination')}; --json has all of them.")
    if seen.unfinished is not None:
        one = seen.unfinished
        note(f"Import {one.id} from {one.source} is not finished. Committed: {counted(one.committed, 'message')}.")
    if seen.refusal:
        note(f"A run would be refused: {seen.refusal}.")


def lines_of(seen: Preview) -> list[str]:
    survey = seen.survey
    schedules = f" and {counted(survey.schedules, 'schedule')}" if survey.schedules else ""
    said = [f"Chosen: {counted(survey.messages, 'message')}{schedules}."]
    if survey.first_due_ms is not None and survey.last_due_ms is not None:
        said.append(f"The first is due {instant(survey.first_due_ms)}, the last {instant(survey.last_due_ms)}.")
    if seen.reasons:
        said.append(f"{seen.to_hold:,} of them would be held, as far as can be seen:")
        said += [f"  {count:,}, {why}" for why, count in _reasons(seen.reasons)]
    said += [f"Left where they are: {count:,} {why}." for why, count in survey.left.items()]
    return said + [f"Note: {remark}." for remark in survey.remarks]


def _reasons(reasons: Mapping[str, int]) -> list[tuple[str, int]]:
    """Pick the most frequent reasons; --json has all of them."""
    return Counter(reasons).most_common(10)


def _json_of(run: Run) -> dict[str, Any]:
    names = ("id", "source", "parameters", "phase", "staged", "parked", "held", "superseded", "who", "began_ms")
    return {name: getattr(run, name) for name in names}


def tell_report(report: ImportReport, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                **_json_of(report.run),
                "resumed": report.resumed,
                "this_time": {**report.this_time, "already_committed": report.again},
                "seconds": round(report.seconds, 3),
                "left": report.left,
                "held_because": report.reasons,
                "doubts": report.doubts,
            }
        )
        return
    run, (parked, held, superseded) = report.run, report.this_time.values()
    whole = f" ({run.parked:,} and {run.held:,} altogether)" if report.resumed else ""
    rate = f", {(parked + held) / report.seconds:,.0f}/s" if report.seconds else ""
    click.echo(f"Import {run.id} is done: {parked:,} parked, {held:,} held{whole}; {report.seconds:.1f} s{rate}.")
    if report.again:
        click.echo(f"{report.again:,} were committed before the interruption and only had to be removed.")
    for why, count in _reasons(report.reasons):
        note(f"Held: {count:,}, {why}.")
    if superseded:
        taken = "messages or schedules have their keys, names or ids already"
        note(f"Not imported: {superseded:,}, because {taken}. See `delayer audit-log`.")
    for why, count in report.left.items():
        note(f"Left where they are: {count:,} {why}.")
    for doubt in report.doubts:
        note(f"Note: {doubt}.")


T = TypeVar("T")
NO_STORE = (
    "no store is configured: an import keeps its state in one, in native mode too. Next: set store.url, and run "
    "`delayer db upgrade`; docs/importing.md says what stays there"
)


Make = Callable[[Settings, dict[str, Any], ImportStore], ImportSource]
"""Creates a source from its options, with the chosen messages as ``meant``. May raise ImportImpossible, SourceLost,
ValueError."""
Option = Callable[[Callable[..., Any]], Callable[..., Any]]


_OPTIONS = (
    # Not "2h from now", because a resumed run needs the same parameters as before.
    click.option("--cutoff", "cutoff_ms", callback=fixed_instant, metavar="INSTANT",
                 help="Only messages that are due then or later; the rest stay in the source. All schedules come."),
    click.option("--limit", type=click.IntRange(1), metavar="N",
                 help="Only the N messages that are due soonest. All schedules come."),
    click.option("--rewrite-destination", "rewrites", multiple=True, callback=read_as(read_rewrite),
                 metavar="EXPRESSION",
                 help="Rename destinations, and the addresses that timeouts reply to: 's/@.*//'. May be repeated."),
    click.option("--unverified", is_flag=True, help="Do not ask the broker whether the destinations exist."),
    as_json,
)  # fmt: skip


@click.group("import", short_help="Bring in messages of other systems.")
def import_() -> None:
    """Bring delayed messages that another system still holds into the store: look first (preview), then run.

    A run stages the chosen messages and commits them in batches, the soonest first. The source loses a batch only after
    its commit here. A run may be interrupted anywhere: `run` with the same parameters continues, and `abort` puts the
    rest back. Messages for missing destinations are held (`delayer held list`), and the run continues.
    docs/importing.md explains every source.

    \b
    Examples:
      delayer import jsonl preview backlog.jsonl
      delayer import jsonl run backlog.jsonl --yes
      delayer import hold-queues run --queue 'delay_*' --limit 1000
      delayer import cascade abort --kind nservicebus-v1
    """


def source(name: str, help_text: str, *options: Option) -> Callable[[Make], Make]:
    """Add `delayer import NAME preview|run|abort` for the source that the decorated function creates."""

    def add(make: Make) -> Make:
        group = import_.group(name, short_help=help_text.partition(".")[0] + ".", help=help_text)(lambda: None)
        for verb, (act, text, more) in _VERBS.items():

            def command(context: click.Context, /, act: Any = act, **given: Any) -> None:
                act(context, make, given)

            made = joined(*options, *_OPTIONS, *more)(click.pass_context(command))
            group.command(verb, help=text, short_help=text.partition(".")[0] + ".")(made)
        return make

    return add


def _run(context: click.Context, make: Make, given: dict[str, Any]) -> None:
    dry_run, yes, again = (given.pop(name) for name in ("dry_run", "yes", "again"))
    if dry_run:
        _preview(context, make, given, again)
    json = given.pop("as_json")
    if not yes:
        look = _with(context, make, dict(given), functools.partial(state_machine.preview, again=again))
        for line in lines_of(look):
            note(line)
        if look.refusal:
            raise CommandFailed(f"{look.refusal}.")
        if not confirm("Go on?" if look.unfinished else "Import?", yes=yes):
            return

    async def go(source: ImportSource, book: ImportStore, judge: Destinations) -> ImportReport:
        with progress() as say:
            return await state_machine.run(source, book, judge, whoami(), say, again=again)

    try:
        report = _with(context, make, given, go)
    except KeyboardInterrupt:
        note("Interrupted. Next: the same command, which resumes where it stopped; or `abort` in place of `run`.")
        raise
    tell_report(report, json)
    context.exit(ExitCode.DONE if report.clean else ExitCode.FOUND)


def _preview(context: click.Context, make: Make, given: dict[str, Any], again: bool = False) -> NoReturn:
    """Print the preview, and exit with the code that a run would have."""
    json = given.pop("as_json")
    seen = _with(context, make, given, functools.partial(state_machine.preview, again=again))
    tell_preview(seen, json)
    context.exit(ExitCode.DONE if seen.clean else ExitCode.FOUND)


def _abort(context: click.Context, make: Make, given: dict[str, Any]) -> None:
    json, yes = given.pop("as_json"), given.pop("yes")
    if not confirm("Abort the unfinished import?", yes=yes):
        return
    run, put_back = _with(context, make, given, lambda source, book, _: state_machine.abort(source, book))
    if json:
        print_json({**_json_of(run), "put_back": put_back})
        return
    back = "the rest is where it was" if put_back is None else f"{put_back:,} are where they were"
    click.echo(f"Import {run.id} is aborted. In the store: {counted(run.committed, 'message')}; {back}.")


def _with(
    context: click.Context,
    make: Make,
    given: dict[str, Any],
    act: Callable[[Any, ImportStore, Destinations], Awaitable[T]],
) -> T:
    """Open the store and the source, and call ``act``. Raises expected errors as CommandError."""
    settings = request_of(context).settings()
    given["meant"] = ImportSelection(*(given.pop(name) for name in ("cutoff_ms", "limit", "rewrites")))
    verified = not given.pop("unverified")
    if settings.store_url is None:
        raise Misused(NO_STORE)
    url = settings.store_url

    async def work() -> T:
        async with ImportStore.open(url) as book:
            source = make(settings, given, book)
            judge = Destinations(settings.broker_url, settings.management_url, verified=verified)
            try:
                done = await act(source, book, judge)
            finally:
                await source.close()
            for remark in judge.remarks:
                note(f"Note: {remark}.")
            return done

    with import_failures():
        return asyncio.run(work())


_VERBS: Mapping[str, tuple[Callable[..., None], str, Sequence[Option]]] = {
    "preview": (
        _preview,
        "Show messages, due instants, destinations and problems, and change nothing. Exit code 1 if a run would exit "
        "with it, as far as can be seen: messages would be held, are unreadable, or an operator has to decide.",
        (),
    ),
    "run": (
        _run,
        "Import, or go on with an import that was interrupted. Exit code 1 if messages are held, or were unreadable.",
        (
            dry_run_option,
            click.option("--again", is_flag=True, help="Import a file again; its messages are then delivered twice."),
            yes_option,
        ),
    ),
    "abort": (
        _abort,
        "End an unfinished import: committed messages stay, the others go back to the source.",
        (yes_option,),
    ),
}
