"""delayer list, show, audit-log: the store's waiting messages, one message, and the operators' changes."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from typing import Any, Final

import click
from asyncpg import Connection

from delayer.cli.errors import ExitCode
from delayer.cli.options import (
    as_json,
    ask_store,
    filter_of,
    filter_options,
    limit_option,
    messages_of,
    names_argument,
    read_as,
    request_of,
    store_url,
)
from delayer.cli.output import note, note_no_match, print_json, print_table
from delayer.config.model import Settings
from delayer.core.filters import MAX_ID, place_text, read_place
from delayer.core.message import as_text
from delayer.core.readable import format_relative_time, instant
from delayer.fields import as_json as for_programs
from delayer.format import reading
from delayer.format.reading import address
from delayer.store import waiting
from delayer.store.admin import audit_log as audit_trail
from delayer.store.admin import detail
from delayer.store.admin.detail import FoundIn, FullMessage
from delayer.store.waiting import BEGINNING, FoundPage


def say_native(settings: Settings) -> None:
    """In native mode, note the messages that these verbs cannot see."""
    if settings.mode == "native":
        note("Messages in the cascade can be counted (`delayer topology show`), but not listed, moved or cancelled.")


@click.command("list", short_help="List waiting messages, soonest first, page by page.")
@names_argument
@filter_options
@limit_option
@click.option(
    "--after", callback=read_as(read_place), metavar="PLACE", help="Begin where the previous page ended, as it says."
)
@as_json
@click.pass_context
def list_(
    context: click.Context,
    /,
    *,
    names: Sequence[str],
    limit: int,
    after: tuple[int, int] | None,
    as_json: bool,
    **given: Any,
) -> None:
    """List the waiting messages of the store, the soonest first: all, or those of these ids, or those that match a
    filter. For held messages see `delayer held list`.

    An ID is what this prints, such as id:48213@1795291200000. The part before the @ is enough, and finds a moved
    message: id: and the value of x-delayer-id. Any other text is a message_id: 5 is the message that its publisher
    called 5. To find a message_id, a command reads every message, which takes minutes in a large store.

    A page takes milliseconds without a filter, and with --delay-key or a due time. These have no index: --route,
    --exchange, --routing-key, --message-id and --header. Their page ends after 10,000 rows that do not match, and the
    next page continues there.

    \b
    Examples:
      delayer list
      delayer list --route orders.in --due-before 2h
      delayer list --header customer=4711 --json
      delayer list --after 1795291200000000.48213
      delayer list id:48213@1795291200000 id:48214@1795291200500
    """
    settings = request_of(context).settings()
    wanted = filter_of(given)
    if names and not (wanted.everything and after is None):
        raise click.UsageError("give either ids or a filter")
    url = store_url(settings)
    tokens = messages_of(url, names)

    async def look(connection: Connection) -> FoundPage:
        if tokens:
            messages, broken = await waiting.find_by_id(connection, [one for one in tokens.values() if one is not None])
            return FoundPage(messages, None, bounded=False, broken=broken)
        return await waiting.find(connection, wanted, limit, after or BEGINNING)

    found = ask_store(url, "list", look)
    there = {one.place.id for one in found.messages}
    for name in (name for name, token in tokens.items() if token is None or token.id not in there):
        note(f"{name} is not waiting. Next: `delayer show {shlex.quote(name)}`.")
    place = None if found.after is None else place_text(found.after)
    if as_json:
        print_json(
            {
                "messages": list(map(for_programs.entry, found.messages)),
                "after": place,
                "bounded": found.bounded,
                "broken_segments": list(found.broken),
            }
        )
        return
    if found.messages:
        _print_list(found)
    else:
        everything = wanted.everything and not tokens and after is None
        click.echo("No messages wait." if everything else f"No messages match{' so far' if found.bounded else ''}.")
        if not found.bounded and after is None and not wanted.everything:
            note_no_match("delayer held list")
            note("A message that was just sent by SQL appears within a second.")
    say_native(settings)
    if found.broken:
        note(f"{len(found.broken)} segments cannot be read and may hold more messages: see docs/backlog.md.")
    if found.bounded:
        note(f"The page ended at its limit of rows; there may be more. Next: the same with --after {place}.")
    elif place is not None:
        note(f"There are more. Next: the same with --after {place}.")


def _print_list(found: FoundPage) -> None:
    rows = [
        (
            one.place.token,
            instant(one.place.due_ms),
            reading.route_text(one.route, one.properties, none=""),
            address(one.to_exchange, one.to_key),
            one.size,
            as_text(reading.message_id(one.properties) or b""),
            "" if one.key is None else as_text(one.key),
            "" if one.place.segment is None else one.place.segment,
        )
        for one in found.messages
    ]
    print_table(["id", "due", "route", "to", "bytes", "message_id", "key", "segment"], rows, right=(4,))


CHECKED: Final = 1 << 20
"""Bytes of a body that `show` reads. The checksum of a longer message is not checked."""


@click.command(short_help="Show one message: where it is, and what will happen.")
@click.argument("name", metavar="ID")
@click.option("--body", "whole_body", is_flag=True, help="Write the body to stdout as it is, and nothing else.")
@as_json
@click.pass_context
def show(context: click.Context, *, name: str, whole_body: bool, as_json: bool) -> None:
    """Show a message: its properties, its headers with their types, the beginning of its body, its place, its future.

    `delayer list --help` says what an ID is. Exit code 1 if the message is not found: it was delivered, cancelled,
    replaced, refused, or never parked.

    \b
    Examples:
      delayer show id:48213@1795291200000
      delayer show id:48213 --body > order.json
      delayer show a0165a78-8d6e-4f43-a5e5-4f9a4a4e2d11
    """
    settings = request_of(context).settings()
    url = store_url(settings)
    found: FullMessage | FoundIn = FoundIn.NOWHERE
    if (token := messages_of(url, [name])[name]) is not None:
        most = detail.WHOLE if whole_body else CHECKED
        found = ask_store(url, "show", lambda connection: detail.find_message(connection, token, most))
    if isinstance(found, FoundIn):
        note(detail.describe_absence(token or name, found))
        say_native(settings)
        context.exit(ExitCode.FOUND)
    if whole_body:
        click.echo(found.entry.body, nl=False)
    elif as_json:
        print_json(for_programs.message(found))
    else:
        _print(found)


def _print(found: FullMessage) -> None:
    entry, hold = found.entry, found.held
    said = reading.decode_properties(entry.properties, whole=True)
    due_ms = entry.place.due_ms
    rows: list[tuple[object, ...]] = [
        ("id", entry.place.token),
        ("where", for_programs.standing(found)),
        ("due", f"{instant(due_ms)}, {format_relative_time(due_ms, time.time_ns() // 1_000_000)}"),
        ("will happen", detail.predict(found)),
        *([("parked", instant(entry.parked_ms))] if hold is None else []),
        ("came in at", address(entry.exchange, entry.routing_key)),
        ("route", reading.route_text(entry.route, entry.properties, none='"" (straight to the queue)')),
    ]
    if hold is not None:
        rows.append(("held", f"since {instant(hold.held_ms)}, attempts: {hold.attempts}, reason: {hold.reason}"))
    if entry.key is not None:
        rows.append(("key", as_text(entry.key)))
    if said.broken:
        rows.append(("not readable", said.broken))
    rows += [(name, value) for name, value in said.properties.items()]
    print_table(["", ""], rows)
    if said.headers:
        click.echo()
        print_table(["header", "type", "value"], said.headers)
    more = f", the first {reading.PREVIEW}" if entry.size > reading.PREVIEW else ""
    click.echo(f"\nbody: {entry.size} bytes{more}")
    for line in reading.preview(entry.body).splitlines():
        # A message must not be able to control the terminal.
        click.echo("".join(one if one.isprintable() or one == "\t" else f"\\x{ord(one):02x}" for one in line))


@click.command("audit-log", short_help="Show the changes that operators made: who, when, what, how many.")
@limit_option
@click.option("--before", type=click.IntRange(1, MAX_ID), metavar="NUMBER", help="Entries before this one.")
@as_json
@click.pass_context
def audit_log(context: click.Context, *, limit: int, before: int | None, as_json: bool) -> None:
    """Show the audit log, the latest entry first: every cancel, reschedule, retry, drop, drain, import
    and change of a schedule.

    An interrupted command is in the log with the number of messages that it reached.

    \b
    Examples:
      delayer audit-log
      delayer audit-log --limit 5 --json
    """
    url = store_url(request_of(context).settings())
    found = ask_store(url, "audit-log", lambda connection: audit_trail.list_entries(connection, limit, before))
    if as_json:
        print_json([one._asdict() for one in found])
        return
    rows = [(one.id, instant(one.at_ms), one.who, one.verb, one.messages, one.asked) for one in found]
    if rows:
        print_table(["", "when", "who", "command", "messages", "arguments"], rows, right=(0, 4))
    else:
        click.echo("The audit log is empty.")
