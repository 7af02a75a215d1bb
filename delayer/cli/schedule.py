"""delayer schedule: messages that recur, and every change of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import IO, Any, Final

import click
from asyncpg import Connection

from delayer.cli import schedule_looking
from delayer.cli.errors import Misused
from delayer.cli.options import as_json, joined, pair, whoami
from delayer.cli.output import note, print_json, progress, when
from delayer.cli.schedule_importing import import_
from delayer.cli.schedule_looking import change, list_held, name_argument, state_of
from delayer.config.texts import typed_header
from delayer.core.filters import Token
from delayer.core.readable import readable
from delayer.fields import as_json as for_programs
from delayer.fields.schedules import (
    differences,
    mistakes,
    new_schedule,
    read_fields,
    read_schedules,
    texts_of,
    with_fields,
)
from delayer.schedule.record import ScheduleRecord
from delayer.schedule.rhythm import rhythm_in_words
from delayer.schedule.schedule import Schedule, ScheduleState
from delayer.store import held_messages
from delayer.store.errors import ScheduleRefused
from delayer.store.schedules import changes, reading
from delayer.store.schedules.changes import ScheduleDifference

of_one = joined(name_argument, as_json, click.pass_context)
"""The parameters of a command for one schedule."""


def tell(past: str, record: ScheduleRecord, *, as_json: bool) -> None:
    """Report the result of a change of a schedule."""
    if as_json:
        print_json(for_programs.schedule(record))
        return
    schedule = record.schedule
    text = f"{past} {schedule.name}: {rhythm_in_words(schedule.rhythm)}"
    if record.due_ms is not None:
        click.echo(f"{text}; next: {when(record.due_ms)}.")
    else:
        click.echo(f"{text}; {state_of(record)}.")


@click.group(short_help="Send messages that recur, by a calendar or an interval.")
def schedule() -> None:
    """Messages that recur, by a cron expression in a time zone, or at an interval. Schedules need a store.

    The next occurrence of a schedule is a waiting message: `delayer list --delay-key delayer.schedule/NAME` has it. It
    is delivered like any other, even if the host that sent the last one dies. docs/schedules.md explains clocks, missed
    occurrences, and files for `apply`.
    """


for _command in (schedule_looking.list_, schedule_looking.show, schedule_looking.preview, import_):
    schedule.add_command(_command)


def _field(name: str, metavar: str, text: str) -> Callable[..., Any]:
    return click.option(f"--{name.replace('_', '-')}", name, metavar=metavar, help=text)


field_options = joined(
    _field("cron", "EXPRESSION", "Five fields, six with seconds first, or @daily and the like."),
    _field("zone", "ZONE", "The zone of the cron expression, such as Europe/Berlin. [default: UTC]"),
    _field("every", "DURATION", "An interval from 1s, such as 15m, counted from --first."),
    _field("first", "INSTANT", "No occurrence is earlier. Intervals count from here, else from 1970-01-01."),
    _field("last", "INSTANT", "No occurrence is later; never for no last one."),
    _field("to", "EXCHANGE", 'The exchange of the messages; "" stands for a queue by its name.'),
    _field("routing_key", "KEY", "Their routing key, or the name of the queue."),
    _field("body", "TEXT", "Their body."),
    click.option("--body-file", type=click.File("rb"), help="Their body from a file; - is stdin."),
    click.option(
        "--header", "headers", multiple=True, metavar="NAME[:TYPE]=VALUE",
        help="A header, as in `delayer send`. May be repeated.",
    ),
    click.option(
        "--property", "properties", multiple=True, metavar="NAME=VALUE",
        help="A property such as content_type or priority; none if VALUE is empty. May be repeated.",
    ),
    _field("catch_up", "POLICY", "Late occurrences to send: skip, once, all (1,000), or a number. [default: once]"),
    _field("jitter", "DURATION", "Each occurrence is later by a part of this, which spreads a load."),
    _field("max", "NUMBER", "End after this many occurrences; 0 for no end."),
)  # fmt: skip


def _read(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The fields that were given, and what is wrong with the others (read_fields)."""
    file: IO[bytes] | None = options.pop("body_file")
    table = {name: value for name, value in options.items() if value not in (None, ())}
    wrong: dict[str, str] = {}
    for name, read in (("headers", typed_header), ("properties", partial(pair, expected="NAME=VALUE"))):
        try:
            if name in table:
                table[name] = dict(map(read, table[name]))
        except (ValueError, click.BadParameter) as error:
            wrong[name] = str(error)
            del table[name]
    given, unread = read_fields(table)
    if file is not None and "body" in table:
        unread["body"] = "expected --body or --body-file, found both"
    elif file is not None:
        given["body"] = file.read()
    return given, unread | wrong


