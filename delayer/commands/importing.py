"""delayer import: what older systems still hold, into this one. For each source: preview, run and abort."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import click

from delayer.commands.errors import DONE, FOUND, Misused, Off
from delayer.commands.import_run import cascade_book, failure_of, few_collections, into_of
from delayer.commands.import_words import lines_of, tell_aborted, tell_preview, tell_report
from delayer.commands.options import agreed, as_json, instant_ms, request_of, whoami, yes_option
from delayer.commands.output import note
from delayer.commands.progress import progress
from delayer.core.importing import Meant, NotARewrite, Rewrite, read_rewrite
from delayer.legacy import machine
from delayer.legacy.destinations import Destinations
from delayer.legacy.machine import Preview, Report
from delayer.legacy.ports import CountMismatch, ImportImpossible, Source, SourceLost
from delayer.settings import Settings
from delayer.store.importing import ImportBusy, ImportStore

T = TypeVar("T")
NO_STORE = (
    "no store is configured: an import keeps its state in one, in native mode too. Next: set store.url, and run "
    "`delayer db upgrade`; docs/importing.md says what stays there"
)


class Wanted(NamedTuple):
    """What every source is told: the settings, which messages are meant, and how destinations are renamed."""

    settings: Settings
    meant: Meant
    rewrites: Sequence[Rewrite]


Make = Callable[[Wanted, dict[str, Any], ImportStore], Source]
"""Makes a source of its own options. May raise ImportImpossible, SourceLost, ValueError."""
Option = Callable[[Callable[..., Any]], Callable[..., Any]]


def _cutoff(_context: click.Context, _option: click.Parameter, text: str | None) -> int | None:
    if text is None:
        return None
    found = instant_ms(text)
    if found is None:
        # Not "2h from now": a run that is resumed must say the same as before.
        raise click.BadParameter(
            f"expected an instant with its offset, such as 2031-01-31T08:00:00Z, or a date (in UTC), found {text!r}"
        )
    return found


def rewrites_of(_context: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> tuple[Rewrite, ...]:
    """What an option of expressions says."""
    try:
        return tuple(map(read_rewrite, given))
    except NotARewrite as error:
        raise click.BadParameter(f"expected {error}") from None


_OPTIONS = (
    click.option("--cutoff", "cutoff_ms", callback=_cutoff, metavar="INSTANT",
                 help="Only what is due then or later; the rest is left where it is."),
    click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the N that are due soonest."),
    click.option("--rewrite-destination", "rewrites", multiple=True, callback=rewrites_of, metavar="EXPRESSION",
                 help="Rename destinations, as sed does: 's/@.*//'. May be repeated."),
    click.option("--unverified", is_flag=True, help="Do not ask the broker whether the destinations exist."),
    as_json,
)  # fmt: skip


@click.group("import", short_help="Bring in what older systems still hold.")
def import_() -> None:
    """Bring delayed messages that another system still holds into the store: look first (preview), then run.

    A run stages what is meant and commits it in batches, the soonest due first; the source loses a batch only when it
    is committed here. It may be interrupted anywhere: `run` with the same parameters goes on, `abort` puts the rest
    back. Messages for destinations that do not exist are held (`delayer held list`), and stop nothing.
    docs/importing.md has a page for every source.

    \b
    Examples:
      delayer import jsonl preview backlog.jsonl
      delayer import jsonl run backlog.jsonl --yes
      delayer import hold-queues run --queue 'delay_*' --limit 1000
      delayer import cascade abort --kind nservicebus-v1
    """


def source(name: str, help_text: str, options: Sequence[Option], make: Make) -> None:
    """Add `delayer import NAME preview|run|abort`."""

    @import_.group(name, short_help=help_text.partition(".")[0] + ".", help=help_text)
    def group() -> None: ...

    def command(verb: str, text: str, *more: Option) -> Callable[[Callable[..., Any]], None]:
        def add(act: Callable[..., Any]) -> None:
            @functools.wraps(act)
            def wrapped(context: click.Context, /, **given: Any) -> None:
                act(context, make, given)

            made: Callable[..., Any] = click.pass_context(wrapped)
            every: tuple[Option, ...] = (*options, *_OPTIONS, *more)
            for option in reversed(every):
                made = option(made)
            group.command(verb, help=text, short_help=text.partition(".")[0] + ".")(made)

        return add

    command(
        "preview",
        "Look, and change nothing: how many, when due, for whom, and what would be held. Exit code 1 where a run would "
        "end with it, as far as can be seen: something would be held, or cannot be read, or a person has to decide.",
    )(_preview)
    command(
        "run",
        "Import, or go on with an import that was interrupted. Exit code 1 if something is held, or could not be read.",
        click.option(
            "--into",
            type=click.Choice(("store", "cascade")),
            help="Where the messages wait from then on. [default: by the mode: store, or in native mode cascade]",
        ),
        click.option("--dry-run", is_flag=True, help="Say what would be done, and change nothing: as preview does."),
        click.option("--again", is_flag=True, help="Also a file that was brought before: its messages come twice."),
        yes_option,
    )(_run)
    command(
        "abort", "End an unfinished import: what is committed stays, the rest goes back to where it was.", yes_option
    )(_abort)


def _preview(context: click.Context, make: Make, given: dict[str, Any]) -> None:
    json = given.pop("as_json")
    _tell(context, _with(context, make, given, machine.preview), json)


def _run(context: click.Context, make: Make, given: dict[str, Any]) -> None:
    json, dry_run, yes, again = (given.pop(name) for name in ("as_json", "dry_run", "yes", "again"))
    settings = request_of(context).settings()
    told_into = given.pop("into")
    if dry_run or not yes:
        look = _with(context, make, dict(given), functools.partial(machine.preview, again=again))
        if dry_run:
            _tell(context, look, json)
        for line in lines_of(look):
            note(line)
        if look.refusal:
            raise Off(f"{look.refusal}.")
        if not agreed("Go on?" if look.unfinished else "Import?", yes=yes):
            note("Nothing was done.")
            return

    async def go(source: Source, book: ImportStore, judge: Destinations) -> Report:
        into = into_of(await book.unfinished(), told_into, settings)
        with few_collections(), progress() as say:
            if into == "store":
                return await machine.run(source, book, judge, whoami(), say, again=again)
            async with cascade_book(settings, source, book) as carrying:
                return await machine.run(source, carrying, judge, whoami(), say, again=again)

    try:
        report = _with(context, make, given, go)
    except KeyboardInterrupt:
        note("Interrupted. Next: the same command, which goes on where it stopped; or `abort` in place of `run`.")
        raise
    tell_report(report, json)
    context.exit(DONE if report.clean else FOUND)


def _tell(context: click.Context, seen: Preview, as_json: bool) -> NoReturn:
    """What a look found, and whether it found something that a run would tell of by its exit code."""
    tell_preview(seen, as_json)
    context.exit(DONE if seen.clean else FOUND)


def _abort(context: click.Context, make: Make, given: dict[str, Any]) -> None:
    json, yes = given.pop("as_json"), given.pop("yes")
    if not agreed("Abort the unfinished import?", yes=yes):
        note("Nothing was done.")
        return
    done = _with(context, make, given, lambda source, book, _: machine.abort(source, book))
    tell_aborted(done, json)


def _with(
    context: click.Context,
    make: Make,
    given: dict[str, Any],
    act: Callable[[Any, ImportStore, Destinations], Awaitable[T]],
) -> T:
    """Open the store and the source, and do it; expected errors with their exit codes."""
    settings = request_of(context).settings()
    meant = Meant(given.pop("cutoff_ms"), given.pop("limit"))
    wanted = Wanted(settings, meant, given.pop("rewrites"))
    verified = not given.pop("unverified")
    if settings.store_url is None:
        raise Misused(NO_STORE)
    url = settings.store_url

    async def work() -> T:
        async with ImportStore.open(url) as book:
            source = make(wanted, given, book)
            judge = Destinations(settings.broker_url, settings.management_url, verified=verified)
            try:
                done = await act(source, book, judge)
            finally:
                await source.close()
            for remark in judge.remarks:
                note(f"Note: {remark}.")
            return done

    try:
        return asyncio.run(work())
    except (SourceLost, ImportImpossible, CountMismatch, ImportBusy) as error:
        raise failure_of(error) from error
