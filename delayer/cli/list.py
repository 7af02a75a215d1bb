"""delayer list, show, audit-log: the waiting messages of the store, one message, and the changes of operators."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import asyncpg
import click

from delayer.amqp import reading
from delayer.amqp.reading import address, iso
from delayer.cli.errors import ExitCode, Misused
from delayer.cli.options import (
    as_json,
    ask_store,
    filter_of,
    filter_options,
    limit_option,
    request_of,
    store_url,
    tokens,
)
from delayer.cli.output import note, print_json, print_table
from delayer.config.model import Settings
from delayer.core.filters import MAX_ID, Token, read_token
from delayer.core.readable import away
from delayer.store.admin import audit_log as audit_trail
from delayer.store.admin import detail, listing
from delayer.store.admin.detail import FoundIn, FullMessage
from delayer.store.admin.listing import BEGINNING, Entry


def json_of(entry: Entry) -> dict[str, Any]:
    """One entry of a list, for programs."""
    said = reading.read(entry.properties)
    return {
        "id": str(entry.place.token),
        "due_ms": entry.place.due_us // 1000,
        "parked_ms": entry.parked_ms,
        "lane": entry.place.lane,
        "segment": entry.place.segment,
        "route": reading.text(entry.route),
        "exchange": reading.text(entry.exchange),
        "routing_key": reading.text(entry.routing_key),
        "to_exchange": reading.text(entry.to_exchange),
        "to_key": reading.text(entry.to_key),
        "key": None if entry.key is None else reading.text(entry.key),
        "body_bytes": entry.size,
        "properties": said.properties,
        "headers": [one._asdict() for one in said.headers],
        "broken": said.broken or None,
    }


def say_native(settings: Settings) -> None:
    """Tell a user of native mode about the messages that these verbs cannot see."""
    if settings.mode == "native":
        note("Messages in the cascade can be counted (`delayer topology show`), but not listed, moved or cancelled.")


@click.command("list", short_help="List waiting messages, soonest first, page by page.")
@tokens
@filter_options
@limit_option
@click.option("--after", metavar="ID", help="Begin after this message, the last one of the previous page.")
@as_json
@click.pass_context
def list_(
    context: click.Context, /, *, tokens: Sequence[Token], limit: int, after: str | None, as_json: bool, **given: Any
) -> None:
    """List the waiting messages of the store, the soonest first: rows, and messages in segments. List all of them,
    or those of these ids, or those that match a filter.

    A page takes milliseconds without a filter, and with --key or a due time. These have no index: --route, --to,
    --to-key and --header. Their page ends after 10,000 rows that do not match, and the next page goes on there. For
    held messages see `delayer held list`.

    \b
    Examples:
      delayer list
      delayer list --route orders.in --due-before 2h
      delayer list --header customer=4711 --json
      delayer list --after 48213@1795291200000
      delayer list 48213@1795291200000 48214@1795291200500
    """
    settings = request_of(context).settings()
    wanted = filter_of(given)
    if tokens and not (wanted.everything and after is None):
        raise click.UsageError("give either ids or a filter")
    begin = _behind(after)

    async def look(connection: asyncpg.Connection) -> tuple[listing.FoundPage, list[Entry]]:
        if tokens:
            entries, broken = await listing.named(connection, tokens)
            return listing.FoundPage([one.place for one in entries], {}, None, bounded=False, broken=broken), entries
        found = await listing.find(connection, wanted, reading.header_test(wanted), limit, begin)
        return found, await listing.entries(connection, found)

    found, entries = ask_store(store_url(settings), "list", look)
    there = {one.place.id for one in entries}
    for token in {token.id: token for token in tokens if token.id not in there}.values():
        note(f"{token} is not waiting. Next: `delayer show {token}`.")
    token_after = None if found.after is None else _token_of(found.after)
    if as_json:
        print_json(
            {
                "messages": [json_of(entry) for entry in entries],
                "after": token_after,
                "bounded": found.bounded,
                "broken_segments": list(found.broken),
            }
        )
        return
    rows = [
        (
            one.place.token,
            iso(one.place.due_us // 1000),
            reading.text(one.route),
            address(one.to_exchange, one.to_key),
            one.size,
            "" if one.key is None else reading.text(one.key),
            "" if one.place.segment is None else one.place.segment,
        )
        for one in entries
    ]
    if rows:
        print_table(["id", "due", "route", "to", "bytes", "key", "segment"], rows, right=(4,))
    else:
        click.echo("No messages match." if not found.bounded else "No messages match so far.")
    say_native(settings)
    if found.broken:
        note(f"{len(found.broken)} segments cannot be read and may hold more messages: see docs/backlog.md.")
    if found.bounded:
        note(f"The page ended at its limit of rows; there may be more. Next: the same with --after {token_after}.")
    elif token_after is not None:
        note(f"There are more. Next: the same with --after {token_after}.")


def _behind(after: str | None) -> tuple[int, int]:
    """A place (microseconds, id). An id has whole milliseconds, so its message may be up to one millisecond later."""
    if after is None:
        return BEGINNING
    try:
        due, dot, number = after.partition(".")
        if dot:
            return int(due), int(number)
        token = read_token(after)
    except ValueError as error:
        raise Misused(f"--after: expected {error}, found {after!r}") from None
    if token.due_ms is None:
        raise Misused("--after: expected an id with its due instant, such as 48213@1795291200000")
    return token.due_ms * 1000, token.id


def _token_of(after: tuple[int, int]) -> str:
    """The place where the next page begins. No id stands for a place between two milliseconds, or behind rows without a
    match."""
    due_us, number = after
    if due_us % 1000 or number == MAX_ID:
        return f"{due_us}.{number}"
    return str(Token(number, due_us // 1000))


@click.command(short_help="Show one message: where it is, and what will happen.")
@click.argument("token", metavar="ID")
@click.option("--body", "whole_body", is_flag=True, help="Write the body to stdout as it is, and nothing else.")
@as_json
@click.pass_context
def show(context: click.Context, *, token: str, whole_body: bool, as_json: bool) -> None:
    """Show a message: its properties, its headers with their types, the beginning of its body, its place, its future.

    The ID is that of `delayer list`, such as 48213@1795291200000. The part before the @ is enough, and finds a moved
    message. It reads the index of every partition: a second or more with ten million waiting messages.
    Exit code 1 if the message is not found: it was delivered or cancelled, or never parked.

    \b
    Examples:
      delayer show 48213@1795291200000
      delayer show 48213 --body > order.json
    """
    try:
        asked = read_token(token)
    except ValueError as error:
        raise Misused(f"expected {error}, found {token!r}") from None
    settings = request_of(context).settings()
    found = ask_store(store_url(settings), "show", lambda connection: detail.show(connection, asked))
    if isinstance(found, FoundIn):
        note(detail.absent(asked, found))
        say_native(settings)
        context.exit(ExitCode.FOUND)
    if whole_body:
        click.echo(found.body, nl=False)
    elif as_json:
        print_json(_json_of(found))
    else:
        _print(found)


def fate(found: FullMessage) -> str:
    """The future of the message, in a sentence."""
    entry = found.entry
    return detail.fate(found, address(entry.to_exchange, entry.to_key), found.owner, iso)


def _json_of(found: FullMessage) -> dict[str, Any]:
    held = found.held
    return {
        **json_of(found.entry),
        "where": found.where.value,
        "sound": found.sound,
        "owner": found.owner,
        "owner_alive": found.owned,
        "held": None if held is None else held._asdict(),
        "fate": fate(found),
        "body": reading.preview(found.body),
        "body_is_text": found.body[: reading.PREVIEW].hex(" ") != reading.preview(found.body),
    }


def _print(found: FullMessage) -> None:
    entry, hold = found.entry, found.held
    said = reading.read(entry.properties)
    due_ms = entry.place.due_us // 1000
    where = found.where.value + ("" if entry.place.segment is None else f" {entry.place.segment}")
    rows: list[tuple[object, ...]] = [
        ("id", entry.place.token),
        ("where", f"{where}, lane {entry.place.lane} ({found.owner}{', running' if found.owned else ', free'})"),
        ("due", f"{iso(due_ms)}, {away(due_ms, time.time_ns() // 1_000_000)}"),
        ("will happen", fate(found)),
        ("parked", iso(entry.parked_ms)),
        ("came in at", address(entry.exchange, entry.routing_key)),
        ("route", reading.text(entry.route) or '"" (straight to the queue)'),
    ]
    if hold is not None:
        rows.append(("held", f"since {iso(hold.held_ms)}, {hold.attempts} attempts: {hold.reason}"))
    if entry.key is not None:
        rows.append(("key", reading.text(entry.key)))
    if said.broken:
        rows.append(("not readable", said.broken))
    rows += [(name, value) for name, value in said.properties.items()]
    print_table(["", ""], rows)
    if said.headers:
        click.echo()
        print_table(["header", "type", "value"], said.headers)
    more = f", the first {reading.PREVIEW}" if entry.size > reading.PREVIEW else ""
    click.echo(f"\nbody: {entry.size} bytes{more}")
    for line in reading.preview(found.body).splitlines():
        # A message must not be able to control the terminal.
        click.echo("".join(one if one.isprintable() or one == "\t" else f"\\x{ord(one):02x}" for one in line))


@click.command("audit-log", short_help="Show the changes that operators made: who, when, what, how many.")
@limit_option
@click.option("--before", type=click.IntRange(1), metavar="NUMBER", help="Entries before this one.")
@as_json
@click.pass_context
def audit_log(context: click.Context, *, limit: int, before: int | None, as_json: bool) -> None:
    """Show the audit log, the latest entry first: every cancel, reschedule, retry, drop, drain and import.

    An interrupted command is in the log with the number of messages that it reached.

    \b
    Examples:
      delayer audit-log
      delayer audit-log --limit 5 --json
    """
    url = store_url(request_of(context).settings())
    found = ask_store(url, "audit-log", lambda connection: audit_trail.listed(connection, limit, before))
    if as_json:
        print_json([one._asdict() for one in found])
        return
    rows = [(one.id, iso(one.at_ms), one.who, one.verb, one.messages, one.asked) for one in found]
    if rows:
        print_table(["", "when", "who", "command", "messages", "arguments"], rows, right=(0, 4))
    else:
        click.echo("The audit log is empty.")