@schedule.command(short_help="Add a schedule: its rhythm, and its message.")
@click.argument("name")
@field_options
@click.option("--paused", is_flag=True, help="Add it without an occurrence, until `resume`.")
@as_json
@click.pass_context
def add(context: click.Context, /, *, name: str, paused: bool, as_json: bool, **options: Any) -> None:
    """Add a schedule: a rhythm by --cron or --every, and the message that it sends. Exit code 2 if something is wrong
    with it, or if the name is taken.

    The message goes to the exchange of --to, as the daemon's user. Each occurrence has its own message_id, and the
    headers x-delayer-schedule, x-delayer-id and x-delayer-due.

    \b
    Examples:
      delayer schedule add tick --every 1s --to delayer.out --routing-key k --body tick
      delayer schedule add report --cron '0 7 * * MON-FRI' --zone Europe/Berlin --to delayer.out --routing-key report
      delayer schedule add month-end --cron '0 18 LW * *' --to '' --routing-key invoices --catch-up all
    """
    one = new_schedule(name, *_read(options))
    record = change(context, "add", lambda connection: changes.add(connection, one, paused=paused, who=whoami()))
    tell("Added", record, as_json=as_json)


@schedule.command(short_help="Change the fields of a schedule.")
@name_argument
@field_options
@as_json
@click.pass_context
def edit(context: click.Context, /, *, name: str, as_json: bool, **options: Any) -> None:
    """Change the given fields; the rest stay. Any --header replaces the whole table of headers.

    The waiting occurrence is written again, with the new message. If the rhythm changes, so does its time, unless that
    has come already. A paused schedule stays paused.

    \b
    Examples:
      delayer schedule edit report --cron '30 6 * * MON-FRI'
      delayer schedule edit report --last never --jitter 5m --header kind=daily
    """
    given, unread = _read(options)
    if unread:
        raise ScheduleRefused(mistakes(unread))
    if not given:
        raise click.UsageError("expected a field to change, such as --cron or --body; found none")
    record = change(
        context,
        "edit",
        lambda connection: changes.edit(connection, name, lambda one: with_fields(one, given), who=whoami()),
    )
    tell("Changed", record, as_json=as_json)


@schedule.command(short_help="Make the schedules equal to a TOML file.")
@click.argument("file", type=click.Path(allow_dash=True))
@click.option("--dry-run", is_flag=True, help="Print the difference, and change nothing.")
@click.option("--prune", is_flag=True, help="Remove the schedules that are not in the file.")
@as_json
@click.pass_context
def apply(context: click.Context, *, file: str, dry_run: bool, prune: bool, as_json: bool) -> None:
    """Make the schedules of the store equal to a TOML file: all of it, or nothing. FILE may be - for stdin.

    The file has a table [schedule.NAME] for each, with the fields that `add` has as options: cron or every, zone,
    first, last, to, routing_key, headers and properties (tables), body or body_b64, catch_up, jitter, max. A field that
    is left out has its default. A schedule that is paused stays paused, and one that failed or ended is named.
    Without --prune, others stay as they are.

    \b
    Examples:
      delayer schedule apply schedules.toml --dry-run
      delayer schedule apply schedules.toml --prune
    """
    try:
        with click.open_file(file, "rb") as content:
            wanted = read_schedules(content.read())
    except OSError as error:
        raise Misused(f"{file}: expected a file that can be read, found {error.strerror}") from None
    except ScheduleRefused as refused:
        raise ScheduleRefused([f"{file}: {one}" for one in refused.problems]) from None
    if prune and not wanted:
        raise Misused(f"{file}: expected a schedule, found none; --prune would remove every schedule of the store")

    async def applied(connection: Connection) -> tuple[ScheduleDifference, int]:
        held = await held_messages.count_by_schedule(connection) if prune else {}
        found = await changes.apply(connection, wanted, who=whoami(), prune=prune, dry_run=dry_run)
        return found, sum(held.get(one.name, 0) for one in found.removed)

    with progress("applying"):
        found, held = change(context, "apply", applied)
    if as_json:
        print_json(_for_programs(found, held, dry_run=dry_run))
        return
    _print(found, dry_run=dry_run)
    if held:
        note(f"Held messages of removed schedules remain: {held:,}. Next: `delayer held list`.")


