"""delayer schedule list, show, preview: schedules, one of them, and its next times. And what all commands of schedules
share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final, TypeVar

import click
from asyncpg import Connection

from delayer.cli.errors import CommandFailed, Misused
from delayer.cli.options import as_json, ask_store, limit_option, read_as, request_of
from delayer.cli.output import note, print_json, print_table, when
from delayer.core.filters import Token
from delayer.core.readable import duration, format_relative_time, instant, readable
from delayer.fields import as_json as for_programs
from delayer.fields.schedules import name_of, name_or_none, texts_of
from delayer.fields.shapes import TimeJson
from delayer.schedule.cron import BadCron
from delayer.schedule.record import ScheduleRecord
from delayer.schedule.rhythm import rhythm_in_words
from delayer.schedule.schedule import ScheduleState
from delayer.schedule.wall import UnknownZone
from delayer.store import held_messages
from delayer.store.admin.actions import change_connection
from delayer.store.errors import ScheduleUnknown
from delayer.store.schedules import reading
from delayer.store.schedules.reading import SchedulePage

T = TypeVar("T")
MOST: Final = 10_000
"""Maximum number of times that `preview` prints."""
name_argument = click.argument("name", metavar="NAME", callback=read_as(name_of))
"""The name of a schedule that there is."""


def url_of_schedules(context: click.Context) -> str:
    """The store's URL. Raises Misused without a store."""
    settings = request_of(context).settings()
    if settings.store_url is None:
        raise Misused(
            "schedules need a store, and none is configured. Next: set store.url (docs/schedules.md); without a store, "
            "a message cannot recur."
        )
    return settings.store_url


def change(context: click.Context, doing: str, act: Callable[[Connection], Awaitable[T]]) -> T:
    """Run one change on the store. Raises ScheduleRefused, StoreLost, BadStoreUrl, SchemaOutdated."""
    url = url_of_schedules(context)

    async def acted() -> T:
        async with change_connection(url, doing) as connection:
            return await act(connection)

    return asyncio.run(acted())


async def _read(connection: Connection, name: str) -> ScheduleRecord:
    """Read a schedule. Raises ScheduleUnknown, the driver's errors."""
    if (found := await reading.get(connection, name)) is None:
        raise ScheduleUnknown(name)
    return found


def state_of(record: ScheduleRecord) -> str:
    return f"{record.state}{f': {record.why}' if record.why else ''}"


@click.command("list", short_help="List schedules by name, page by page.")
@limit_option
@click.option("--after", default="", callback=read_as(name_or_none), metavar="NAME", help="Begin after this name.")
@click.option("--state", type=click.Choice(list(map(str, ScheduleState))), help="Only those in this state.")
@as_json
@click.pass_context
def list_(context: click.Context, *, limit: int, after: str, state: str | None, as_json: bool) -> None:
    """List schedules in the order of their names: the rhythm, the next occurrence, how late the last one was.

    \b
    Examples:
      delayer schedule list
      delayer schedule list --state failed
      delayer schedule list --json | jq -r '.schedules[] | [.name, .next_ms] | @tsv'
    """
    wanted = None if state is None else ScheduleState(state)

    async def look(connection: Connection) -> tuple[SchedulePage, dict[str, int]]:
        found = await reading.find(connection, limit, after, wanted)
        return found, await held_messages.count_by_schedule(connection)

    page, held = ask_store(url_of_schedules(context), "list schedules", look)
    if as_json:
        print_json({"schedules": [for_programs.schedule(one, held) for one in page.schedules], "after": page.after})
        return
    if not page.schedules:
        click.echo("No schedules match." if state or after else "There are no schedules.")
        return
    columns = ["name", "state", "rhythm", "next due", "last sent", "late by", "sent", "missed", "held"]
    print_table(columns, [_row(one, held) for one in page.schedules], right=(6, 7, 8))
    if page.after is not None:
        note(f"There are more. Next: the same with --after {page.after}.")