@schedule.command(short_help="Stop a schedule until it is resumed.")
@of_one
def pause(context: click.Context, *, name: str, as_json: bool) -> None:
    """Stop a schedule until `resume`: its waiting occurrence is cancelled, and none counts as missed.

    \b
    Examples:
      delayer schedule pause report
    """
    _change_state(context, "pause", "Paused", name, changes.pause, as_json=as_json)


@schedule.command(short_help="Resume a paused or failed schedule.")
@of_one
def resume(context: click.Context, *, name: str, as_json: bool) -> None:
    """Resume a paused or failed schedule with the first time of its rhythm after now.

    \b
    Examples:
      delayer schedule resume report
    """
    _change_state(context, "resume", "Resumed", name, changes.resume, as_json=as_json)


def _change_state(
    context: click.Context,
    doing: str,
    past: str,
    name: str,
    act: Callable[..., Awaitable[ScheduleRecord]],
    *,
    as_json: bool,
) -> None:
    async def changed(connection: Connection) -> tuple[ScheduleRecord | None, ScheduleRecord]:
        return await reading.get(connection, name), await act(connection, name, who=whoami())

    before, record = change(context, doing, changed)
    if before is not None and before.state is record.state and not as_json:
        click.echo(f"{name} is {record.state} already.")
    else:
        tell(past, record, as_json=as_json)


@schedule.command(short_help="Delete a schedule.")
@of_one
def remove(context: click.Context, *, name: str, as_json: bool) -> None:
    """Delete a schedule with its waiting occurrence. Its messages that are held or were rescheduled stay.

    \b
    Examples:
      delayer schedule remove report
    """
    held = change(context, "remove", partial(changes.remove, name=name, who=whoami()))
    if as_json:
        print_json({"removed": name, "held": held})
        return
    click.echo(f"Removed {name}.")
    if held:
        note(f"Held messages of it remain: {held:,}. Next: {list_held(name)}.")


@schedule.command(short_help="Send one more message of a schedule now.")
@of_one
def run(context: click.Context, *, name: str, as_json: bool) -> None:
    """Send one more message of a schedule now, in any state. Its rhythm does not change.

    \b
    Examples:
      delayer schedule run report
    """
    id_ = change(context, "run", lambda connection: changes.run_now(connection, name, who=whoami()))
    if as_json:
        print_json({"id": str(Token(id_))})
    else:
        click.echo(f"Parked one message of {name}, due now: {Token(id_)}.")


def _print(found: ScheduleDifference, *, dry_run: bool) -> None:
    for one in found.added:
        click.echo(f"+ {one.name}: {rhythm_in_words(one.rhythm)}")
    for before, after in found.changed:
        click.echo(f"~ {before.name}")
        for name, old, new in differences(before, after):
            click.echo(readable(f"    {name}: {old} → {new}"))
    for one in found.removed:
        click.echo(f"- {one.name}: {rhythm_in_words(one.rhythm)}")
    counts = f"{len(found.added):,} added, {len(found.changed):,} changed, {len(found.removed):,} removed"
    click.echo(f"{'Would be: ' if dry_run else ''}{counts}; {len(found.same):,} as they were.")
    for record in _stopped(found):
        note(readable(f"{record.name} is {state_of(record)}. Next: {_NEXT[record.state].format(record.name)}."))


_NEXT: Final = {
    ScheduleState.FAILED: "correct that; then `delayer schedule resume {}`",
    ScheduleState.ENDED: "if it shall go on, change its last or its max in the file; else remove it",
}


def _stopped(found: ScheduleDifference) -> list[ScheduleRecord]:
    """The unchanged schedules that send nothing, and that no operator paused."""
    return [record for record in found.same if record.state in _NEXT]


def _for_programs(found: ScheduleDifference, held: int, *, dry_run: bool) -> dict[str, Any]:
    def fields(one: Schedule) -> dict[str, Any]:
        return {"name": one.name, **texts_of(one)}

    return {
        "dry_run": dry_run,
        "added": list(map(fields, found.added)),
        "changed": [
            {"name": before.name, "fields": [*map(list, differences(before, after))]} for before, after in found.changed
        ],
        "removed": [one.name for one in found.removed],
        "held": held,
        "same": [one.name for one in found.same],
        "stopped": [{"name": one.name, "state": one.state.value, "why": one.why} for one in _stopped(found)],
    }