def _row(record: ScheduleRecord, held: Mapping[str, int]) -> tuple[object, ...]:
    return (
        record.name,
        state_of(record),
        rhythm_in_words(record.schedule.rhythm),
        when(record.due_ms),
        instant(record.made_ms),
        duration(None if record.late_ms is None else max(0, record.late_ms) / 1000),
        f"{record.made:,}",
        f"{record.missed:,}",
        f"{held.get(record.name, 0):,}",
    )


@click.command(short_help="Show one schedule.")
@name_argument
@as_json
@click.pass_context
def show(context: click.Context, *, name: str, as_json: bool) -> None:
    """Show one schedule: its fields, its state, its waiting occurrence. Exit code 1 if there is none of this name.

    \b
    Examples:
      delayer schedule show report
      delayer schedule show report --json | jq -r .next_message
    """

    async def look(connection: Connection) -> tuple[ScheduleRecord, dict[str, int]]:
        return await _read(connection, name), await held_messages.count_by_schedule(connection)

    record, held = ask_store(url_of_schedules(context), "show a schedule", look)
    if as_json:
        print_json(for_programs.schedule(record, held))
        return
    rows: list[tuple[object, ...]] = [
        ("name", name),
        ("state", state_of(record)),
        ("rhythm", rhythm_in_words(record.schedule.rhythm)),
        ("next due", when(record.due_ms)),
    ]
    if record.waiting_id is not None:
        rows.append(("waits as", Token(record.waiting_id, record.due_ms)))
    late = duration(None if record.late_ms is None else max(0, record.late_ms) / 1000)
    rows += [
        ("last sent", f"{when(record.made_ms)}, late by {late}" if record.made_ms is not None else _none_sent(record)),
        ("sent", f"{record.made:,}"),
        ("missed", f"{record.missed:,}"),
        ("held", _held_in_words(name, held.get(name, 0))),
        ("added", instant(record.added_ms)),
        ("changed", instant(record.changed_ms)),
    ]
    print_table(["", ""], [*rows, *texts_of(record.schedule).items()])


def _none_sent(record: ScheduleRecord) -> str:
    """`sent` counts held occurrences too."""
    return "– (held)" if record.made else "–"


def list_held(name: str) -> str:
    """The command that lists the held messages of a schedule."""
    return f"`delayer held list --header x-delayer-schedule={name}`"


def _held_in_words(name: str, number: int) -> str:
    return f"{number:,}{f': {list_held(name)} says why' if number else ''}"


@click.command(short_help="Print the next times of a schedule.")
@name_argument
@click.option(
    "--count", "-n", type=click.IntRange(1, MOST), default=5, show_default=True, help="How many times to print."
)
@as_json
@click.pass_context
def preview(context: click.Context, *, name: str, count: int, as_json: bool) -> None:
    """Print the next times of a schedule, in its zone and in UTC, and the distance from each to the one before.

    The distance shows the nights when the clocks change. Times are computed with the zone data of this host. For a
    paused schedule, these are the times after a resume now. --jitter is not included.

    \b
    Examples:
      delayer schedule preview report
      delayer schedule preview report --count 400 --json
    """
    record = ask_store(url_of_schedules(context), "preview a schedule", partial(_read, name=name))
    try:
        found = for_programs.times(record, time.time_ns() // 1_000_000, count)
    except (BadCron, UnknownZone) as wrong:
        raise CommandFailed(f"{name} cannot be computed: {wrong}.") from None
    times = found["times"]
    if as_json:
        print_json(found)
        return
    click.echo(f"{name}: {found['rhythm']}")
    if not times:
        click.echo(f"No time follows: {readable(state_of(record))}.")
        return
    rows = [_previewed(one) for one in times]
    if found["zone"] == "UTC":
        print_table(["UTC", "after"], [row[1:] for row in rows], right=(1,))
    else:
        print_table([found["zone"], "UTC", "after"], rows, right=(2,))
    if record.state is ScheduleState.PAUSED:
        note(f"It is paused. Next: `delayer schedule resume {name}`.")
    if len(times) < count:
        note("No other time follows.")


def _previewed(one: TimeJson) -> tuple[str, str, str]:
    gap = "" if one["after_ms"] is None else format_relative_time(one["after_ms"], 0).removeprefix("in ")
    return one["local"], one["utc"], gap
